"""Places that a process may not look into: one sentence, or another place."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints.conversion.dflash2_sources import write_source

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")

NOBODY = 65534
CHILD = f"""
import encodings.ascii, os, sys
from pathlib import Path
from lse_mlx.checkpoints.complete import check_complete
from lse_mlx.checkpoints.conversion.first_use import detect, prepare_drafter
from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.disk import free_bytes
from lse_mlx.checkpoints.progress import Silent
from lse_mlx.checkpoints.target_config import read_config, read_stop_tokens
from lse_mlx.errors import LseError
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
folder = Path(sys.argv[1])
def prepare(**settings):
    return prepare_drafter(folder / "source", CacheSettings(**settings), Silent())
try:
    print(eval(sys.argv[2]))
except LseError as error:
    print(f"error: {{error}}")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of nobody, with a drafter `source` of nobody and a folder `closed` of root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # not below those of pytest, which are closed to all but root
        write_source(folder / "source")
        for path in (folder, folder / "source"):
            os.chown(path, NOBODY, NOBODY)
        (folder / "closed" / "inner").mkdir(parents=True)
        (folder / "closed").chmod(0o700)
        yield folder


def as_nobody(folder: Path, expression: str) -> str:
    """What the value of `expression` prints as, or its error, in a process without rights."""
    command = [sys.executable, "-c", CHILD, str(folder), expression]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.removesuffix("\n")


def test_a_closed_cache_directory_is_one_sentence(folder):
    said = as_nobody(folder, "prepare(directory=folder / 'closed' / 'cache')")
    assert said.startswith("error: The conversion of ")
    assert "can be written nowhere" in said and "Permission denied" in said


def test_a_closed_user_cache_does_not_matter_where_the_source_can_be_written(folder):
    said = as_nobody(folder, "prepare(user_cache=folder / 'closed' / 'cache')")
    assert said == str(folder / "source" / "lse-q8g64")


def test_where_neither_place_can_be_written_one_sentence_says_so(folder):
    os.chown(folder / "source", 0, 0)
    before = sorted(os.listdir(folder / "source"))
    said = as_nobody(folder, "prepare(user_cache=folder / 'closed' / 'cache')")
    assert said.startswith("error: ") and "can be written nowhere" in said
    assert sorted(os.listdir(folder / "source")) == before


def test_weights_in_a_closed_folder_are_left_to_their_loader(folder):
    weights = folder / "source" / "model.safetensors"
    weights.rename(folder / "closed" / weights.name)
    weights.symlink_to(folder / "closed" / weights.name)
    assert as_nobody(folder, "prepare()") == str(folder / "source")
    assert as_nobody(folder, "detect(folder / 'source').kind") == "Kind.UNSUPPORTED"


def test_room_is_that_of_the_disk_also_below_a_closed_folder(folder):
    below = as_nobody(folder, "free_bytes(folder / 'closed' / 'inner' / 'more') > 0")
    assert below == "True"


def test_a_checkpoint_in_a_closed_folder_is_one_sentence(folder):
    said = as_nobody(folder, "check_complete(folder / 'closed' / 'inner')")
    assert said.startswith(f"error: {folder / 'closed' / 'inner'} is not a folder")


@pytest.mark.parametrize("read", ["read_config", "read_stop_tokens"])
def test_a_config_in_a_closed_folder_is_one_sentence(folder, read):
    said = as_nobody(folder, f"{read}(folder / 'closed' / 'inner')")
    assert said.startswith(f"error: {folder / 'closed' / 'inner'} has no config.json")


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o400])
def test_a_closed_checkpoint_is_one_sentence(folder, mode):
    source = folder / "source"
    os.remove(source / "model.safetensors")  # then its folder is listed, to say what is there
    os.chown(source, 0, 0)
    source.chmod(mode | mode >> 6)
    said = as_nobody(folder, "check_complete(folder / 'source')")
    assert said.startswith(f"error: {source}") and said.endswith(".") and "\n" not in said
