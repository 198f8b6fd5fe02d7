"""Files that may be read to their end. Needs the standard library only."""

import errno
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Open the file `path`, or the one it links to, for reading.

    Raises OSError if it cannot be opened, and for what is no regular file: a pipe would wait for a
    writer, and a device may have no end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return path.open("rb")
