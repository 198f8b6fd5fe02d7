"""From names to folders that can be loaded: the gate first, then conversions, with consent."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import dequantize_model, load_model, save_config, save_model

from lse_mlx import demo_pair
from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.prepare import prepare_pair
from lse_mlx.errors import CheckpointError
from tests.tiny_models import on_cpu, save_checkpoint, save_tokenizer


class Notes:
    """Progress that keeps what was noted."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        pass


def prepare(model: Path | str, drafter: Path | str | None = None, **how: Any) -> tuple[Any, Notes]:
    notes = Notes()
    settings = CacheSettings(user_cache=Path("/nowhere"))
    pair = prepare_pair(
        model, drafter, hub=Hub(offline=True), settings=settings, progress=notes, **how
    )
    return pair, notes


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A tiny target in bf16."""
    return save_tokenizer(save_checkpoint(tmp_path / "target", "bf16"))


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A copy of the demo drafter, a bf16 source like any other."""
    shutil.copytree(demo_pair.DRAFTER, tmp_path / "drafter")
    return tmp_path / "drafter"


def test_the_demo_is_used_as_it_is_stored() -> None:
    pair, notes = prepare("demo", "auto")
    assert (pair.target, pair.drafter) == (demo_pair.TARGET, demo_pair.DRAFTER)
    assert notes.said == []


def test_a_drafter_is_converted_once(drafter: Path) -> None:
    for said in ("complete", "using the conversion"):
        pair, notes = prepare("demo", drafter)
        assert pair.drafter == drafter / "lse-q8g64"
        assert said in " ".join(notes.said)


def test_a_pair_that_is_refused_is_not_converted(drafter: Path, target: Path) -> None:
    config = json.loads((drafter / "config.json").read_text("utf-8"))
    config["hidden_size"] = 640
    (drafter / "config.json").write_text(json.dumps(config), "utf-8")
    for model in ("demo", target):
        with pytest.raises(CheckpointError, match="hidden_size"):
            prepare(model, drafter, quantize_target=True)
    assert sorted(p.name for p in drafter.iterdir()) == ["config.json", "model.safetensors"]
    assert not list(target.glob("lse-*"))


def test_without_consent_a_target_is_used_as_it_is_stored(target: Path) -> None:
    asked: list[str] = []
    for consent in (False, lambda question: bool(asked.append(question))):
        pair, notes = prepare(target, quantize_target=consent)
        assert pair.target == target
        assert "--yes" in notes.said[-1]
    assert asked == [f"{target} is not quantized. Convert it to 4 bits once?"]
    assert not list(target.glob("lse-*"))


def test_with_consent_a_target_is_converted_and_then_found_without(target: Path) -> None:
    for consent in (lambda question: True, True, False):
        assert prepare(target, quantize_target=consent)[0].target == target / "lse-q4g64"


def test_consent_counts_beside_the_demo_drafter_too(tmp_path: Path) -> None:
    """The same target in bf16 belongs to the demo drafter and is converted like any other."""
    folder = tmp_path / "demo in bf16"
    shutil.copytree(demo_pair.TARGET, folder)
    with on_cpu():
        model, config = load_model(folder)
        model = dequantize_model(model)
        model.set_dtype(mx.bfloat16)
        save_model(folder, model)
    kept = {k: v for k, v in config.items() if not k.startswith("quantization")}
    save_config(kept, folder / "config.json")
    pair, _ = prepare(folder, "demo", quantize_target=True)
    assert (pair.target, pair.drafter) == (folder / "lse-q4g64", demo_pair.DRAFTER)
