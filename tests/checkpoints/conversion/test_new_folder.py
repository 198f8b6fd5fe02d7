"""A new folder appears whole or not at all, and what killed processes left goes."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lse_mlx.checkpoints.conversion.new_folder import (
    FolderNotWritable,
    FolderTaken,
    JudgedFolder,
    check_writable,
    new_folder,
    sweep,
)
from lse_mlx.errors import CheckpointError
from tests.checkpoints.conversion.dflash2_sources import unfinished

HOLD = """
import sys
from pathlib import Path
from lse_mlx.checkpoints.conversion.new_folder import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    print(folder, flush=True)
    sys.stdin.readline()
"""


def holder(destination: Path) -> subprocess.Popen[str]:
    """A process inside its new folder; its first line is the folder, a line on its input ends it."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLD, str(destination)]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout and process.stdout.readline().strip()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def make(destination: Path, text: str = "whole") -> None:
    with new_folder(destination) as folder:
        (folder / "file").write_text(text)


def test_it_appears_at_the_end_with_all_it_holds(tmp_path):
    destination = tmp_path / "missing" / "parents" / "made"
    with new_folder(destination) as folder:
        assert folder.parent == destination.parent
        assert folder.name.startswith("made.")
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("text")
        assert not destination.exists()
    assert (destination / "inner" / "file").read_text() == "text"
    assert os.listdir(destination.parent) == ["made"]


def test_others_may_read_it_as_any_folder_made_here(tmp_path):
    make(tmp_path / "new")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path, failure):
    def fail() -> None:
        with new_folder(tmp_path / "made") as folder:
            (folder / "half").write_text("half")
            raise failure

    with pytest.raises(failure):
        fail()
    assert os.listdir(tmp_path) == []


def test_what_is_there_already_stays_as_it_is(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "empty", "link"):
        with pytest.raises(FolderTaken, match=f"{name} exists already"):
            make(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path / "empty") == []
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "link"]


def make_late(destination: Path, other: str) -> None:
    with new_folder(destination) as folder:
        (folder / "file").write_text("late")
        if other == "file":
            destination.write_text("first")
        else:
            destination.mkdir()
        if other == "folder":
            (destination / "file").write_text("first")


@pytest.mark.parametrize("other", ["folder", "empty", "file"])
def test_of_two_the_first_stays(tmp_path, other):
    destination = tmp_path / "made"
    with pytest.raises(FolderTaken):
        make_late(destination, other)
    assert os.listdir(tmp_path) == ["made"]
    if other == "file":
        assert destination.read_text() == "first"
    else:
        held = {"folder": ["file"], "empty": []}[other]
        assert os.listdir(destination) == held
    if other == "folder":
        assert (destination / "file").read_text() == "first"


def test_success_sweeps_what_the_killed_left_and_spares_who_is_at_work(tmp_path):
    destination = tmp_path / "made"
    killed = [holder(destination), holder(destination)]
    for process in killed:
        kill(process)
    working = holder(destination)
    try:
        assert len(unfinished(tmp_path)) == 3
        make(destination)
        [left] = unfinished(tmp_path)
        assert (tmp_path / left / "half").read_text() == "half"
    finally:
        kill(working)
    sweep(destination)
    assert os.listdir(tmp_path) == ["made"]


@pytest.mark.parametrize("letter", ["n", "ü"])
def test_the_longest_name_will_do(tmp_path, letter):
    destination = tmp_path / (letter * (255 // len(letter.encode())))
    kill(holder(destination))
    make(destination)
    assert os.listdir(tmp_path) == [destination.name]
    with JudgedFolder(destination) as judged:
        assert judged.remove()
    assert os.listdir(tmp_path) == []


def test_where_no_more_files_may_be_open_nothing_is_left(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    following = os.open(tmp_path, os.O_RDONLY)
    os.close(following)
    resource.setrlimit(resource.RLIMIT_NOFILE, (following, limits[1]))
    try:
        with pytest.raises(FolderNotWritable, match="Too many open files"):
            make(tmp_path / "made")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert os.listdir(tmp_path) == []


def test_a_failure_sweeps_nothing(tmp_path):
    kill(holder(tmp_path / "made"))
    with pytest.raises(FolderTaken):
        make_late(tmp_path / "made", "folder")
    assert len(unfinished(tmp_path)) == 1


def test_nothing_of_another_name_is_swept(tmp_path):
    digits = "0123456789abcdef"
    others = (
        "made.backup",
        "made.unfinished-old",
        f"made.unfinished-{digits}.tar",
        f"other.unfinished-{digits}",
        f"my-made.unfinished-{digits}",
        f"maXde.unfinished-{digits}",
    )
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / f"made.unfinished-{digits[::-1]}").symlink_to(tmp_path / "made.backup")
    (tmp_path / "made.backup" / "precious").write_text("kept")
    file = tmp_path / f"made.unfinished-{'a' * 16}"
    file.write_text("a file")
    before = sorted(os.listdir(tmp_path))
    make(tmp_path / "made")
    make(tmp_path / "ma.de")
    assert sorted([*before, "made", "ma.de"]) == sorted(os.listdir(tmp_path))
    assert (tmp_path / "made.backup" / "precious").exists()


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOTSUP, "no locks here")


def test_a_file_system_without_locks_works_and_is_not_swept(tmp_path):
    kill(holder(tmp_path / "made"))
    with new_folder(tmp_path / "made", no_locks) as folder:
        (folder / "file").write_text("whole")
    assert (tmp_path / "made" / "file").read_text() == "whole"
    assert len(unfinished(tmp_path)) == 1
    with JudgedFolder(tmp_path / "made", no_locks) as judged:
        assert judged.remove()
    assert not (tmp_path / "made").exists()


def test_one_swept_before_it_was_locked_is_replaced(tmp_path):
    swept: list[str] = []

    def late_lock(descriptor: int, operation: int) -> None:
        if not swept:
            swept.extend(unfinished(tmp_path))
            sweep(tmp_path / "made")
            assert unfinished(tmp_path) == []
        fcntl.flock(descriptor, operation)

    with new_folder(tmp_path / "made", late_lock) as folder:
        assert swept and folder.name not in swept
        (folder / "file").write_text("whole")
    assert (tmp_path / "made" / "file").exists()


def test_one_that_is_being_swept_is_given_up(tmp_path):
    sweeper: list[int] = []

    def contested(descriptor: int, operation: int) -> None:
        if not sweeper:
            [name] = unfinished(tmp_path)
            sweeper.append(os.open(tmp_path / name, os.O_RDONLY))
            fcntl.flock(sweeper[0], fcntl.LOCK_EX)
        fcntl.flock(descriptor, operation)

    with new_folder(tmp_path / "made", contested) as folder:
        assert len(unfinished(tmp_path)) == 2
        (folder / "file").write_text("whole")
    os.close(sweeper[0])
    assert (tmp_path / "made" / "file").exists()
    sweep(tmp_path / "made")
    assert os.listdir(tmp_path) == ["made"]


def test_many_at_once_never_lose_a_folder_they_work_in(tmp_path):
    destination = tmp_path / "made"

    def work(number: int) -> int:
        made = 0
        for _ in range(25):
            try:
                make(destination, str(number))
            except FolderTaken:
                continue
            with JudgedFolder(destination) as judged:
                made += judged.remove()
        return made

    with ThreadPoolExecutor(4) as pool:
        made = sum(pool.map(work, range(4)))
    assert made > 0
    assert os.listdir(tmp_path) == []


def test_a_judged_folder_that_was_replaced_stays(tmp_path):
    destination = tmp_path / "made"
    make(destination, "old")
    with JudgedFolder(destination) as late:
        with JudgedFolder(destination) as first:
            assert first.remove()
        make(destination, "new")
        assert not late.remove()
    assert (destination / "file").read_text() == "new"


def test_of_a_link_only_the_link_is_removed(tmp_path):
    make(tmp_path / "elsewhere")
    (tmp_path / "made").symlink_to("elsewhere")
    with JudgedFolder(tmp_path / "made") as judged:
        assert judged.remove()
    assert os.listdir(tmp_path) == ["elsewhere"]
    assert (tmp_path / "elsewhere" / "file").exists()


def test_where_no_folder_can_be_made_one_sentence_says_so(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for function in (make, check_writable):
        with pytest.raises(FolderNotWritable, match=r"No folder can be made in .*file \(") as told:
            function(tmp_path / "file" / "made")
        assert isinstance(told.value, CheckpointError)


def test_asking_whether_one_can_be_made_leaves_nothing(tmp_path):
    check_writable(tmp_path / "parent" / "made")
    assert os.listdir(tmp_path / "parent") == []
