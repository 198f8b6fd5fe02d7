"""The rate of stock mlx-lm is measured on every checkpoint that the target loads."""

from pathlib import Path

import pytest

from lse_mlx.comparison import mlx_lm_rate
from tests.tiny_models import on_cpu, random_prompt, save_checkpoint


@pytest.mark.parametrize("kind", ["q4", "vision", "qwen3"])
@pytest.mark.parametrize("dense", [False, True])
def test_mlx_lm_decodes_a_checkpoint_of_every_name(tmp_path: Path, kind: str, dense: bool) -> None:
    folder = save_checkpoint(tmp_path / kind, kind)  # q4 is named by its text part alone
    with on_cpu():
        assert mlx_lm_rate(folder, random_prompt(5), 3, dense) > 0
