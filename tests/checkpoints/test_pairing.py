"""The registry of pairs: what it says, how names find a pair, and what is no record."""

import copy
import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.pairing import (
    PAIRS,
    DrafterRecord,
    PairRecord,
    by_drafter,
    by_name,
    by_target_name,
    read_pairs,
    registered,
)
from lse_mlx.errors import CheckpointError

QWEN_DRAFTER = "incoai/Qwen3.8-27B-DFlash2"


def record() -> dict[str, Any]:
    return {
        "name": "tiny",
        "targets": ["tiny-*", "org/exact"],
        "target": {
            "repository": "org/tiny",
            "revision": "a" * 40,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "vocab_size": 100,
            "tokenizer_sha256": "b" * 64,
        },
        "drafter": {
            "bytes": 10,
            "config": {"hidden_size": 64, "vocab_size": 100, "num_target_layers": 4},
        },
    }


def test_the_main_pair_is_the_published_one() -> None:
    """The values are those of the reference's documents."""
    found = by_name("Qwen3.8-27B")
    assert found is not None
    assert found.drafter.repository == QWEN_DRAFTER
    assert found.drafter.revision == "dedf8df68adfb1afeaf7b7480c0a0243108177b4"
    assert found.drafter.bytes == 3_848_817_896
    assert found.drafter.q8_bytes == 2_044_950_184
    for digest, begin in (
        (found.drafter.sha256, "67fc76d68dc5"),
        (found.drafter.q8_sha256, "cc3b5742f8ed"),
        (found.drafter.q8_config_sha256, "411ffd1c02c2"),
    ):
        assert digest is not None and digest.startswith(begin)
    assert found.drafter.config["dflash_config"]["target_layer_ids"] == [5, 19, 33, 47, 61]
    target = found.target
    assert (target.hidden_size, target.num_hidden_layers, target.vocab_size) == (5120, 64, 248320)


def test_the_registry_lists_three_pairs() -> None:
    assert [one.name for one in registered()] == ["qwen3.8-27b", "glm-5.3-flash", "demo"]
    glm = by_drafter("INCOAI/glm-5.3-flash-dflash2")
    assert glm is not None
    assert glm.drafter.revision == "bf582e4eacc1810f76656d1811693ff6c6737d2a"
    target = glm.target
    assert (target.hidden_size, target.num_hidden_layers, target.vocab_size) == (4096, 45, 154880)
    assert glm.drafter.config["num_hidden_layers"] == 5
    assert by_drafter("incoai/other") is None
    assert by_name("other") is None


def size_of(drafter: DrafterRecord) -> int:
    """Bytes of a drafter's file: every tensor of its geometry in bf16 behind a sorted header."""
    config = drafter.config
    inner = config["dflash_config"]
    d, vocab, rank = config["hidden_size"], config["vocab_size"], inner["selector_rank"]
    head, ffn = config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "candidate_selector.hidden_projection.weight": [rank, d],
        "candidate_selector.predecessor_codebook": [vocab, rank],
        "candidate_selector.successor_codebook": [vocab, rank],
        "fc.weight": [d, d * len(inner["target_layer_ids"])],
        "hidden_norm.weight": [d],
        "norm.weight": [d],
    }
    for i in range(config["num_hidden_layers"]):
        of_layer = {
            "input_layernorm.weight": [d],
            "post_attention_layernorm.weight": [d],
            "self_attn.q_proj.weight": [queries, d],
            "self_attn.k_proj.weight": [keys, d],
            "self_attn.v_proj.weight": [keys, d],
            "self_attn.o_proj.weight": [d, queries],
            "self_attn.q_norm.weight": [head],
            "self_attn.k_norm.weight": [head],
            "mlp.gate_proj.weight": [ffn, d],
            "mlp.up_proj.weight": [ffn, d],
            "mlp.down_proj.weight": [d, ffn],
        }
        for conv in ("attention_conv", "mlp_conv"):
            of_layer[f"{conv}.base_kernel"] = [2, inner["conv_kernel_size"], d]
            groups = d // inner["conv_group_size"]
            of_layer[f"{conv}.kernel_projection.weight"] = [
                2 * inner["conv_kernel_size"] * groups,
                d,
            ]
        shapes |= {f"layers.{i}.{name}": shape for name, shape in of_layer.items()}
    entries, place = {}, 0
    for name in sorted(shapes):
        end = place + 2 * prod(shapes[name])
        entries[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [place, end]}
        place = end
    text = len(json.dumps(entries, separators=(",", ":")))
    return 8 + text + -text % 8 + place


@pytest.mark.parametrize("name", ["qwen3.8-27b", "glm-5.3-flash"])
def test_the_recorded_geometry_fills_the_recorded_bytes(name: str) -> None:
    found = by_name(name)
    assert found is not None
    assert size_of(found.drafter) == found.drafter.bytes


def test_the_demo_pairs_record_is_of_its_files() -> None:
    demo = by_name("demo")
    assert demo is not None
    config = json.loads((demo_pair.DRAFTER / "config.json").read_text("utf-8"))
    assert {name: config.get(name) for name in demo.drafter.config} == demo.drafter.config
    assert demo.drafter.bytes == (demo_pair.DRAFTER / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("target", "pair"),
    [
        ("mlx-community/Qwen3.8-27B-4bit", "qwen3.8-27b"),
        ("someone/qwen3.8-27b-mlx-4BIT", "qwen3.8-27b"),
        ("Qwen3.8-27B-4bit-DWQ", "qwen3.8-27b"),
        ("Qwen/Qwen3.8-27B", "qwen3.8-27b"),
        ("zai-org/GLM-5.3-Flash", "glm-5.3-flash"),
        ("demo", "demo"),
        ("Qwen/Qwen3.8-27B-Instruct-8bit", None),
        ("Qwen/Qwen3.6-27B-4bit", None),
        ("Qwen/Qwen3.8-Flash-Next", None),
        ("qwen3.8-27b/other", None),
        ("x-qwen3.8-27b-4bit", None),
        ("", None),
    ],
)
def test_a_targets_name_finds_its_pair(target: str, pair: str | None) -> None:
    found = by_target_name(target)
    assert (found and found.name) == pair


def test_a_pattern_with_a_slash_is_for_the_whole_name() -> None:
    found = PairRecord.parse(record())
    assert found.fits("Org/Exact")
    assert not found.fits("other/exact")
    assert found.fits("any/TINY-1")


def edit(values: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for name in parents:
        values = values[name]
    if value is None:
        values.pop(last, None)
    else:
        values[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("name", None),
        ("name", ""),
        ("name", "Has Space"),
        ("targets", None),
        ("targets", []),
        ("targets", "tiny"),
        ("targets", ["*"]),
        ("targets", [5]),
        ("target", None),
        ("target", []),
        ("target.repository", "tiny"),
        ("target.repository", "../x"),
        ("target.repository", None),
        ("target.revision", "main"),
        ("target.revision", None),
        ("target.bytes", 0),
        ("target.hidden_size", None),
        ("target.hidden_size", "64"),
        ("target.hidden_size", True),
        ("target.hidden_size", 65),
        ("target.num_hidden_layers", -1),
        ("target.num_hidden_layers", 5),
        ("target.vocab_size", 1.5),
        ("target.vocab_size", 101),
        ("target.tokenizer_sha256", "B" * 64),
        ("target.tokenizer_sha256", "b" * 63),
        ("target.other", 1),
        ("drafter", None),
        ("drafter.sha256", 5),
        ("drafter.q8_sha256", "x"),
        ("drafter.q8_config_sha256", "x"),
        ("drafter.bytes", "10"),
        ("drafter.q8_bytes", -1),
        ("drafter.config", None),
        ("drafter.config", {}),
        ("drafter.config.rope_parameters", {}),
        ("drafter.config.eps", float("nan")),
        ("drafter.config.list", [float("inf")]),
        ("drafter.other", 1),
        ("other", 1),
    ],
)
def test_a_malformed_record_is_refused_in_one_sentence(path: str, value: object) -> None:
    values = copy.deepcopy(record())
    PairRecord.parse(values)
    edit(values, path, value)
    with pytest.raises(CheckpointError) as refused:
        PairRecord.parse(values)
    said = str(refused.value)
    last = path.split(".")[-1]
    assert last in said or "config" in said
    assert said.endswith(".") and "\n" not in said


@pytest.mark.parametrize("text", ["", "[]", "5", '{"pairs": {}}', '{"pairs": [], "x": 1}', "{"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(text, "utf-8")
    for read in (read_pairs, PairRecord.read):
        with pytest.raises(CheckpointError, match=r"pairs\.json"):
            read(path)


def test_two_pairs_of_one_name_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"pairs": [record(), record()]}), "utf-8")
    with pytest.raises(CheckpointError, match="twice"):
        read_pairs(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pairs(tmp_path / "none")


def test_the_registry_lies_in_the_package() -> None:
    assert PAIRS.parent.name == "checkpoints" and PAIRS.is_file()
