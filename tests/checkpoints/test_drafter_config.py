"""Every refusal of a config.json says the field, the value, and what to do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lse_mlx.checkpoints.checks import NOTHING, same
from lse_mlx.checkpoints.drafter_config import inspect_config
from lse_mlx.drafters.dflash2 import DFlash2Config, load_dflash2
from lse_mlx.errors import CheckpointError
from tests.drafters.tiny_dflash2 import SLOTS, save, shared, tiny_config, tiny_target, tiny_tensors

MISSING = object()


def changed(field: str, value: object) -> dict[str, Any]:
    """The tiny config with the dotted `field` set to `value`, or taken out."""
    values = tiny_config()
    *path, last = field.split(".")
    inner = values
    for part in path:
        inner = inner[part]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    return values


def test_a_config_is_read_whole() -> None:
    config = DFlash2Config.parse(tiny_config())
    assert config.target_layer_ids == (1, 3, 4)
    assert (config.block_size, config.mask_token_id, config.selector_top_k) == (8, 7, 5)
    assert (config.ring_slots, config.conv_groups, config.quantization) == (SLOTS, 4, None)


def test_a_config_of_older_form_is_the_same() -> None:
    """Its rope_theta and block_size at the root, and one architecture without a list."""
    values = tiny_config(rope_parameters=None, architectures="DFlash2DraftModel")
    values["rope_theta"] = tiny_config()["rope_parameters"]["rope_theta"]
    values["block_size"] = values["dflash_config"].pop("block_size")
    given = json.dumps(values)
    assert DFlash2Config.parse(values) == DFlash2Config.parse(tiny_config())
    assert json.dumps(values) == given, "the caller's own is left as it is"
    del values["block_size"]
    with pytest.raises(CheckpointError, match=r"no dflash_config\.block_size"):
        DFlash2Config.parse(values)


@pytest.mark.parametrize(
    ("part", "name"), [("rope_parameters", "rope_theta"), ("dflash_config", "block_size")]
)
def test_a_field_that_has_another_value_at_the_root_is_refused(part: str, name: str) -> None:
    value = tiny_config()[part][name]
    config = DFlash2Config.parse(tiny_config(**{name: value}))
    assert config == DFlash2Config.parse(tiny_config())
    words = rf"{name} = 4, but lse-mlx needs {value!r}, as {part}\.{name} has it"
    with pytest.raises(CheckpointError, match=words):
        DFlash2Config.parse(tiny_config(**{name: 4}))


REQUIRED = [
    *(name for name in tiny_config() if name not in ("rope_parameters", "dflash_config")),
    "rope_parameters",
    "rope_parameters.rope_type",
    "rope_parameters.rope_theta",
    "dflash_config",
    *(f"dflash_config.{name}" for name in tiny_config()["dflash_config"]),
]


@pytest.mark.parametrize("field", REQUIRED)
@pytest.mark.parametrize("value", [MISSING, None], ids=["missing", "null"])
def test_a_missing_field_is_named(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"no {field}[.,].* lse-mlx needs .*published"):
        DFlash2Config.parse(changed(field, value))


COUNTS = [
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_target_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "sliding_window",
    "dflash_config.block_size",
    "dflash_config.conv_group_size",
    "dflash_config.selector_rank",
    "dflash_config.selector_top_k",
]


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -3, 2.0, "8", True, 1 << 31, [8]])
def test_a_count_that_is_none_is_refused(field: str, value: object) -> None:
    assert_refused(field, value)


def assert_refused(field: str, value: object) -> None:
    with pytest.raises(CheckpointError) as refusal:
        DFlash2Config.parse(changed(field, value))
    message = str(refusal.value)
    said = repr(value) if len(repr(value)) < 100 else repr(value)[:100]  # not without end
    assert f"{field} = {said}" in message
    assert ", but lse-mlx needs " in message
    assert len(message) < 1000
    assert ": " in message, "what to do follows a colon"
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", []),
        ("architectures", ["Qwen3ForCausalLM"]),
        ("architectures", "DFlash2DraftModels"),
        ("is_causal", True),
        ("is_causal", 0),
        ("rope_parameters.rope_type", "yarn"),
        ("rope_parameters.rope_theta", 0),
        ("rope_parameters.rope_theta", -1.0),
        ("rope_parameters.rope_theta", float("inf")),
        ("rope_parameters.rope_theta", 10**400),
        ("rope_parameters.partial_rotary_factor", 0.5),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", "1e-6"),
        ("layer_types", ["sliding_attention"]),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("layer_types", "sliding_attention"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", 1),
        ("num_attention_heads", 3),
        ("head_dim", 15),
        ("sliding_window", 1),
        ("sliding_window", 7),
        ("dflash_config.block_size", 1),
        ("dflash_config.block_size", 9),
        ("dflash_config.mask_token_id", -1),
        ("dflash_config.mask_token_id", 199),
        ("dflash_config.mask_token_id", 7.0),
        ("dflash_config.conv_kernel_size", 3),
        ("dflash_config.conv_group_size", 15),
        ("dflash_config.selector_top_k", 200),
        ("dflash_config.selector_top_k", 4096),
        ("dflash_config.input_embedding_scale", 8.0),
        ("dflash_config.output_multiplier", 0.5),
        ("dflash_config.output_multiplier", True),
        ("dflash_config.final_logit_softcapping", 30.0),
        ("dflash_config.target_layer_ids", []),
        ("dflash_config.target_layer_ids", [1, 1, 2]),
        ("dflash_config.target_layer_ids", [3, 1]),
        ("dflash_config.target_layer_ids", [-1, 2]),
        ("dflash_config.target_layer_ids", [1, 5]),
        ("dflash_config.target_layer_ids", [1, 2.0]),
        ("dflash_config.target_layer_ids", 3),
        ("quantization", "q8"),
        ("quantization_config", [64, 8]),
    ],
)
def test_unsupported_values_are_refused_by_name(field: str, value: object) -> None:
    assert_refused(field, value)


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"group_size": 64, "bits": 3}, "quantization.bits = 3"),
        ({"group_size": 16, "bits": 8}, "quantization.group_size = 16"),
        ({"group_size": 64, "bits": 8, "mode": "mxfp8"}, "quantization.mode = 'mxfp8'"),
        ({"group_size": 64}, "no quantization.bits"),
        ({"bits": 8}, "no quantization.group_size"),
    ],
)
def test_unsupported_quantization_is_refused(block: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        DFlash2Config.parse(tiny_config(quantization=block))


def test_everything_that_is_wrong_is_said_at_once() -> None:
    values = tiny_config(hidden_size=0, head_dim=15, is_causal=True, rms_norm_eps="1e-6")
    del values["vocab_size"]
    values["dflash_config"] |= {"block_size": 9, "selector_rank": None}
    config, checks = inspect_config(values)
    assert config is None
    wrong = {check.field: check.drafter for check in checks if not check.holds}
    assert wrong == {
        "is_causal": True,
        "hidden_size": 0,
        "vocab_size": NOTHING,
        "head_dim": 15,
        "rms_norm_eps": "1e-6",
        "dflash_config.block_size": 9,
        "dflash_config.selector_rank": NOTHING,
    }, "and nothing that only follows from these"
    with pytest.raises(CheckpointError) as refusal:
        DFlash2Config.parse(values)
    assert sum(field in str(refusal.value) for field in wrong) == 5
    assert "; and 2 more: " in str(refusal.value)


def test_a_sentence_names_five_and_counts_the_rest() -> None:
    values = {"architectures": ["DFlash2DraftModel"]}
    missing = [check for check in inspect_config(values)[1] if not check.holds]
    with pytest.raises(CheckpointError) as refusal:
        DFlash2Config.parse(values)
    message = str(refusal.value)
    assert message.count(", but lse-mlx needs ") == 5
    assert f"and {len(missing) - 5} more: " in message


def test_a_sound_config_leaves_a_check_of_every_field() -> None:
    config, checks = inspect_config(tiny_config())
    assert config == DFlash2Config.parse(tiny_config())
    assert all(check.holds for check in checks)
    assert {check.field for check in checks} >= set(COUNTS)


@pytest.mark.parametrize(
    ("named", "dtype"),
    [
        ({}, None),
        ({"dtype": None}, None),
        ({"dtype": "bfloat16"}, "BF16"),
        ({"torch_dtype": "float16"}, "F16"),
        ({"dtype": "float32", "torch_dtype": "float32"}, "F32"),
    ],
)
def test_what_floats_are_stored_as(named: dict[str, Any], dtype: str | None) -> None:
    assert DFlash2Config.parse(tiny_config(**named)).dtype == dtype


@pytest.mark.parametrize(
    ("named", "field"),
    [
        ({"dtype": "int8"}, "dtype = 'int8'"),
        ({"dtype": 16}, "dtype = 16"),
        ({"torch_dtype": ["bfloat16"]}, "torch_dtype = \\['bfloat16'\\]"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "torch_dtype = 'float16'.*what dtype"),
        ({"quantization": {"group_size": 64, "bits": 8},
          "quantization_config": {"group_size": 64, "bits": 4}}, "quantization_config = .*4"),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_are_refused(named: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError, match=field):
        DFlash2Config.parse(tiny_config(**named))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        (0.0, None, False),
        ([1, [2]], [1.0, [2]], True),
        ([1, 2], [1], False),
        ({"a": [0]}, {"a": [False]}, False),
        ({"a": 1}, {"a": 1, "b": None}, False),
        (NOTHING, None, False),
        (NOTHING, NOTHING, True),
    ],
)
def test_json_values_are_the_same_by_number_but_not_by_truth(
    one: object, other: object, equal: bool
) -> None:
    assert same(one, other) is same(other, one) is equal


@pytest.mark.parametrize(
    ("field", "neutral"),
    [
        ("dflash_config.input_embedding_scale", 1.0),
        ("dflash_config.output_multiplier", 1),
        ("dflash_config.final_logit_softcapping", 0.0),
        ("rope_parameters.partial_rotary_factor", 1.0),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("rope_scaling", {"rope_type": "default"}),
    ],
)
def test_neutral_values_are_accepted_null_too(field: str, neutral: object) -> None:
    plain = DFlash2Config.parse(tiny_config())
    for value in (neutral, None):
        assert DFlash2Config.parse(changed(field, value)) == plain


def test_a_null_quantization_is_none_and_either_name_will_do() -> None:
    block = {"group_size": 64, "bits": 8}
    assert DFlash2Config.parse(tiny_config(quantization=None)).quantization is None
    for name in ("quantization", "quantization_config"):
        found = DFlash2Config.parse(tiny_config(**{name: block})).quantization
        assert found is not None
        assert (found.group_size, found.bits) == (64, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no DFlash2 drafter but an empty folder"),
        (b"", "is not JSON"),
        (b'{"architectures": ', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "holds a list"),
    ],
)
def test_a_file_that_is_no_config_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        DFlash2Config.read(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", 128), ("vocab_size", 200), ("num_target_layers", 6)]
)
def test_a_drafter_of_another_target_is_refused(field: str, value: int) -> None:
    config = replace(DFlash2Config.parse(tiny_config()), **{field: value})
    with pytest.raises(CheckpointError, match=rf"{field} = {value}, but the target has"):
        config.check_target(shared(tiny_target()))


def test_taps_beyond_the_target_are_refused() -> None:
    config = replace(DFlash2Config.parse(tiny_config()), target_layer_ids=(1, 5))
    with pytest.raises(CheckpointError, match=r"target_layer_ids = \[1, 5\], but .* 0..4"):
        config.check_target(shared(tiny_target()))


def test_the_target_is_checked_before_weights_are_read(tmp_path: Path) -> None:
    values = tiny_config(num_target_layers=6)
    folder = save(tmp_path, values, tiny_tensors())
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="num_target_layers = 6"):
        load_dflash2(folder, shared(tiny_target()))
    assert json.loads((folder / "config.json").read_text())["num_target_layers"] == 6
