"""One set of tiny checkpoints and their models for all tests of the target, on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import mlx.nn as nn
import pytest

from lse_mlx.target.model import Target
from tests.tiny_models import KINDS, load_reference, load_tiny, on_cpu, save_checkpoint


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_cpu():
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: save_checkpoint(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def targets(checkpoints: dict[str, Path]) -> dict[str, Target]:
    return {kind: load_tiny(folder) for kind, folder in checkpoints.items()}


@pytest.fixture(scope="session")
def references(checkpoints: dict[str, Path]) -> dict[str, nn.Module]:
    """mlx-lm's own models of the same folders, in fp32."""
    return {kind: load_reference(folder) for kind, folder in checkpoints.items()}


@pytest.fixture(scope="session", params=["host", "device"])
def hybrid(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Target:
    """In the form for a CPU, and in the one for a device with MLX's CPU as the device."""
    return load_tiny(checkpoints["bf16"], on_host=request.param == "host")
