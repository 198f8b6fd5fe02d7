"""SHA-256 of a source's weights, known without reading them wherever that can be.

Needs the standard library only.
"""

import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lse_mlx.checkpoints.hashing import SHA256, blob_name, file_stat, hash_files
from lse_mlx.checkpoints.progress import Progress
from lse_mlx.errors import CheckpointError


@dataclass
class SourceHashes:
    """The hashes of `files`, the weights of one source.

    places: the conversions of it; a stamp beside each, `<its name>.source-stat`, holds for each file
    a line `<st_dev>:<st_ino>:<size>:<mtime in ns> <hash>` of what it was when it was hashed.
    phase: what the progress of hashing is called
    """

    files: tuple[Path, ...]
    places: Sequence[Path]
    progress: Progress
    phase: str = "hash-source"
    _held: tuple[list[str], tuple[str, ...]] | None = field(default=None, init=False)
    _computed: bool = field(default=False, init=False)

    def known(self) -> tuple[str, ...] | None:
        """The hashes as they are known without reading `files`: from before, stamps, or blobs."""
        stats = self.stats()
        if self._held is not None and self._held[0] == stats:
            return self._held[1]
        for place in self.places:
            if stamped := _read_stamp(stamp_path(place), stats):
                return self._hold(stats, stamped)
        blobs = tuple(name for file in self.files if (name := blob_name(file)))
        return self._hold(stats, blobs) if len(blobs) == len(self.files) else None

    def get(self, why: str) -> tuple[str, ...]:
        """The hashes, computed after a note that says `why` where they are not known."""
        known = self.known()
        if known is not None:
            return known
        self.progress.note(f"hashing the source, {why}: {self.files[0].parent}")
        return self.compute()

    def compute(self) -> tuple[str, ...]:
        """Read `files` and hash them, once in the life of this object unless they change.

        Raises CheckpointError for a file that changes meanwhile, or that is not what the name of
        its blob in the Hugging Face cache says.
        """
        stats = self.stats()
        if self._computed and self._held is not None and self._held[0] == stats:
            return self._held[1]
        hashes = hash_files(self.files, self.progress, self.phase)
        for file, value in zip(self.files, hashes, strict=True):
            if blob_name(file) not in (None, value):
                raise CheckpointError(
                    f"{file} is damaged (its hash is {value}, but its blob in the Hugging Face "
                    "cache is named for another): delete that blob and download it again."
                )
        self._computed = True
        self._hold(stats, hashes)
        self.check_unchanged()
        return hashes

    def _hold(self, stats: list[str], hashes: tuple[str, ...]) -> tuple[str, ...]:
        self._held = (stats, hashes)
        return hashes

    def stats(self) -> list[str]:
        """What tells whether a file was replaced or written to, for each of `files`."""
        return [file_stat(file) for file in self.files]

    def check_unchanged(self) -> None:
        """Raise CheckpointError unless `files` are those whose hashes were given out last."""
        if self._held is None or self._held[0] != self.stats():
            raise CheckpointError(
                f"The weights in {self.files[0].parent} changed while they were read: "
                "try again when they are complete."
            )

    def stamp(self, place: Path) -> None:
        """Note for the next start what was hashed; quietly not where nothing can be written."""
        if self._held is None:
            return
        text = _stamp_text(*self._held)
        for at in [place, *(other for other in self.places if other != place)]:
            with suppress(OSError):
                if _held_in(stamp_path(at)) != text:
                    _write(stamp_path(at), text)
                return


def stamp_path(place: Path) -> Path:
    """The stamp of the conversion in `place`."""
    return place.with_name(f"{place.name}.source-stat")


def _stamp_text(stats: list[str], hashes: tuple[str, ...]) -> bytes:
    return "".join(f"{s} {h}\n" for s, h in zip(stats, hashes, strict=True)).encode()


def _held_in(stamp: Path) -> bytes | None:
    """The text of a stamp; None where none can be read, or where something else has its name."""
    try:
        # A link is none of ours, and a pipe would never end.
        return stamp.read_bytes() if stat.S_ISREG(stamp.lstat().st_mode) else None
    except OSError:
        return None


def _write(stamp: Path, text: bytes) -> None:
    """Write a stamp whole, and never to what a link of its name leads to. Raises OSError."""
    stamp.parent.mkdir(parents=True, exist_ok=True)
    fresh = stamp.with_name(f"{stamp.name}.{secrets.token_hex(8)}")
    try:
        fresh.write_bytes(text)
        fresh.replace(stamp)
    finally:
        fresh.unlink(missing_ok=True)


def _read_stamp(path: Path, stats: list[str]) -> tuple[str, ...] | None:
    held = _held_in(path) or b""
    try:
        hashes = tuple(line.rpartition(" ")[2] for line in held.decode("ascii").splitlines())
    except UnicodeDecodeError:
        return None
    if len(hashes) != len(stats) or not all(SHA256.fullmatch(h) for h in hashes):
        return None
    return hashes if held == _stamp_text(stats, hashes) else None
