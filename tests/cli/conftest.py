"""A drafter that loads and breaks."""

import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from lse_mlx import demo_pair


@pytest.fixture
def broken_drafter(tmp_path: Path) -> Path:
    """The demo drafter with a number that is none in its weights."""
    folder = shutil.copytree(demo_pair.DRAFTER, tmp_path / "broken")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    name = next(name for name in weights if name.endswith("norm.weight"))
    weights[name] = weights[name] * float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder
