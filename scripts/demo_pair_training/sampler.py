"""Batched sampling from the teacher: every chat of a batch advances one position per step.

All chats start at position 0 and none is padded: while a chat's prompt lasts its next token is
forced, after that it is drawn. So one static K/V buffer and one attention call serve all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from .teacher_files import TeacherShape


@dataclass(frozen=True)
class Settings:
    """How replies are drawn. min_p is relative to the most likely token, after temperature."""

    temperature: float = 0.6
    min_p: float = 0.1
    max_new: int = 168


class Layer(NamedTuple):
    """Weights of one block, with projections that share an input stacked."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Teacher:
    """The teacher in PyTorch, one token per chat and call."""

    def __init__(self, shape: TeacherShape, weights: dict[str, torch.Tensor]) -> None:
        self.shape = shape
        self.embedding = weights["token_embd.weight"]
        self.norm = weights["output_norm.weight"]
        self.layers = [_layer(weights, f"blk.{i}.") for i in range(shape.layers)]

    def new_cache(self, chats: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Empty K and V, each [layers, chats, kv_heads, positions, head_dim]."""
        s = self.shape
        size = (s.layers, chats, s.kv_heads, positions, s.head_dim)
        keys = torch.empty(size, device=self.embedding.device, dtype=self.embedding.dtype)
        return keys, torch.empty_like(keys)

    def rotary(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [positions, head_dim]; the first half of sin carries its sign."""
        half = self.shape.head_dim // 2
        device, dtype = self.embedding.device, self.embedding.dtype
        frequency = self.shape.theta ** (-torch.arange(half, device=device).float() / half)
        angle = torch.arange(positions, device=device).float()[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], 1).to(dtype), torch.cat([-sin, sin], 1).to(dtype)

    def step(
        self,
        tokens: torch.Tensor,
        position: int,
        cache: tuple[torch.Tensor, torch.Tensor],
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """Run tokens [chats] at one position, fill the cache there; hidden rows [chats, hidden]."""
        s = self.shape
        keys, values = cache
        x = self.embedding[tokens]
        for i, layer in enumerate(self.layers):
            qkv = (self._rms(x, layer.attn_norm) @ layer.qkv.T).view(len(x), -1, s.head_dim)
            qk, v = qkv.split([s.heads + s.kv_heads, s.kv_heads], dim=1)
            qk = qk * cos[position] + torch.roll(qk, s.head_dim // 2, -1) * sin[position]
            keys[i, :, :, position] = qk[:, s.heads :]
            values[i, :, :, position] = v
            # Query heads that share a K/V head stand in the query axis: K/V are read once.
            attended = F.scaled_dot_product_attention(
                qk[:, : s.heads].reshape(len(x), s.kv_heads, -1, s.head_dim),
                keys[i, :, :, : position + 1],
                values[i, :, :, : position + 1],
            )
            x = x + attended.reshape(len(x), s.hidden) @ layer.out.T
            gate, up = (self._rms(x, layer.ffn_norm) @ layer.gate_up.T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ layer.down.T
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 scores [chats, vocabulary]."""
        return (self._rms(hidden, self.norm) @ self.embedding.T).float()

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.eps)


def _layer(weights: dict[str, torch.Tensor], prefix: str) -> Layer:
    def stacked(*names: str) -> torch.Tensor:
        return torch.cat([weights[f"{prefix}{name}.weight"] for name in names])

    return Layer(
        attn_norm=stacked("attn_norm"),
        qkv=stacked("attn_q", "attn_k", "attn_v"),
        out=stacked("attn_output"),
        ffn_norm=stacked("ffn_norm"),
        gate_up=stacked("ffn_gate", "ffn_up"),
        down=stacked("ffn_down"),
    )


def draw(logits: torch.Tensor, settings: Settings, rng: torch.Generator) -> torch.Tensor:
    """One token per row of fp32 logits (overwritten), by Gumbel arg-max among the min-p tokens."""
    floor = logits.amax(-1, keepdim=True) + settings.temperature * math.log(settings.min_p)
    logits.masked_fill_(logits < floor, float("-inf")).div_(settings.temperature)
    waits = torch.empty_like(logits).exponential_(generator=rng)
    return logits.sub_(waits.clamp_min_(1e-20).log_()).argmax(-1)


@torch.inference_mode()
def sample_batch(
    teacher: Teacher,
    prompts: list[list[int]],
    settings: Settings,
    rng: torch.Generator,
    end_token: int,
) -> list[NDArray[np.uint16]]:
    """Reply tokens of each prompt, the end token included where the teacher wrote one."""
    device = teacher.embedding.device
    lengths = np.array([len(prompt) for prompt in prompts])
    positions = int(lengths.max()) + settings.max_new
    forced = np.zeros((len(prompts), positions), np.int64)
    for row, prompt in zip(forced, prompts, strict=True):
        row[: len(prompt)] = prompt
    tokens = torch.from_numpy(forced).to(device)
    limits = torch.from_numpy(lengths).to(device)
    cache = teacher.new_cache(len(prompts), positions)
    cos, sin = teacher.rotary(positions)
    for position in range(positions - 1):
        hidden = teacher.step(tokens[:, position], position, cache, cos, sin)
        if position + 1 < lengths.min():
            continue
        drawn = draw(teacher.logits(hidden), settings, rng)
        is_forced = limits > position + 1
        tokens[:, position + 1] = torch.where(is_forced, tokens[:, position + 1], drawn)
    rows = tokens.cpu().numpy().astype(np.uint16)
    return [
        _until_end(row[start : start + settings.max_new], end_token)
        for row, start in zip(rows, lengths, strict=True)
    ]


def _until_end(reply: NDArray[np.uint16], end_token: int) -> NDArray[np.uint16]:
    ends = np.flatnonzero(reply == end_token)
    return reply[: ends[0] + 1] if len(ends) else reply
