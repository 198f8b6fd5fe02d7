"""Folders under names that mlx-lm does not take for patterns."""

import glob
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def plain_name(folder: Path) -> Iterator[Path]:
    """`folder` under a name that mlx-lm, which takes it for a pattern, reads as itself."""
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        link = Path(place) / "checkpoint"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        yield link
