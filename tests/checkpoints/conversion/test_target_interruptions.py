"""A target's conversion that is killed, whose source changes, or whose disk fails at the end."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lse_mlx.checkpoints.conversion import new_folder
from lse_mlx.checkpoints.conversion.target import convert_target, verify_target
from lse_mlx.errors import CheckpointError
from tests.checkpoints.conversion.dflash2_sources import Said, unfinished
from tests.checkpoints.conversion.target_sources import prepare, target
from tests.tiny_models import on_cpu, save_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return target(tmp_path / "source")


KILLED = """
import os, signal, sys
from pathlib import Path
from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.conversion.target import prepare_target
from lse_mlx.checkpoints.progress import Silent

class Killed(Silent):
    def advance(self, phase, done, total, tensor=""):
        if (phase, done) == (sys.argv[2], total):
            os.kill(os.getpid(), signal.SIGKILL)

prepare_target(Path(sys.argv[1]), CacheSettings(), Killed())
"""


@pytest.mark.parametrize("phase", ["quantize-target", "hash-output"])
def test_what_a_killed_process_left_is_no_conversion_and_goes(source, settings, phase):
    ran = subprocess.run([sys.executable, "-c", KILLED, str(source), phase], capture_output=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert len(unfinished(source)) == 1
    assert not (source / "lse-q4g64").exists()
    place, said = prepare(source, settings)
    assert place == source / "lse-q4g64"
    assert "quantize-target" in said.phases
    assert unfinished(source) == []
    assert verify_target(source, settings, Said()) == place


class ChangedMeanwhile(Said):
    """Progress that puts other weights into the source at the end of a phase."""

    def __init__(self, source: Path, phase: str):
        super().__init__()
        self._source, self._phase = source, phase

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        super().advance(phase, done, total, tensor)
        if phase == self._phase and done == total:
            save_checkpoint(self._source, seed=5)


@pytest.mark.parametrize("phase", ["hash-target", "quantize-target", "hash-output"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_source_that_changes_meanwhile_is_never_seen_converted(
    source, settings, monkeypatch, phase, by_hand
):
    before, moved = sorted(os.listdir(source)), []
    monkeypatch.setattr(Path, "rename", lambda *names: moved.append(names))
    said = ChangedMeanwhile(source, phase)

    def convert() -> None:
        with on_cpu():
            convert_target(source, source / "new", said)

    with pytest.raises(CheckpointError, match=r"changed while .* try again"):
        convert() if by_hand else prepare(source, settings, said)
    assert moved == []
    assert sorted(os.listdir(source)) == before


@pytest.mark.parametrize("call", ["sync", "rename"])
@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "became full"), (errno.EIO, "could not be converted")]
)
def test_a_disk_that_fails_at_the_very_end_is_one_sentence(
    source, settings, monkeypatch, call, number, words
):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    before = sorted(os.listdir(source))
    where = (new_folder, "full_sync") if call == "sync" else (Path, "rename")
    monkeypatch.setattr(*where, fail)
    with pytest.raises(CheckpointError, match=words) as told:
        prepare(source, settings)
    assert str(source) in str(told.value)
    assert sorted(os.listdir(source)) == before
