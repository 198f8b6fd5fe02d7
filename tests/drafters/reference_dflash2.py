"""DFlash2 in float64 NumPy, written from its description alone and shared with nothing in lse_mlx.

Context rows are kept in a plain list by absolute position; every sum is spelled out one position
at a time. Slow and plain: it says what the drafter must compute.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass
class ContextRow:
    """One committed row: its absolute position and, for every layer, its keys and values."""

    position: int
    keys: list[F64]
    values: list[F64]


@dataclass
class Drafted:
    """What one draft pass computes before any token is chosen."""

    hidden: F64  # [block - 1, hidden]
    logits: F64  # [block - 1, vocab]
    candidates: NDArray[np.int64]  # [block - 1, top_k]
    scores: F64  # [block - 1, top_k, top_k]


@dataclass
class ReferenceDrafter:
    """config: a config.json. tensors: float64 by published name. embedding, head: [vocab, hidden]."""

    config: dict[str, Any]
    tensors: dict[str, F64]
    embedding: F64
    head: F64
    rows: list[ContextRow] = field(default_factory=list)
    position: int = 0

    def append(self, features: F64, first: int) -> None:
        """Rows first, first + 1, ...; rows at `first` and after are replaced."""
        self.rows = [row for row in self.rows if row.position < first]
        for i, feature in enumerate(features):
            self.rows.append(self.context_row(feature, first + i))
        self.position = first + len(features)

    def context_row(self, feature: F64, position: int) -> ContextRow:
        c = self.norm(self.tensors["fc.weight"] @ feature, "hidden_norm")
        keys, values = [], []
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}.self_attn"
            k = self.heads(self.tensors[f"{name}.k_proj.weight"] @ c)
            keys.append(self.rotate(self.norm(k, f"{name}.k_norm"), position))
            values.append(self.heads(self.tensors[f"{name}.v_proj.weight"] @ c))
        return ContextRow(position, keys, values)

    def draft(self, anchor: int) -> Drafted:
        """The whole block after `anchor`, which stands at `position`."""
        dflash = self.config["dflash_config"]
        block = [anchor] + [dflash["mask_token_id"]] * (dflash["block_size"] - 1)
        x = self.embedding[block]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            n = self.norm(x, f"{name}.input_layernorm")
            after = self.attention(layer, self.convolution(n, n, f"{name}.attention_conv", 0))
            x = x + self.convolution(after, n, f"{name}.attention_conv", 1)
            m = self.norm(x, f"{name}.post_attention_layernorm")
            after = self.ffn(layer, self.convolution(m, m, f"{name}.mlp_conv", 0))
            x = x + self.convolution(after, m, f"{name}.mlp_conv", 1)
        hidden = self.norm(x[1:], "norm")
        logits = hidden @ self.head.T
        order = np.argsort(-logits, axis=1, kind="stable")[:, : dflash["selector_top_k"]]
        return Drafted(hidden, logits, order, self.scores(hidden, logits, order, anchor))

    def attention(self, layer: int, x: F64) -> F64:
        name, window = f"layers.{layer}.self_attn", self.config["sliding_window"]
        per_kv = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        own_keys, own_values, out = [], [], []
        for i, row in enumerate(x):
            k = self.norm(self.heads(self.tensors[f"{name}.k_proj.weight"] @ row), f"{name}.k_norm")
            own_keys.append(self.rotate(k, self.position + i))
            own_values.append(self.heads(self.tensors[f"{name}.v_proj.weight"] @ row))
        for i, row in enumerate(x):
            at = self.position + i
            q = self.norm(self.heads(self.tensors[f"{name}.q_proj.weight"] @ row), f"{name}.q_norm")
            q = self.rotate(q, at)
            seen = [r for r in self.rows if at - r.position < window]
            keys = np.array([r.keys[layer] for r in seen] + own_keys)
            values = np.array([r.values[layer] for r in seen] + own_values)
            mixed = []
            for head, query in enumerate(q):
                weight = keys[:, head // per_kv] @ query / np.sqrt(len(query))
                weight = np.exp(weight - weight.max())
                mixed.append(weight / weight.sum() @ values[:, head // per_kv])
            out.append(self.tensors[f"{name}.o_proj.weight"] @ np.concatenate(mixed))
        return np.array(out)

    def ffn(self, layer: int, x: F64) -> F64:
        name = f"layers.{layer}.mlp"
        gate = x @ self.tensors[f"{name}.gate_proj.weight"].T
        up = x @ self.tensors[f"{name}.up_proj.weight"].T
        return (gate / (1 + np.exp(-gate)) * up) @ self.tensors[f"{name}.down_proj.weight"].T

    def convolution(self, x: F64, source: F64, name: str, side: int) -> F64:
        group = self.config["dflash_config"]["conv_group_size"]
        groups = x.shape[1] // group
        base = self.tensors[f"{name}.base_kernel"][side]
        out = np.zeros_like(x)
        for t in range(len(x)):
            d = self.tensors[f"{name}.kernel_projection.weight"] @ source[t]
            for tap in range(min(2, t + 1)):
                rows = d[side * 2 * groups + tap * groups :][:groups]
                out[t] += (base[tap] + np.repeat(rows, group)) * x[t - tap]
        return out

    def scores(self, hidden: F64, logits: F64, ids: NDArray[np.int64], anchor: int) -> F64:
        name, (positions, k) = "candidate_selector", ids.shape
        out = np.zeros((positions, k, k))
        for p in range(positions):
            gate = self.tensors[f"{name}.hidden_projection.weight"] @ hidden[p]
            before = [anchor] * k if p == 0 else ids[p - 1]
            for a in range(k):
                left = self.tensors[f"{name}.predecessor_codebook"][before[a]] * gate
                for b in range(k):
                    right = self.tensors[f"{name}.successor_codebook"][ids[p, b]]
                    out[p, a, b] = logits[p, ids[p, b]] + left @ right
        return out

    def heads(self, flat: F64) -> F64:
        return flat.reshape(-1, self.config["head_dim"])

    def norm(self, x: F64, name: str) -> F64:
        mean_square = np.mean(x**2, axis=-1, keepdims=True)
        weight = self.tensors[f"{name}.weight"]
        return x / np.sqrt(mean_square + self.config["rms_norm_eps"]) * weight

    def rotate(self, x: F64, position: int) -> F64:
        half = x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angle = position * theta ** (-2 * np.arange(half) / x.shape[-1])
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def greedy_path(drafted: Drafted) -> list[int]:
    """Tokens of the best path, and by the smaller id, then the smaller index, where scores tie."""
    tokens, taken = [], 0
    for ids, scores in zip(drafted.candidates, drafted.scores, strict=True):
        row = scores[taken]
        taken = min(range(len(row)), key=lambda b: (-row[b], ids[b], b))
        tokens.append(int(ids[taken]))
    return tokens


def sampled_path(
    drafted: Drafted, temperature: float, uniform: Callable[[], float]
) -> tuple[list[int], list[F64]]:
    """Tokens of a path drawn by inverse CDF over the candidates best first, and each q."""
    tokens, qs, taken = [], [], 0
    for ids, scores in zip(drafted.candidates, drafted.scores, strict=True):
        weight = np.exp((scores[taken] - scores[taken].max()) / temperature)
        q, u, running = weight / weight.sum(), uniform(), 0.0
        for taken in range(len(q)):
            running += q[taken]
            if u < running:
                break
        tokens.append(int(ids[taken]))
        qs.append(q)
    return tokens, qs


def decisive_margin(drafted: Drafted, temperature: float, uniforms: F64) -> float:
    """The smallest difference that the candidates, the greedy path or the drawn path hang on."""
    k = drafted.candidates.shape[1]
    best = -np.sort(-drafted.logits, axis=1)[:, : k + 1]
    margins = [np.min(best[:, :-1] - best[:, 1:])]
    _, qs = sampled_path(drafted, temperature, iter(uniforms).__next__)
    margins += [np.min(np.abs(np.cumsum(q[:-1]) - u)) for q, u in zip(qs, uniforms, strict=True)]
    taken = 0
    for p, token in enumerate(greedy_path(drafted)):
        first, second = -np.sort(-drafted.scores[p, taken])[:2]
        margins.append(first - second)
        taken = int(np.flatnonzero(drafted.candidates[p] == token)[0])
    return float(min(margins))
