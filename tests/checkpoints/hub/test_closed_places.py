"""Folders and caches that a process may not look into are one sentence."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import lse_mlx
from tests.checkpoints.hub.fake_hub import FIRST, NEEDED, checkpoint

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")

PACKAGE = Path(lse_mlx.__file__).parent
NOBODY = 65534
CHILD = f"""
import os, sys
from pathlib import Path
from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.hub.cache import HubCache, Wanted
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.resolve import resolve_pair
from lse_mlx.cli.models import describe
from lse_mlx.errors import LseError
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
folder = Path(sys.argv[1])
try:
    print(eval(sys.argv[2]))
except LseError as error:
    print(f"error: {{error}}")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for everybody, with a whole checkpoint in it and a folder `closed` of root."""
    with tempfile.TemporaryDirectory() as name:  # those of pytest are closed to all but root
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "whole").mkdir()
        for file in NEEDED:
            (folder / "whole" / file).write_bytes(checkpoint()[file])
        (folder / "closed" / "inner").mkdir(parents=True)
        (folder / "closed").chmod(0o700)
        # The checkout may be closed to others, and the package reads files of its own.
        unused = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, folder / "package" / PACKAGE.name, ignore=unused)
        yield folder


def as_nobody(folder: Path, expression: str) -> str:
    """What the value of `expression` prints as, or its error, in a process without rights."""
    command = [sys.executable, "-c", CHILD, str(folder), expression]
    environment = {**os.environ, "PYTHONPATH": str(folder / "package")}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=folder, env=environment
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("\n") == 1
    return ran.stdout.removesuffix("\n")


def test_a_closed_checkpoint(folder: Path) -> None:
    here = "resolve_pair(folder / 'whole', None).target"
    assert as_nobody(folder, here) == str(folder / "whole")
    (folder / "whole").chmod(0o000)
    assert as_nobody(folder, here).startswith(f"error: {folder / 'whole'}")
    below = as_nobody(folder, "resolve_pair(folder / 'closed' / 'inner', None)")
    assert below.startswith("error: The model ") and str(folder / "closed" / "inner") in below


def test_a_closed_cache(folder: Path) -> None:
    for cache in ("closed", "closed/inner"):
        asked = f"HubCache(folder / '{cache}').state(Wanted('org/tiny', '1' * 40))"
        said = as_nobody(folder, asked)
        assert said.startswith("error: org/tiny@1")
        assert f"cannot be read or written at {folder / 'closed'}" in said


def test_a_closed_place_has_no_conversion(folder: Path) -> None:
    drafter = "models--incoai--Qwen3.8-27B-DFlash2"
    revision = "dedf8df68adfb1afeaf7b7480c0a0243108177b4"
    snapshot = folder / drafter / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(b"{}")
    (snapshot / "model.safetensors").write_bytes(checkpoint()[FIRST])
    listed = "describe(HubCache(folder), CacheSettings(directory=folder / 'closed'))"
    expression = f"[pair['drafter']['converted'] for pair in {listed}]"
    assert as_nobody(folder, expression) == "[None, None, None]"


def test_a_closed_cache_does_not_hide_the_other_pairs(folder: Path) -> None:
    listed = "describe(HubCache(folder / 'closed'), CacheSettings(directory=folder))"
    expression = f"[pair['target']['state'] for pair in {listed}]"
    assert as_nobody(folder, expression) == "['unreadable', 'unpublished', 'packaged']"
