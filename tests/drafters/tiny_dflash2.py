"""Tiny random DFlash2 drafters on disk and targets for them, with the weights as float64 too."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.drafters.base import SharedTarget
from lse_mlx.kernels.host_linear import HostLinear

HIDDEN, VOCAB, BLOCK, WINDOW, TOP_K = 64, 199, 8, 12, 5
SLOTS = WINDOW - 1 + BLOCK
TAPS = (1, 3, 4)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A config.json with every field; `changes` replace top-level fields."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "num_target_layers": 5,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * 2,
        "dflash_config": {
            "block_size": BLOCK,
            "mask_token_id": 7,
            "target_layer_ids": list(TAPS),
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 32,
            "selector_top_k": TOP_K,
        },
        **changes,
    }


@dataclass(frozen=True)
class TinyTarget:
    """A target of random embeddings and head, fp32, as `SharedTarget` asks for it."""

    table: NDArray[np.float32]
    output: NDArray[np.float32]
    layer_count: int = 5
    head_rows: list[int] = field(default_factory=list)

    @property
    def hidden_size(self) -> int:
        return self.table.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.table.shape[0]

    def embed(self, tokens: mx.array) -> mx.array:
        return mx.array(self.table)[tokens]

    def head(self, hidden: mx.array) -> mx.array:
        self.head_rows.append(hidden.shape[0])
        return HostLinear(self.output)(hidden)


def tiny_target(seed: int = 0) -> TinyTarget:
    rng = np.random.default_rng(seed)
    table, output = rng.standard_normal((2, VOCAB, HIDDEN))
    return TinyTarget(table.astype(np.float32), (output / 4).astype(np.float32))


def shared(target: TinyTarget) -> SharedTarget:
    """`target` under its interface: a type checker compares the two here."""
    return target


def tiny_tensors(seed: int = 0, head_dim: int = 16) -> dict[str, mx.array]:
    """bf16 tensors of `tiny_config`, by their published names, lively enough to disagree."""
    rng = np.random.default_rng(seed)

    def bf16(*shape: int, scale: float, mean: float = 0.0) -> mx.array:
        values = mean + scale * rng.standard_normal(shape)
        return mx.array(values.astype(np.float32)).astype(mx.bfloat16)

    def matrix(rows: int, columns: int) -> mx.array:
        return bf16(rows, columns, scale=columns**-0.5)

    def norm(width: int) -> mx.array:
        return bf16(width, scale=0.2, mean=1.0)

    tensors = {
        "fc.weight": matrix(HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm.weight": norm(HIDDEN),
        "norm.weight": norm(HIDDEN),
        "candidate_selector.hidden_projection.weight": matrix(32, HIDDEN),
        "candidate_selector.predecessor_codebook": bf16(VOCAB, 32, scale=1.0),
        "candidate_selector.successor_codebook": bf16(VOCAB, 32, scale=0.5),
    }
    for layer in range(2):
        sizes = {
            "self_attn.q_proj": (4 * head_dim, HIDDEN),
            "self_attn.k_proj": (2 * head_dim, HIDDEN),
            "self_attn.v_proj": (2 * head_dim, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 4 * head_dim),
            "mlp.gate_proj": (96, HIDDEN),
            "mlp.up_proj": (96, HIDDEN),
            "mlp.down_proj": (HIDDEN, 96),
            "attention_conv.kernel_projection": (16, HIDDEN),
            "mlp_conv.kernel_projection": (16, HIDDEN),
        }
        for name, (rows, columns) in sizes.items():
            tensors[f"layers.{layer}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"layers.{layer}.{name}.weight"] = norm(HIDDEN)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"layers.{layer}.{name}.weight"] = norm(head_dim)
        for name in ("attention_conv", "mlp_conv"):
            tensors[f"layers.{layer}.{name}.base_kernel"] = bf16(2, 2, HIDDEN, scale=0.7)
    return tensors


def quantize(tensors: dict[str, mx.array], bits: int, group: int = 32) -> dict[str, mx.array]:
    """Every matrix as affine codes; the codebooks get the `.weight` that a converter gives them."""
    out: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            out[name] = tensor
            continue
        base = name.removesuffix(".weight")
        parts = mx.quantize(tensor, group_size=group, bits=bits)
        out |= dict(zip([f"{base}.weight", f"{base}.scales", f"{base}.biases"], parts, strict=True))
    return out


def save(folder: Path, config: dict[str, Any], tensors: dict[str, mx.array]) -> Path:
    """Write a checkpoint and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def dense64(tensors: dict[str, mx.array], bits: int = 0, group: int = 32) -> dict[str, Any]:
    """All tensors as float64 under their published names; codes decoded by their definition."""
    out: dict[str, NDArray[np.float64]] = {}
    for name, tensor in tensors.items():
        if name.endswith((".scales", ".biases")):
            continue
        if tensor.dtype != mx.uint32:
            out[name] = np.array(tensor.astype(mx.float32), np.float64)
            continue
        words = np.array(tensor)
        # Code k of a row lies at bits k * bits of its little-endian words.
        shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
        codes = (words[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
        base = name.removesuffix(".weight")
        scale, bias = (
            np.array(tensors[f"{base}.{part}"].astype(mx.float32), np.float64)[:, :, None]
            for part in ("scales", "biases")
        )
        values = scale * codes.reshape(len(words), -1, group) + bias
        out[name] = values.reshape(len(words), -1)
    return {k.replace("codebook.weight", "codebook"): v for k, v in out.items()}


def random_features(rows: int, seed: int = 0) -> NDArray[np.float32]:
    """Features of `rows` positions, fp32 [rows, taps * hidden], of uneven size as real ones are."""
    rng = np.random.default_rng([seed, rows])
    scale = np.exp(rng.standard_normal((rows, 1)))
    return (scale * rng.standard_normal((rows, len(TAPS) * HIDDEN))).astype(np.float32)
