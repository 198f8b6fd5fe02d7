"""Room on disks, and bytes that are on them for good. Needs the standard library only."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lse_mlx.errors import CheckpointError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""What the system calls a full disk: of an OSError, its errno."""
SPARE = 16 << 20
"""Bytes that stay free beside what is written."""


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written where `folder` is or will be."""
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_room(
    folder: Path,
    needed: int,
    what: str,
    way_out: str = "name a folder on another disk",
    free: Callable[[Path], int] = free_bytes,
) -> None:
    """Raise CheckpointError where `needed` bytes, and SPARE beside them, do not fit into `folder`.

    what: takes them, and begins the sentence; way_out: what can be done besides making room
    """
    there = free(folder)
    if there < needed + SPARE:
        raise CheckpointError(
            f"{what} needs {human(needed + SPARE)} in {folder}, but {human(there)} are free: "
            f"make room there, or {way_out}."
        )


def human(size: int) -> str:
    """Bytes for a person, in powers of ten."""
    if size >= 1_000_000_000:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1_000_000 else f"{size} bytes"


def full_sync(descriptor: int) -> None:
    """Have what was written to an open file survive a power cut. Raises OSError.

    On macOS fsync leaves it in the drive's own cache, which F_FULLFSYNC empties; not every file system
    knows that.
    """
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        with suppress(OSError):
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)
