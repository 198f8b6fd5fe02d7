"""Room on disks. Needs the standard library only."""

import shutil
from pathlib import Path


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written where `folder` is or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def human(size: int) -> str:
    """Bytes for a person, in powers of ten."""
    if size >= 1_000_000_000:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1_000_000 else f"{size} bytes"
