"""What a target stores is held to what it says of itself."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lse_mlx.checkpoints.gate.gate import check_pair, inspect_pair
from tests.checkpoints.gate.sparse_checkpoints import (
    DEMO_TARGET,
    QWEN,
    ROWS,
    WIDTH,
    failed,
    quantized,
    read_entries,
    read_json,
    refusal_of,
    save_drafter,
    save_qwen_target,
    write_json,
    write_sparse,
)

LAYERS = DEMO_TARGET["num_hidden_layers"]


# The target's own tensors


def entry_changes() -> dict[str, tuple[dict[str, Any], str]]:
    """Changes of the demo target's tensors, and the field that each must break."""
    head, embedding = "language_model.lm_head", "language_model.model.embed_tokens"
    return {
        "no head": (dict.fromkeys([f"{head}.{p}" for p in ("weight", "scales", "biases")]),
                    "output head"),
        "fewer rows": (quantized(ROWS - 1, WIDTH, head), "output head"),
        "wider": (quantized(ROWS, WIDTH + 64, embedding), "embedding"),
        "other bits": (quantized(ROWS, WIDTH, embedding, bits=8), "embedding"),
        "other groups": (quantized(ROWS, WIDTH, head, group=32), "output head"),
        "no scales": ({f"{head}.scales": None}, "output head"),
        "no biases": ({f"{head}.biases": None}, "output head"),
        "short biases": ({f"{embedding}.biases": ("BF16", [ROWS, WIDTH // 64 - 1])}, "embedding"),
        "no embedding": ({f"{embedding}.weight": None}, "embedding"),
        "odd type": ({f"{embedding}.weight": ("I32", [ROWS, WIDTH // 8])}, "embedding"),
        "transposed floats": ({f"{head}.weight": ("BF16", [WIDTH, ROWS])}, "output head"),
        "a vector": ({f"{head}.weight": ("U32", [ROWS])}, "output head"),
    }  # fmt: skip


@pytest.mark.parametrize("change", entry_changes())
def test_a_target_whose_tensors_are_not_its_configs_is_refused(
    demo: tuple[Path, Path], change: str
) -> None:
    target, drafter = demo
    changes, field = entry_changes()[change]
    entries = read_entries(target / "model.safetensors") | changes
    kept = {name: entry for name, entry in entries.items() if entry is not None}
    write_sparse(target / "model.safetensors", kept)
    found = failed(inspect_pair(target, drafter))
    assert found.keys() == {field}
    assert found[field][0] == [ROWS, WIDTH]


@pytest.mark.parametrize("missing", [0, LAYERS // 2, LAYERS - 1])
def test_a_target_that_lacks_a_layer_is_refused(demo: tuple[Path, Path], missing: int) -> None:
    target, drafter = demo
    entries = read_entries(target / "model.safetensors")
    kept = {name: e for name, e in entries.items() if f".layers.{missing}." not in name}
    write_sparse(target / "model.safetensors", kept)
    assert failed(inspect_pair(target, drafter)).keys() == {"stored target layers"}


def test_settings_of_one_module_count_before_those_of_all(demo: tuple[Path, Path]) -> None:
    target, drafter = demo
    entries = read_entries(target / "model.safetensors")
    head = "language_model.lm_head"
    write_sparse(target / "model.safetensors", entries | quantized(ROWS, WIDTH, head, 8, 32))
    config = read_json(target / "config.json")
    config["quantization"][head] = {"group_size": 32, "bits": 8}
    write_json(target / "config.json", config)
    assert check_pair(target, drafter)


def test_codes_without_a_quantization_block_are_refused(demo: tuple[Path, Path]) -> None:
    target, drafter = demo
    config = read_json(target / "config.json")
    del config["quantization"], config["quantization_config"]
    write_json(target / "config.json", config)
    found = failed(inspect_pair(target, drafter))
    assert found.keys() == {"embedding", "output head"}
    assert "does not explain" in str(found["embedding"][1])


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_shard_is_named(tmp_path: Path, missing: int) -> None:
    target = save_qwen_target(tmp_path / "target")
    file = f"model-0000{missing}-of-00003.safetensors"
    (target / file).unlink()
    drafter = save_drafter(tmp_path / "drafter", QWEN)
    assert f"has no {file}: download" in refusal_of(target, drafter)


def test_a_tensor_in_two_files_is_named(demo: tuple[Path, Path]) -> None:
    target, drafter = demo
    shutil.copy(target / "model.safetensors", target / "model-copy.safetensors")
    assert "language_model.lm_head.biases, as another file" in refusal_of(target, drafter)
