"""The tiny hybrid target that the real loop runs on, with the CPU as MLX's default device."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lse_mlx.target.model import Target
from tests.tiny_models import load_tiny, on_cpu, save_checkpoint


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_cpu():
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def target(folder: Path) -> Target:
    return load_tiny(folder)
