"""Hashes of files, and what tells without reading one that it is the same. Standard library only."""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lse_mlx.checkpoints.progress import Progress
from lse_mlx.checkpoints.regular_file import open_regular
from lse_mlx.errors import CheckpointError

SHA256 = re.compile("[0-9a-f]{64}")
CHUNK_BYTES = 8 << 20


def hash_file(path: Path, progress: Progress, phase: str) -> str:
    """The SHA-256 of a file as hexadecimal digits; `phase` goes from 0 to the file's size.

    Raises CheckpointError if it cannot be read or changes its size meanwhile.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    try:
        with open_regular(path) as file:
            total, done = path.stat().st_size, 0
            progress.advance(phase, 0, total)
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                done += count
                progress.advance(phase, min(done, total), total)
    except OSError as error:
        raise _unreadable(path, error) from error
    if done != total:
        raise CheckpointError(
            f"{path} went from {total} to {done} bytes while it was read: "
            "wait until nothing writes to it and try again."
        )
    return digest.hexdigest()


def hash_files(files: Sequence[Path], progress: Progress, phase: str) -> tuple[str, ...]:
    """The SHA-256 of each of `files`; the phase goes over all of them. Raises as `hash_file`."""
    summed = _Summed(progress, sum(_stat(file).st_size for file in files))
    return tuple(summed.hash(file, phase) for file in files)


def file_stat(path: Path) -> str:
    """Device, inode, size and time of the file that `path` leads to: another file has others."""
    s = _stat(path)
    return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}"


def blob_name(path: Path) -> str | None:
    """The hash by which the Hugging Face cache names the file that the link `path` leads to."""
    try:
        name = os.path.basename(os.readlink(path))
    except OSError:
        return None
    return name if SHA256.fullmatch(name) else None


def content_name(path: Path, large: bool) -> str:
    """What the hub calls the contents of `path`: its SHA-256 if `large`, else Git's hash of it."""
    digest = hashlib.sha256() if large else hashlib.sha1(usedforsecurity=False)
    with path.open("rb") as file:
        if not large:
            digest.update(b"blob %d\0" % os.fstat(file.fileno()).st_size)
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({error.strerror or error}): "
        "see that it is there and may be read, and try again."
    )


@dataclass
class _Summed:
    """Progress over several files as over one."""

    progress: Progress
    total: int
    before: int = 0

    def hash(self, file: Path, phase: str) -> str:
        value = hash_file(file, self, phase)
        self.before += _stat(file).st_size
        return value

    def note(self, text: str) -> None:
        self.progress.note(text)

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        self.progress.advance(phase, self.before + done, self.total, tensor)
