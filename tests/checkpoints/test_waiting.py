"""That a wait ends."""

import subprocess
import sys

import pytest

from tests.checkpoints.waiting import read_line, wait_until


def test_a_wait_ends_when_its_condition_holds_or_never_does() -> None:
    left = [1, 2, 3]
    wait_until(lambda: not left or left.clear())
    assert not left
    with pytest.raises(AssertionError, match="in vain"):
        wait_until(lambda: False, seconds=0.05)


def test_a_process_that_says_nothing_is_killed() -> None:
    program = "import time; print('a', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert read_line(process) == "a\n"
        with pytest.raises(AssertionError, match="said nothing"):
            read_line(process, seconds=0.1)
        assert process.wait(60) != 0
