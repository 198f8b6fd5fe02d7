"""Checkpoints whose weights are holes: real headers before bytes that no disk holds."""

import hashlib
import json
import shutil
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.gate.gate import GateReport, check_pair
from lse_mlx.checkpoints.pairing import PairRecord, registered
from lse_mlx.errors import CheckpointError

Entries = dict[str, tuple[str, list[int]]]
"""Data type and shape of each tensor, by its name."""
DEMO_TARGET = json.loads((demo_pair.TARGET / "config.json").read_text())["text_config"]
ROWS, WIDTH = DEMO_TARGET["vocab_size"], DEMO_TARGET["hidden_size"]
"""Of the demo target's embedding and output head."""
WIDTHS = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "U32": 4, "I32": 4, "F64": 8}


def write_sparse(path: Path, entries: Entries) -> Path:
    """A safetensors file of `entries` in their order whose tensors are one hole."""
    header, place = {}, 0
    for name, (dtype, shape) in entries.items():
        size = prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)
    return path


def read_entries(path: Path) -> Entries:
    """The entries of a safetensors file, by the format's own definition."""
    with path.open("rb") as file:
        held = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    held.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"]) for name, entry in held.items()}


def write_json(path: Path, values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), "utf-8")
    return path


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def hollow(source: Path, folder: Path) -> Path:
    """A copy of the checkpoint in `source` whose weights are a hole."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for path in source.glob("*.safetensors"):
        write_sparse(folder / path.name, read_entries(path))
    return folder


def hollow_demo(folder: Path) -> tuple[Path, Path]:
    """Target and drafter of the demo pair without their weights."""
    return (
        hollow(demo_pair.TARGET, folder / "target"),
        hollow(demo_pair.DRAFTER, folder / "drafter"),
    )


def bytes_read() -> int:
    """How many bytes this process has asked the system to read so far."""
    if sys.platform != "linux":
        pytest.skip("only Linux counts what a process reads")
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counted["rchar"])


def drafter_entries(
    hidden: int, ffn: int, vocabulary: int, taps: int, layers: int = 5, rank: int = 256
) -> Entries:
    """The tensors of a published drafter with 32 query and 8 key heads of 128, sorted by name."""
    entries: Entries = {
        "candidate_selector.hidden_projection.weight": ("BF16", [rank, hidden]),
        "candidate_selector.predecessor_codebook": ("BF16", [vocabulary, rank]),
        "candidate_selector.successor_codebook": ("BF16", [vocabulary, rank]),
        "fc.weight": ("BF16", [hidden, taps * hidden]),
        "hidden_norm.weight": ("BF16", [hidden]),
        "norm.weight": ("BF16", [hidden]),
    }
    for layer in range(layers):
        entries |= {
            f"layers.{layer}.{name}": ("BF16", shape)
            for name, shape in (
                ("input_layernorm.weight", [hidden]),
                ("post_attention_layernorm.weight", [hidden]),
                ("self_attn.q_proj.weight", [4096, hidden]),
                ("self_attn.k_proj.weight", [1024, hidden]),
                ("self_attn.v_proj.weight", [1024, hidden]),
                ("self_attn.o_proj.weight", [hidden, 4096]),
                ("self_attn.q_norm.weight", [128]),
                ("self_attn.k_norm.weight", [128]),
                ("mlp.gate_proj.weight", [ffn, hidden]),
                ("mlp.up_proj.weight", [ffn, hidden]),
                ("mlp.down_proj.weight", [hidden, ffn]),
                ("attention_conv.base_kernel", [2, 2, hidden]),
                ("attention_conv.kernel_projection.weight", [hidden // 4, hidden]),
                ("mlp_conv.base_kernel", [2, 2, hidden]),
                ("mlp_conv.kernel_projection.weight", [hidden // 4, hidden]),
            )
        }
    return dict(sorted(entries.items()))


def drafter_config(
    hidden: int, ffn: int, vocabulary: int, target_layers: int, taps: list[int], mask: int
) -> dict[str, Any]:
    """config.json of such a drafter."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "is_causal": False,
        "hidden_size": hidden,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "num_target_layers": target_layers,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
        "sliding_window": 2048,
        "layer_types": ["sliding_attention"] * 5,
        "dflash_config": {
            "block_size": 8,
            "mask_token_id": mask,
            "target_layer_ids": taps,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
    }


def quantized(rows: int, columns: int, name: str, bits: int = 4, group: int = 64) -> Entries:
    """A matrix as affine codes."""
    return {
        f"{name}.weight": ("U32", [rows, columns * bits // 32]),
        f"{name}.scales": ("BF16", [rows, columns // group]),
        f"{name}.biases": ("BF16", [rows, columns // group]),
    }


def save_tokenizer(folder: Path, text: int, added: list[str]) -> Path:
    """A tokenizer of `text` tokens t0, t1, ... and special tokens after them."""
    write_json(
        folder / "tokenizer.json",
        {
            "added_tokens": [
                {"id": text + i, "content": token, "special": True} for i, token in enumerate(added)
            ],
            "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(text)}, "merges": []},
        },
    )
    return folder


MASK = 248070
QWEN = drafter_config(5120, 17408, 248320, 64, [5, 19, 33, 47, 61], MASK)
GLM = drafter_config(4096, 12288, 154880, 45, [5, 14, 24, 33, 42], 154856)
DRAFTER_REVISION = "dedf8df68adfb1afeaf7b7480c0a0243108177b4"
TARGET_REVISION = "3e6447f082e89cc7f0bc6e5441afd38dfce760ff"
OTHER = "0" * 40


def save_qwen_target(folder: Path, shards: int = 3, text: int = 1000) -> Path:
    """Qwen3.8-27B in 4 bits, as a multimodal folder of several files whose weights are holes.

    text: how many tokens of text its tokenizer has; the real one has 248,044
    """
    write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "quantization": {"group_size": 64, "bits": 4},
            "text_config": {
                "model_type": "qwen3_5_text",
                "hidden_size": 5120,
                "vocab_size": 248320,
                "num_hidden_layers": 64,
                "tie_word_embeddings": False,
            },
        },
    )
    entries = quantized(248320, 5120, "language_model.lm_head")
    entries |= quantized(248320, 5120, "language_model.model.embed_tokens")
    entries |= {"language_model.model.norm.weight": ("BF16", [5120])}
    for layer in range(64):
        name = f"language_model.model.layers.{layer}"
        entries |= {f"{name}.input_layernorm.weight": ("BF16", [5120])}
        entries |= quantized(17408, 5120, f"{name}.mlp.gate_proj")
    entries |= {"vision_tower.patch_embed.weight": ("BF16", [1152, 3, 2, 16, 16])}
    # An MTP head of some layouts, which is no layer of the target.
    entries |= {"language_model.model.layers.64.mtp.fc.weight": ("BF16", [5120, 10240])}
    save_shards(folder, entries, shards)
    return save_tokenizer(folder, text, [f"<|special_{i}|>" for i in range(33)])


def save_shards(folder: Path, entries: Entries, shards: int) -> None:
    names = list(entries)
    files = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    for i, file in enumerate(files):
        write_sparse(folder / file, {name: entries[name] for name in names[i::shards]})
    places = {name: files[i % shards] for i, name in enumerate(names)}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def save_drafter(folder: Path, config: dict[str, Any]) -> Path:
    entries = drafter_entries(
        config["hidden_size"],
        config["intermediate_size"],
        config["vocab_size"],
        len(config["dflash_config"]["target_layer_ids"]),
    )
    write_sparse(folder / "model.safetensors", entries)
    write_json(folder / "config.json", config)
    return folder


def snapshot(cache: Path, repository: str, revision: str) -> Path:
    """Where the hub's cache keeps one revision."""
    folder = cache / f"models--{repository.replace('/', '--')}" / "snapshots" / revision
    folder.mkdir(parents=True)
    return folder


def records_with(config: dict[str, Any]) -> tuple[PairRecord, ...]:
    """The registered pairs, as if `config` were what is published for Qwen3.8-27B."""
    block = {"bits": 8, "group_size": 64, "mode": "affine"}
    text = json.dumps({**config, "quantization": block}, indent=2) + "\n"
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    qwen, *others = registered()
    return (replace(qwen, drafter=replace(qwen.drafter, q8_config_sha256=digest)), *others)


def failed(report: GateReport) -> dict[str, tuple[object, object]]:
    return {check.field: (check.drafter, check.target) for check in report.mismatches}


def refusal_of(target: Path, drafter: Path) -> str:
    with pytest.raises(CheckpointError) as refusal:
        check_pair(target, drafter)
    message = str(refusal.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message
