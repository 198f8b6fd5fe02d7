"""A checkpoint loads, or one sentence says which thing is wrong and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.checkpoints.target_config import read_config, read_stop_tokens
from lse_mlx.errors import CheckpointError, RequestError
from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.registry import Registry
from lse_mlx.target.loading import load_target
from tests.tiny_models import KINDS, VOCAB, config_of, random_prompt, save_checkpoint

Change = Callable[[dict[str, Any]], object]


def refusal(folder: Path, *named: str, context_length: int | None = None) -> None:
    """Loading `folder` is refused with one sentence that names every one of `named`."""
    with pytest.raises(CheckpointError) as refused:
        load_target(folder, context_length)
    message = str(refused.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert ". " not in message
    for name in named:
        assert name in message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "checkpoint")


def rewrite(folder: Path, change: Change) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    change(config)
    path.write_text(json.dumps(config), "utf-8")
    return folder


def rewrite_weights(folder: Path, change: Callable[[dict[str, mx.array]], object]) -> Path:
    path = folder / "model.safetensors"
    weights = dict(mx.load(str(path)))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(path), weights)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_with_its_dimensions(checkpoints: dict[str, Path], kind: str) -> None:
    target = load_target(checkpoints[kind])
    text = config_of(kind).get("text_config", config_of(kind))
    assert target.hidden_size == 64
    assert target.vocab_size == VOCAB
    assert target.context_length == 512
    assert target.layer_count == text["num_hidden_layers"]
    assert (target.lm_head is None) == text["tie_word_embeddings"]


@pytest.mark.parametrize("kinds", [("vision", "bf16"), ("moe-vision", "moe")])
def test_a_vision_folder_gives_the_logits_of_its_text_part(
    checkpoints: dict[str, Path], kinds: tuple[str, str]
) -> None:
    logits = []
    for kind in kinds:  # the same weights but for the rounding of shifted norms
        target = load_target(checkpoints[kind])
        logits.append(np.array(target.advance(random_prompt(8), target.new_state(), ()).logits))
    np.testing.assert_allclose(*logits, atol=0.2)


@pytest.mark.parametrize("asked", [2, 100, 512])
def test_a_shorter_context_may_be_asked_for(folder: Path, asked: int) -> None:
    assert load_target(folder, asked).context_length == asked


@pytest.mark.parametrize("asked", [-5, 0, 1, 513])
def test_an_impossible_context_is_refused(folder: Path, asked: int) -> None:
    refusal(folder, str(asked), "2 to 512", context_length=asked)


def test_a_missing_folder_or_config_is_named(tmp_path: Path) -> None:
    refusal(tmp_path / "nowhere", "nowhere", "config.json")
    refusal(tmp_path, str(tmp_path), "config.json")


@pytest.mark.parametrize("text", ["", "{", '{"model_type": "qwen3_5",}', "[1, 2]", "null", '"x"'])
def test_a_broken_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, "utf-8")
    refusal(folder, "config.json")


def test_a_config_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00{")
    refusal(folder, "config.json")


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen3_next", None, 7])
def test_another_model_type_is_named(folder: Path, kind: object) -> None:
    refusal(rewrite(folder, lambda c: c.update(model_type=kind)), repr(kind), "qwen3_5")


def test_experts_in_a_dense_model_are_refused(folder: Path) -> None:
    refusal(rewrite(folder, lambda c: c.update(num_experts=8)), "8 experts", "qwen3_5_moe")


def test_experts_inside_a_dense_text_config_are_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", "vision")
    refusal(rewrite(folder, lambda c: c["text_config"].update(num_experts=4)), "4 experts")


@pytest.mark.parametrize("kind", ["moe", "moe-vision"])
@pytest.mark.parametrize("value", [None, 0, -1, 2.0, "8", True])
@pytest.mark.parametrize(
    "name",
    [
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ],
)
def test_a_count_of_experts_that_is_none_is_refused(
    tmp_path: Path, kind: str, name: str, value: object
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind)), "utf-8")

    def change(config: dict[str, Any]) -> None:
        config.get("text_config", config)[name] = value

    refusal(rewrite(tmp_path, change), name, repr(value))


def test_more_chosen_experts_than_there_are_are_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", "moe")
    refusal(
        rewrite(folder, lambda c: c.update(num_experts_per_tok=13)), "num_experts_per_tok", "13"
    )


@pytest.mark.parametrize("value", [None, 1, "true"])
def test_a_scaling_of_scores_that_is_neither_is_refused(tmp_path: Path, value: object) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", "moe")
    refusal(rewrite(folder, lambda c: c.update(norm_topk_prob=value)), "norm_topk_prob")


@pytest.mark.parametrize("change", [{"num_experts": 11}, {"moe_intermediate_size": 32}], ids=str)
def test_experts_of_other_weights_are_refused(tmp_path: Path, change: dict[str, int]) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", "moe")
    refusal(rewrite(folder, lambda c: c.update(change)), str(folder))


def test_exact_decoding_of_experts_on_a_device_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", "moe")
    registry = Registry("reference", None, Choices("own", exact=True))
    with pytest.raises(RequestError) as refused:
        load_target(folder, on_host=False, registry=registry)
    assert "mixture of experts" in str(refused.value)
    assert str(refused.value).endswith(".") and ". " not in str(refused.value)
    assert load_target(folder, on_host=True, registry=registry).expert_sizes


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, "64"])
def test_a_missing_dimension_is_named(folder: Path, field: str, value: object) -> None:
    refusal(rewrite(folder, lambda c: c.update({field: value})), field)


@pytest.mark.parametrize("value", [None, [], "text"])
def test_a_text_config_that_is_no_object_is_refused(tmp_path: Path, value: object) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", "vision")
    refusal(rewrite(folder, lambda c: c.update(text_config=value)), "text_config")


@pytest.mark.parametrize("value", [None, "long", 0, True])
def test_a_context_limit_that_is_no_count_is_refused(folder: Path, value: object) -> None:
    change = {"max_position_embeddings": value}
    refusal(rewrite(folder, lambda c: c.update(change)), "max_position_embeddings")


@pytest.mark.parametrize(
    "change",
    [{"num_attention_heads": 0}, {"linear_num_value_heads": 3}, {"full_attention_interval": 0}],
    ids=str,
)
def test_dimensions_that_fit_no_model_are_refused(folder: Path, change: dict[str, int]) -> None:
    refusal(rewrite(folder, lambda c: c.update(change)), str(folder))


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refusal(folder, str(folder), "safetensors")


@pytest.mark.parametrize("left", [0, 7, 4000, -1])
def test_truncated_weights_are_refused(folder: Path, left: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    refusal(folder, str(folder), "again")


def test_a_missing_or_extra_tensor_is_refused(folder: Path) -> None:
    gone = "language_model.model.layers.0.mlp.up_proj.weight"
    refusal(rewrite_weights(folder, lambda w: w.pop(gone)), str(folder))
    extra = {gone: mx.zeros((128, 64)), "language_model.model.more.weight": mx.zeros(3)}
    refusal(rewrite_weights(folder, lambda w: w.update(extra)), str(folder))


def test_a_tensor_of_another_shape_is_refused(folder: Path) -> None:
    name = "language_model.model.layers.3.self_attn.k_proj.weight"
    refusal(rewrite_weights(folder, lambda w: w.update({name: mx.zeros((33, 64))})), str(folder))


def test_weights_of_another_vocabulary_are_refused(folder: Path) -> None:
    refusal(rewrite(folder, lambda c: c.update(vocab_size=96)), str(folder))


@pytest.mark.parametrize("quantization", [{}, {"bits": 4}, [4], "4-bit", 4])
def test_a_wrong_quantization_is_refused(tmp_path: Path, quantization: object) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", "q4")
    refusal(rewrite(folder, lambda c: c.update(quantization=quantization)), str(folder))


def test_stop_tokens_come_from_the_generation_config_first(folder: Path) -> None:
    assert read_stop_tokens(folder) == [3]
    path = folder / "generation_config.json"
    path.write_text('{"temperature": 1}', "utf-8")
    assert read_stop_tokens(folder) == [3]
    path.write_text('{"eos_token_id": [4, 6]}', "utf-8")
    assert read_stop_tokens(folder) == [4, 6]
    path.write_text("{", "utf-8")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not JSON"):
        read_stop_tokens(folder)


def test_stop_tokens_may_be_in_the_text_config_or_nowhere(folder: Path) -> None:
    rewrite(folder, lambda c: (c.pop("eos_token_id"), c.update(text_config={"eos_token_id": 9})))
    assert read_stop_tokens(folder) == [9]
    rewrite(folder, lambda c: c.pop("text_config"))
    assert read_stop_tokens(folder) is None


def test_a_stop_token_of_null_is_none_named(folder: Path) -> None:
    rewrite(folder, lambda c: c.update(eos_token_id=None, text_config={"eos_token_id": 9}))
    assert read_stop_tokens(folder) == [9]
    rewrite(folder, lambda c: c.update(text_config=None))
    assert read_stop_tokens(folder) is None


def test_a_config_is_read_as_it_is(folder: Path) -> None:
    assert read_config(folder)["hidden_size"] == 64


def test_a_folders_name_is_no_pattern(tmp_path: Path) -> None:
    odd = save_checkpoint(tmp_path / "[q4] model*")
    assert load_target(odd).vocab_size == VOCAB


def test_weights_are_never_taken_from_another_folder(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ma", seed=1)
    empty = save_checkpoint(tmp_path / "m[ab]")
    (empty / "model.safetensors").unlink()
    refusal(empty, "m[ab]", "no model*.safetensors")


@pytest.mark.parametrize("value", [True, 0, -64, 64.0, "64", None])
@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_dimension_that_is_no_count_is_refused(folder: Path, name: str, value: object) -> None:
    def change(config: dict[str, Any]) -> None:
        config.get("text_config", config)[name] = value

    refusal(rewrite(folder, change), name)


@pytest.mark.parametrize("value", ["2", ["2"], -1, True, {"a": 1}, 2.0, [None]])
def test_an_end_token_that_is_no_id_is_refused(folder: Path, value: object) -> None:
    rewrite(folder, lambda c: c.update(eos_token_id=value))
    with pytest.raises(CheckpointError, match="eos_token_id"):
        read_stop_tokens(folder)


@pytest.mark.parametrize("change", [{"partial_rotary_factor": 2}, {"rope_theta": "x"}])
def test_what_cannot_be_computed_fails_at_load(folder: Path, change: dict[str, Any]) -> None:
    def spoil(config: dict[str, Any]) -> None:
        text = config.get("text_config", config)
        text["rope_parameters"] = text.get("rope_parameters", {}) | change

    refusal(rewrite(folder, spoil), str(folder))


@pytest.mark.parametrize("asked", ["100", 2.5, True])
def test_a_context_that_is_no_count_is_refused(folder: Path, asked: Any) -> None:
    refusal(folder, repr(asked), context_length=asked)


@pytest.mark.parametrize("value", ["DFlash2DraftModel", ["Other", "DFlash2DraftModel"]])
def test_a_drafter_is_known_by_its_architectures(folder: Path, value: object) -> None:
    refusal(rewrite(folder, lambda c: c.update(architectures=value)), "is a DFlash2 drafter")


def test_architectures_that_are_no_list_are_one_sentence(folder: Path) -> None:
    refusal(rewrite(folder, lambda c: c.update(architectures=5)), str(folder))
