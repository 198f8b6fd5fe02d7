"""SHA-256 of a source's weights, known without reading them wherever that can be.

Needs the standard library only.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lse_mlx.checkpoints.conversion.manifest import hash_file
from lse_mlx.checkpoints.progress import Progress
from lse_mlx.errors import CheckpointError

SHA256 = re.compile("[0-9a-f]{64}")


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

    def changed(self) -> bool:
        """Whether `files` are no longer those whose hashes were given out last."""
        return self._held is None or self._held[0] != self.stats()

    def check_unchanged(self) -> None:
        """Raise CheckpointError if `changed`."""
        if self.changed():
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
                path = stamp_path(at)
                if not path.exists() or path.read_bytes() != text:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(text)
                return


def hash_files(files: Sequence[Path], progress: Progress, phase: str) -> tuple[str, ...]:
    """The SHA-256 of each of `files`; the phase goes over all of them."""
    summed = _Summed(progress, sum(file.stat().st_size for file in files))
    return tuple(summed.hash(file, phase) for file in files)


def stamp_path(place: Path) -> Path:
    """The stamp of the conversion in `place`."""
    return place.with_name(f"{place.name}.source-stat")


def file_stat(path: Path) -> str:
    """Device, inode, size and time of the file that `path` leads to."""
    try:
        s = path.stat()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): name the folder of a whole checkpoint."
        ) from error
    return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}"


def blob_name(path: Path) -> str | None:
    """The hash by which the Hugging Face cache names the file that the link `path` leads to."""
    try:
        name = os.path.basename(os.readlink(path))
    except OSError:
        return None
    return name if SHA256.fullmatch(name) else None


def _stamp_text(stats: list[str], hashes: tuple[str, ...]) -> bytes:
    return "".join(f"{s} {h}\n" for s, h in zip(stats, hashes, strict=True)).encode()


def _read_stamp(path: Path, stats: list[str]) -> tuple[str, ...] | None:
    try:
        held = path.read_bytes()
        hashes = tuple(line.rpartition(" ")[2] for line in held.decode("ascii").splitlines())
    except (OSError, UnicodeDecodeError):
        return None
    if len(hashes) != len(stats) or not all(SHA256.fullmatch(h) for h in hashes):
        return None
    return hashes if held == _stamp_text(stats, hashes) else None


@dataclass
class _Summed:
    """Progress over several files as over one."""

    progress: Progress
    total: int
    before: int = 0

    def hash(self, file: Path, phase: str) -> str:
        value = hash_file(file, self, phase)
        self.before += file.stat().st_size
        return value

    def note(self, text: str) -> None:
        self.progress.note(text)

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        self.progress.advance(phase, self.before + done, self.total, tensor)
