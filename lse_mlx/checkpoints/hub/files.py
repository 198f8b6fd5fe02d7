"""The files of a checkpoint on the hub: which are needed, and whether the cache has them as listed."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lse_mlx.checkpoints.complete import FOREIGN
from lse_mlx.checkpoints.hashing import content_name
from lse_mlx.checkpoints.names import CONFIG
from lse_mlx.checkpoints.safetensors_header import read_header
from lse_mlx.errors import CheckpointError, printable

NEEDED = (
    "*.json",
    "model*.safetensors",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)
"""Patterns of the files that a checkpoint is loaded from. Never code, never pickles."""

PART = ".incomplete"


@dataclass(frozen=True)
class RemoteFile:
    """A file in the hub's list.

    size: bytes; blob: the name of its contents in the cache, a SHA-256 if `large`, else Git's hash
    git: Git's hash of what it keeps of the file
    """

    name: str
    size: int
    blob: str
    git: str
    large: bool


@dataclass(frozen=True)
class Place:
    """Where a repository's files come from and where they lie."""

    repository: str
    commit: str
    endpoint: str | None
    storage: Path
    locks: Path

    @property
    def snapshot(self) -> Path:
        return self.storage / "snapshots" / self.commit

    def blob(self, file: RemoteFile) -> Path:
        return self.storage / "blobs" / file.blob

    def part(self, file: RemoteFile) -> Path:
        """Where the bytes of `file` gather until it is whole."""
        return self.storage / "blobs" / f"{file.blob}{PART}"

    def name(self, file: RemoteFile) -> None:
        """Give the blob of `file` its name in the snapshot. Raises OSError."""
        self.snapshot.mkdir(parents=True, exist_ok=True)
        path = self.snapshot / file.name
        try:
            path.symlink_to(os.path.relpath(self.blob(file), self.snapshot))
        except FileExistsError:  # another process was first
            pass
        except OSError:  # a disk without links
            self.blob(file).replace(path)

    def part_size(self, file: RemoteFile) -> int:
        """Bytes of `file` that an earlier download left."""
        with suppress(OSError):
            return min(self.part(file).stat().st_size, file.size)
        return 0


def discard(path: Path) -> None:
    """Remove a damaged file of the cache: the name in the snapshot and what it points to."""
    if path.is_symlink():
        target = path.resolve()
        path.unlink()
        if target.parent.name == "blobs":
            target.unlink(missing_ok=True)
    else:
        path.unlink(missing_ok=True)


def changed(place: Place, file: RemoteFile) -> CheckpointError:
    """The error for a file that is another one than the hub's list said."""
    return CheckpointError(
        f"{file.name} of {place.repository} is not what the hub's list says, it changed or came "
        "damaged: start the download again."
    )


def is_needed(name: str) -> bool:
    """Whether the file `name` of a repository is to be downloaded.

    None from its folders, and none whose name a terminal would obey.
    """
    plain = not any(one in name for one in "/\\:") and not name.startswith(".")
    return plain and name.isprintable() and any(fnmatchcase(name, one) for one in NEEDED)


def check_usable(wanted: object, names: Sequence[str], found: Sequence[RemoteFile]) -> None:
    """Raise CheckpointError unless the needed files `found` among `names` can be a checkpoint."""
    kept = {file.name for file in found}
    if CONFIG not in kept:
        raise CheckpointError(
            f"{wanted} has no config.json and is no checkpoint: choose another repository."
        )
    if not any(name.endswith(".safetensors") for name in kept):
        foreign = sorted(name for name in names if name.endswith(FOREIGN))
        besides = f" but {printable(foreign[0])}, which is not read" if foreign else ""
        raise CheckpointError(
            f"{wanted} has no model.safetensors{besides}: choose a build with safetensors."
        )


def as_listed(path: Path, file: RemoteFile) -> bool:
    """Whether `path` may be the listed file: by size, its header, and Git's hash if it is small."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    if not file.large:
        return content_name(path, large=False) == file.blob
    stored = path.resolve()  # its name says what it holds: it was hashed on its way in
    if stored.parent.name == "blobs" and stored.name != file.blob:
        return False
    return _header_holds(path, file)


def _header_holds(path: Path, file: RemoteFile) -> bool:
    if not file.name.endswith(".safetensors"):
        return True
    try:
        read_header(path)
    except CheckpointError:
        return False
    return True
