"""A folder that appears whole or not at all. Needs the standard library only."""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lse_mlx.checkpoints.disk import NO_ROOM, full_sync
from lse_mlx.errors import CheckpointError

UNFINISHED = "unfinished-"
"""What the random part of a name begins with, so that nobody's own folder is taken for one."""

Lock = Callable[[int, int], object]

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


class FolderTaken(CheckpointError):
    """The place of a new folder is taken."""


class FolderNotWritable(CheckpointError):
    """No folder can be made in this place; `fault` says why, without a way out."""

    def __init__(self, fault: str, way_out: str):
        super().__init__(f"{fault}: {way_out}.")
        self.fault = fault


@contextmanager
def new_folder(destination: Path, flock: Lock = fcntl.flock) -> Iterator[Path]:
    """Yield a fresh folder beside `destination`, which is renamed to it at the end.

    Its name is `<destination's name>.unfinished-<random>`, less the end of a long name. The parent is
    made where it is missing. Files, the folder and its parent are on disk before anyone sees
    `destination`. On any failure the fresh folder is removed. After success, folders that killed
    processes left here are swept: a process at work holds a lock on its folder, so only those of
    ended ones go. Where a mount keeps locks to one host (some NFS), another host may remove a folder
    at work; its process then fails with a sentence, and what it was making is made at the next start.

    flock: locks an open folder, as fcntl.flock; where a file system has no such locks nothing is
    swept. Raises FolderTaken when `destination` exists, or came to exist meanwhile; and
    FolderNotWritable when no folder can be made here; CheckpointError when there is no room.
    """
    if os.path.lexists(destination):
        raise _taken(destination)
    try:
        folder, lock = _make(destination, flock)
    except OSError as error:
        raise _not_made(destination, error) from error
    try:
        yield folder
        _sync_files(folder)
        if os.path.lexists(destination):  # a rename would replace an empty folder
            raise _taken(destination)
        try:
            folder.rename(destination)
        except OSError as error:
            if error.errno in _TAKEN:
                raise _taken(destination) from error
            raise
        _sync_folder(destination.parent)
    except BaseException:
        os.close(lock)  # first: there may be no more open files, and to remove a folder takes one
        shutil.rmtree(folder, ignore_errors=True)
        raise
    os.close(lock)
    sweep(destination, flock)


@contextmanager
def refusals_told(source: Path, destination: Path) -> Iterator[None]:
    """What the system refuses while `source` is converted to `destination` becomes a sentence."""
    try:
        yield
    except BrokenPipeError:  # no file: whoever shows the progress writes to one
        raise
    except MemoryError as error:
        raise CheckpointError(
            f"There is not enough memory to convert {source}: end other programs and try again."
        ) from error
    except OSError as error:
        if error.errno in NO_ROOM:
            raise CheckpointError(
                f"The disk of {destination.parent} became full while {source} was converted "
                "(nothing of it was left there): make room or name a folder on another disk."
            ) from error
        raise CheckpointError(
            f"{source} could not be converted to {destination} ({error.strerror or error}): "
            "see that both can be used and convert it again."
        ) from error


def check_writable(destination: Path) -> None:
    """Raise what `new_folder` would where no folder can be made beside `destination`."""
    folder = _fresh_name(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        raise _not_made(destination, error) from error
    with suppress(OSError):  # somebody may be sweeping it
        folder.rmdir()


def check_new(destination: Path) -> None:
    """Raise what `new_folder` would at its beginning, before anything long is done for it."""
    if os.path.lexists(destination):
        raise _taken(destination)
    check_writable(destination)


def sweep(destination: Path, flock: Lock = fcntl.flock) -> None:
    """Remove the unfinished folders of `destination` whose processes have ended.

    What cannot be locked or removed stays, without a word.
    """
    ours = re.compile(re.escape(_prefix(destination)) + "[0-9a-f]{16}")
    try:
        left = [entry for entry in destination.parent.iterdir() if ours.fullmatch(entry.name)]
    except OSError:
        return
    for folder in left:
        with suppress(OSError), _locked(folder, flock):
            shutil.rmtree(folder, ignore_errors=True)


class JudgedFolder:
    """A folder held open while it is judged, so that it is not mistaken for one that replaces it."""

    def __init__(self, folder: Path, flock: Lock = fcntl.flock):
        """Raises OSError where `folder` is no folder that can be opened."""
        self._folder, self._flock = folder, flock
        self._open = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def held(self) -> list[tuple[str, bool]]:
        """What goes with the folder: names, and whether each is a folder. Nothing goes of a link."""
        if self._folder.is_symlink():
            return []
        with os.scandir(self._open) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def remove(self) -> bool:
        """Remove the folder; False if another is in its place by now, which stays.

        Of several processes that judged one folder, one removes it. Raises OSError where it cannot
        be moved away.
        """
        if self._folder.is_symlink():  # made by a person: what it leads to is theirs
            self._folder.unlink()
            return True
        with suppress(OSError):  # where there are no locks, the time between two calls is all
            self._flock(self._open, fcntl.LOCK_EX)
        if not _is_at(self._open, self._folder):
            return False
        away = _fresh_name(self._folder)
        self._folder.rename(away)  # gone at once, and swept if removing it is interrupted
        shutil.rmtree(away, ignore_errors=True)
        return True

    def __enter__(self) -> "JudgedFolder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._open)


def _prefix(destination: Path) -> str:
    """What a fresh name begins with: of a long name less, so that all of it has 255 bytes or less."""
    name = destination.name
    while len(os.fsencode(name)) > 255 - len(f".{UNFINISHED}") - 16:
        name = name[:-1]
    return f"{name}.{UNFINISHED}"


def _fresh_name(destination: Path) -> Path:
    return destination.with_name(_prefix(destination) + secrets.token_hex(8))


def _make(destination: Path, flock: Lock) -> tuple[Path, int]:
    """A fresh folder and the descriptor that holds its lock."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = _fresh_name(destination)
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # swept between the two calls
        except OSError:  # as where no more files may be open
            folder.rmdir()
            raise
        try:
            flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)  # somebody is sweeping it
            continue
        except OSError:
            return folder, lock  # no locks here: nobody sweeps either
        if _is_at(lock, folder):
            return folder, lock
        os.close(lock)  # swept before it was locked


@contextmanager
def _locked(folder: Path, flock: Lock) -> Iterator[None]:
    """Nobody works in `folder`, nor can begin to inside the block; OSError where somebody does."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _is_at(descriptor: int, folder: Path) -> bool:
    try:
        there = os.stat(folder, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _sync_files(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(place, name), os.O_RDONLY)
            try:
                full_sync(descriptor)
            finally:
                os.close(descriptor)
        _sync_folder(Path(place))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        full_sync(descriptor)
    except OSError as error:  # some network file systems do not sync folders
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _taken(destination: Path) -> FolderTaken:
    return FolderTaken(f"{destination} exists already: remove it or name another place.")


def _not_made(destination: Path, error: OSError) -> CheckpointError:
    parent, why = destination.parent, error.strerror
    if error.errno in NO_ROOM:
        return CheckpointError(f"There is no room in {parent} ({why}): free some and try again.")
    return FolderNotWritable(
        f"No folder can be made in {parent} ({why})", "make it writable or name another place"
    )
