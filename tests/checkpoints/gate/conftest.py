"""What the tests of the gate share."""

from pathlib import Path

import pytest

from tests.checkpoints.gate.sparse_checkpoints import hollow_demo, save_qwen_target


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the geometry of Qwen3.8-27B; the weights are holes."""
    return save_qwen_target(tmp_path_factory.mktemp("targets") / "some-target")


@pytest.fixture
def demo(tmp_path: Path) -> tuple[Path, Path]:
    """The demo pair in folders of their own; the weights are holes."""
    return hollow_demo(tmp_path)
