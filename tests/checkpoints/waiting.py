"""Waiting in tests, with an end: what never comes fails instead of standing still."""

import subprocess
import threading
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Return once `condition` holds; fail where it does not within a time that no test needs."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.01)


def read_line(process: subprocess.Popen[str], seconds: float = 60) -> str:
    """The next line that `process` prints. It is killed, and the test fails, where none comes."""
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    assert line, f"the process ended, or said nothing for {seconds} s"
    return line
