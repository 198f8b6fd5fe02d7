"""Conversions that are killed, run against each other, or find no room."""

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lse_mlx.checkpoints.conversion.first_use import prepare_drafter
from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.errors import CheckpointError
from tests.checkpoints.conversion.dflash2_sources import (
    Said,
    prepare,
    problems,
    sha256,
    start,
    unfinished,
    write_source,
)

LARGE = {f"{name}.weight": (4096, 640) for name in "abcd"}
"""20 MiB of source."""
ROUNDS = 10
AT_ONCE = 4


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("large"), LARGE)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Let a process that waits go on to its end: the last line of its output, and what it said."""
    output, said = process.communicate("go\n")
    return output.splitlines()[-1], said


def kill_after(process: subprocess.Popen[str], phase: str, step: int, pause: float) -> bool:
    """Kill a process `pause` seconds after it told of a phase for the `step`th time.

    Returns whether it told of it so often.
    """
    assert process.stdin and process.stderr
    process.stdin.write("go\n")
    process.stdin.flush()
    seen = 0
    for line in process.stderr:
        seen += f" phase={phase} " in line
        if seen == step:
            break
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return seen == step


def test_killed_at_ten_moments_it_ends_valid_each_time(large, tmp_path):
    rng = random.Random(20)
    place, cache = large / "lse-q8g64", tmp_path / "cache"
    before = sha256(large / "model.safetensors")
    steps = {"hash-source": 4, "quantize": 90, "finish": 3}
    tried = set()
    for number in range(ROUNDS):
        if number % 2 and place.is_dir():  # with an invalid conversion in the way
            os.truncate(place / "model.safetensors", 1000)
        elif place.is_dir():
            for name in os.listdir(place):
                (place / name).unlink()
            place.rmdir()
        phase = rng.choice(list(steps))
        tried.add(phase)
        step, pause = rng.randint(1, steps[phase]), rng.uniform(0, 0.02)
        assert kill_after(start(large, cache), phase, step, pause)
        found, _ = finish(start(large, cache))
        assert found == str(place)
        assert problems(place, large) == [], (number, phase)
        assert unfinished(large) == [], (number, phase)
    assert tried == set(steps)
    assert sha256(large / "model.safetensors") == before


def test_what_several_killed_processes_left_goes_with_the_next_success(tmp_path):
    source = write_source(tmp_path / "source", LARGE)
    for number in range(3):
        assert kill_after(start(source, tmp_path / "cache"), "quantize", 10 + number, 0)
        assert not (source / "lse-q8g64").exists()
    assert len(unfinished(source)) == 3
    finish(start(source, tmp_path / "cache"))
    assert unfinished(source) == []
    assert problems(source / "lse-q8g64", source) == []


@pytest.mark.parametrize("stale", [False, True], ids=["none cached", "an invalid one cached"])
@pytest.mark.parametrize("count", [2, AT_ONCE])
def test_at_once_all_end_with_a_valid_conversion(tmp_path, count, stale):
    shapes = {f"{name}.weight": (1024, 1024) for name in "abcd"}
    source = write_source(tmp_path / "source", shapes)
    place = source / "lse-q8g64"
    if stale:
        prepare(source, CacheSettings(user_cache=tmp_path))
        os.truncate(place / "model.safetensors", 1000)
    processes = [start(source, tmp_path / "cache") for _ in range(count)]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    ended = [process.communicate() for process in processes]
    assert [out.strip() for out, _ in ended] == [str(place)] * count, ended
    assert problems(place, source) == []
    assert unfinished(source) == []
    assert not (tmp_path / "cache").exists()
    assert prepare(source, CacheSettings(user_cache=tmp_path))[1].phases == []


class ChangedMeanwhile(Said):
    """Progress that puts other weights into the source at a moment of the work."""

    def __init__(self, source: Path, moment: str):
        super().__init__()
        self._source, self._moment = source, moment

    def note(self, text: str) -> None:
        super().note(text)
        self._pass(text.split()[0])

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        super().advance(phase, done, total, tensor)
        self._pass(f"{phase} {'ends' if done == total else done}")

    def _pass(self, moment: str) -> None:
        if moment == self._moment:
            write_source(self._source, seed=7)


@pytest.mark.parametrize("moment", ["hash-source ends", "quantize 0", "finish ends"])
def test_a_source_that_changes_meanwhile_is_not_taken_for_converted(source, settings, moment):
    with pytest.raises(CheckpointError, match=r"changed while .* again"):
        prepare_drafter(source, settings, ChangedMeanwhile(source, moment))
    assert sorted(os.listdir(source)) == ["config.json", "model.safetensors"]
    place, _ = prepare(source, settings)
    assert problems(place, source) == []


class Robbed(Said):
    """Progress of a process whose conversion disappears while it hashes the source."""

    def __init__(self, place: Path):
        super().__init__()
        self._place = place

    def note(self, text: str) -> None:
        super().note(text)
        if text.startswith("hashing"):
            shutil.rmtree(self._place)


def test_what_another_process_discards_meanwhile_is_made_again(source, settings):
    place, _ = prepare(source, settings)
    write_source(source, seed=1)
    assert prepare_drafter(source, settings, Robbed(place)) == place
    assert problems(place, source) == []


class Overtaken(Said):
    """Progress of a process that another one overtakes when it is about to discard."""

    def __init__(self, source: Path, settings: CacheSettings):
        super().__init__()
        self._source, self._settings = source, settings

    def note(self, text: str) -> None:
        super().note(text)
        if text.startswith("discarding"):
            assert "quantize" in prepare(self._source, self._settings)[1].phases


def test_what_another_process_put_there_meanwhile_is_not_discarded(source, settings):
    place, _ = prepare(source, settings)
    os.truncate(place / "model.safetensors", 1000)
    said = Overtaken(source, settings)
    assert prepare_drafter(source, settings, said) == place
    assert said.phases == []
    assert problems(place, source) == []


class Crossed(Said):
    """Progress of a process in whose way somebody puts the rest of a conversion, for some times."""

    def __init__(self, place: Path, times: int):
        super().__init__()
        self._place, self._times = place, times

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        super().advance(phase, done, total, tensor)
        if phase == "finish" and done == total and self._times:
            self._times -= 1
            self._place.mkdir()
            (self._place / "config.json").write_text("{}")


def test_what_half_a_removal_left_in_the_way_is_met_once_more(source, settings):
    place = source / "lse-q8g64"
    assert prepare_drafter(source, settings, Crossed(place, 1)) == place
    assert problems(place, source) == []
    shutil.rmtree(place)
    with pytest.raises(CheckpointError, match=r"came to be while .* remove it and try again"):
        prepare_drafter(source, settings, Crossed(place, 2))
    assert unfinished(source) == []


# No room


LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
"""


def test_a_file_that_may_not_grow_is_one_sentence(tmp_path):
    # The limit counts for root too, and Python ignores the signal that comes with it.
    source = write_source(tmp_path / "source", {"a.weight": (1024, 1024)})
    before = sha256(source / "model.safetensors")
    process = start(source, tmp_path / "cache", LIMIT)
    output, said = process.communicate("go\n")
    assert (process.returncode, output) == (1, "ready\n")
    assert said.splitlines()[-1].startswith("error: ")
    assert os.strerror(errno.EFBIG) in said.splitlines()[-1]
    assert "Traceback" not in said
    assert sorted(os.listdir(source)) == ["config.json", "model.safetensors"]
    assert sha256(source / "model.safetensors") == before


class Filling(Said):
    """Progress that fills a disk when the matrices are at work."""

    def __init__(self, disk: Path):
        super().__init__()
        self._disk = disk

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        if phase == "quantize" and done == 0:
            with (self._disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
                while file.write(b"x" * (1 << 20)):
                    pass
        super().advance(phase, done, total, tensor)


def test_a_disk_that_fills_up_meanwhile_is_one_sentence(disk, settings):
    source = write_source(disk / "source", {"a.weight": (1024, 1024)})
    before = sha256(source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"full.*make room"):
        prepare_drafter(source, settings, Filling(disk))
    assert sorted(os.listdir(source)) == ["config.json", "model.safetensors"]
    assert sha256(source / "model.safetensors") == before
    (disk / "filler").unlink()
    place, _ = prepare(source, settings)
    assert problems(place, source) == []


def test_too_small_a_disk_is_told_before_anything_is_written(disk, settings):
    source = write_source(disk / "source", {"a.weight": (8192, 1024)})
    (disk / "other").write_bytes(b"x" * (10 << 20))
    said = Said()
    room = r"needs .* MB in .* are free: make room there, or set LSE_DFLASH2_CACHE_DIR"
    with pytest.raises(CheckpointError, match=room):
        prepare_drafter(source, settings, said)
    assert said.phases == []  # nor was anything read that takes its time
    assert sorted(os.listdir(source)) == ["config.json", "model.safetensors"]
