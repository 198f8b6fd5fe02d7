"""From names to folders: found, or one sentence."""

from pathlib import Path
from typing import Any

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.resolve import resolve_pair
from lse_mlx.errors import CheckpointError


def test_the_demo_comes_with_its_drafter_and_a_folder_alone(tmp_path: Path) -> None:
    assert resolve_pair("demo").drafter == demo_pair.DRAFTER
    assert resolve_pair("demo", None).drafter is None
    pair = resolve_pair(tmp_path)
    assert (pair.target, pair.drafter) == (tmp_path, None)
    assert resolve_pair(str(tmp_path), "demo").drafter == demo_pair.DRAFTER


def test_a_folder_called_demo_does_not_hide_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_pair("demo").target == demo_pair.TARGET
    assert resolve_pair("./demo").target == Path("./demo")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "  ",
        "no-such",
        "a/b/c",
        "~nosuchuser/x",
        "a" * 300,
        "org/no-such-model",
        "nul\0",
        5,
        True,
    ],
)
@pytest.mark.parametrize("role", ["model", "drafter"])
def test_a_name_that_leads_nowhere_is_one_sentence(role: str, name: Any) -> None:
    with pytest.raises(CheckpointError) as refused:
        resolve_pair(name, None) if role == "model" else resolve_pair("demo", name)
    message = str(refused.value)
    assert message.startswith(f"The {role} ")
    assert message.endswith(".")
    assert "\n" not in message
