"""What tests of checkpoints share: small sources, places, a small disk."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lse_mlx.checkpoints.conversion.places import CacheSettings
from tests.checkpoints.conversion.dflash2_sources import write_source


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """A test that waits for what never comes, as a pipe that nobody writes to, fails."""

    def ring(*_: object) -> None:
        raise AssertionError("waited in vain")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def settings(tmp_path: Path) -> CacheSettings:
    return CacheSettings(user_cache=tmp_path / "user cache")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB; a mount of its own, which only root can make."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)]
    try:
        made = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)
