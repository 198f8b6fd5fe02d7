"""The target: a small Qwen3.5-shaped model (Gated DeltaNet, every fourth layer full attention).

The forward pass is written as functions over a layer's tensors. ``TargetModel.working`` makes those
tensors from the fp32 parameters: matrices in the compute precision, rounded to their 4-bit values
where asked; vectors stay fp32. So precision and rounding are arguments, and no state is hidden.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import delta_rule
from .quantization import fake_quantize

Layer = dict[str, Tensor]
DELTA_MATRICES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
ATTENTION_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")
MATRICES = DELTA_MATRICES + ATTENTION_MATRICES + MLP_MATRICES


@dataclass(frozen=True)
class TargetShape:
    """Sizes of the target; the defaults are the shipped model (14.15 M parameters)."""

    vocabulary: int = 4096
    hidden: int = 320
    layers: int = 8
    intermediate: int = 896
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_fraction: float = 0.25
    rope_theta: float = 10_000.0
    key_heads: int = 4
    value_heads: int = 8
    key_dim: int = 64
    value_dim: int = 64
    conv_kernel: int = 4
    attention_every: int = 4
    eps: float = 1e-6

    def is_attention(self, layer: int) -> bool:
        return layer % self.attention_every == self.attention_every - 1

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def qkv_width(self) -> int:
        return 2 * self.key_width + self.value_width


@dataclass
class Working:
    """Tensors of one forward pass: ``layers[i][name]``, fp32 embedding and head ``[V, hidden]``."""

    shape: TargetShape
    embedding: Tensor
    head: Tensor
    norm: Tensor
    layers: list[Layer] = field(default_factory=list)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits ``[..., V]`` of normed hidden rows ``[..., hidden]``."""
        return F.linear(hidden.float(), self.head)


def _normal(*size: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size) * std)


def _ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


def _layer_parameters(s: TargetShape, layer: int) -> nn.ParameterDict:
    """Fresh parameters of one layer, named as in the checkpoint."""
    out_std = 0.02 / math.sqrt(2 * s.layers)
    p = nn.ParameterDict()
    p["input_layernorm"], p["post_attention_layernorm"] = _ones(s.hidden), _ones(s.hidden)
    p["gate_proj"] = _normal(s.intermediate, s.hidden)
    p["up_proj"] = _normal(s.intermediate, s.hidden)
    p["down_proj"] = _normal(s.hidden, s.intermediate, std=out_std)
    if s.is_attention(layer):
        p["q_proj"] = _normal(2 * s.heads * s.head_dim, s.hidden)  # query and gate, head by head
        p["k_proj"] = _normal(s.kv_heads * s.head_dim, s.hidden)
        p["v_proj"] = _normal(s.kv_heads * s.head_dim, s.hidden)
        p["o_proj"] = _normal(s.hidden, s.heads * s.head_dim, std=out_std)
        p["q_norm"], p["k_norm"] = _ones(s.head_dim), _ones(s.head_dim)
        return p
    p["in_proj_qkv"] = _normal(s.qkv_width, s.hidden)
    p["in_proj_z"] = _normal(s.value_width, s.hidden)
    p["in_proj_b"] = _normal(s.value_heads, s.hidden)
    p["in_proj_a"] = _normal(s.value_heads, s.hidden)
    p["out_proj"] = _normal(s.hidden, s.value_width, std=out_std)
    p["conv1d"] = _normal(s.qkv_width, s.conv_kernel, std=0.3)
    step = torch.exp(torch.empty(s.value_heads).uniform_(math.log(0.001), math.log(0.1)))
    p["dt_bias"] = nn.Parameter(torch.log(torch.expm1(step)))
    p["A_log"] = nn.Parameter(torch.empty(s.value_heads).uniform_(1, 16).log())
    p["norm"] = _ones(s.value_dim)
    return p


class TargetModel(nn.Module):
    """Holds the fp32 parameters; see ``forward`` of this module's namesake function below."""

    def __init__(self, shape: TargetShape):
        super().__init__()
        self.shape = shape
        self.embedding = _normal(shape.vocabulary, shape.hidden)
        self.head = _normal(shape.vocabulary, shape.hidden)
        self.norm = _ones(shape.hidden)
        self.layers = nn.ModuleList(_layer_parameters(shape, i) for i in range(shape.layers))

    def working(self, dtype: torch.dtype, *, quantize: bool = False) -> Working:
        """Tensors for a forward pass with matrices in ``dtype``, on 4-bit values if ``quantize``."""
        rounded = fake_quantize if quantize else _same
        layers = [
            {
                name: rounded(value).to(dtype) if name in MATRICES else value
                for name, value in layer.items()
            }
            for layer in self.layers
        ]
        return Working(self.shape, rounded(self.embedding), rounded(self.head), self.norm, layers)

    def matrices(self) -> list[nn.Parameter]:
        """The hidden matrices that an orthogonalizing optimizer may take (not the tiny ones)."""
        skip = ("in_proj_a", "in_proj_b")
        names = [name for name in MATRICES if name not in skip]
        return [layer[name] for layer in self.layers for name in names if name in layer]


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)  # like a rounded one no parameter: compiled functions see one kind


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in the weight's precision."""
    return F.linear(x.to(weight.dtype), weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis, in fp32 or better."""
    x = x.float() if x.dtype == torch.bfloat16 else x
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope_table(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[..., width / 2]`` of integer positions ``[...]``."""
    exponents = torch.arange(0, width, 2, device=positions.device).float() / width
    angles = positions.float()[..., None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half over the first ``2 * cos.shape[-1]`` dimensions; the rest stays."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def split_query_gate(s: TargetShape, x: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., heads * 2 * d]`` to the queries ``[..., heads, d]`` and gates ``[..., heads * d]``."""
    x = x.unflatten(-1, (s.heads, 2 * s.head_dim))
    return x[..., : s.head_dim], x[..., s.head_dim :].flatten(-2)


def split_qkv(s: TargetShape, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved ``[..., qkv]`` to unit q, k ``[..., K, D]`` and v ``[..., K, R, E]``, all fp32."""
    x = x.float() if x.dtype == torch.bfloat16 else x
    q, k, v = x.split([s.key_width, s.key_width, s.value_width], -1)
    q, k = q.unflatten(-1, (s.key_heads, -1)), k.unflatten(-1, (s.key_heads, -1))
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6)
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    return q, k, v.unflatten(-1, (s.key_heads, -1, s.value_dim))


def delta_gates(s: TargetShape, n: Tensor, w: Layer) -> tuple[Tensor, Tensor]:
    """Log decay and beta ``[..., K, R]`` of normed rows ``[..., hidden]``."""
    a, b = linear(n, w["in_proj_a"]), linear(n, w["in_proj_b"])
    step = a.to(w["A_log"].dtype) + w["dt_bias"]
    step = step.clamp_min(0) + torch.log1p(torch.exp(-step.abs()))  # softplus
    log_decay = -w["A_log"].exp() * step
    beta = b.to(w["A_log"].dtype).sigmoid()
    return log_decay.unflatten(-1, (s.key_heads, -1)), beta.unflatten(-1, (s.key_heads, -1))


def delta_output(s: TargetShape, out: Tensor, n: Tensor, w: Layer) -> Tensor:
    """Norm, gate and project the rule's result ``[..., K, R, E]``."""
    z = linear(n, w["in_proj_z"]).unflatten(-1, (s.value_heads, -1))
    out = rms_norm(out.flatten(-3, -2), w["norm"], s.eps).to(z.dtype) * F.silu(z)
    return linear(out.flatten(-2), w["out_proj"])


def mlp(s: TargetShape, x: Tensor, w: Layer) -> Tensor:
    n = rms_norm(x, w["post_attention_layernorm"], s.eps).to(w["gate_proj"].dtype)
    return linear(F.silu(linear(n, w["gate_proj"])) * linear(n, w["up_proj"]), w["down_proj"])


def delta_block(s: TargetShape, x: Tensor, w: Layer) -> Tensor:
    """One Gated DeltaNet layer with its MLP over the residual stream ``[B, T, hidden]``."""
    n = rms_norm(x, w["input_layernorm"], s.eps).to(w["in_proj_qkv"].dtype)
    mixed, kernel = linear(n, w["in_proj_qkv"]), w["conv1d"].to(n.dtype)
    padded = F.pad(mixed, (0, 0, s.conv_kernel - 1, 0))
    taps = [padded[:, j : j + x.shape[1]] * kernel[:, j] for j in range(s.conv_kernel)]
    q, k, v = split_qkv(s, F.silu(sum(taps[1:], taps[0])))
    out = delta_rule.chunked(q, k, v, *delta_gates(s, n, w))
    x = x + delta_output(s, out, n, w)
    return x + mlp(s, x, w)


def attention_block(s: TargetShape, x: Tensor, w: Layer, cos: Tensor, sin: Tensor) -> Tensor:
    """One gated full-attention layer with its MLP over ``[B, T, hidden]``; causal."""
    n, dtype = rms_norm(x, w["input_layernorm"], s.eps), w["q_proj"].dtype
    n, cos, sin = n.to(dtype), cos[:, None], sin[:, None]  # the angles stay fp32
    q, gate = split_query_gate(s, linear(n, w["q_proj"]))
    k = linear(n, w["k_proj"]).unflatten(-1, (s.kv_heads, -1))
    v = linear(n, w["v_proj"]).unflatten(-1, (s.kv_heads, -1))
    q = rotate(rms_norm(q, w["q_norm"], s.eps), cos, sin).to(dtype).transpose(1, 2)
    k = rotate(rms_norm(k, w["k_norm"], s.eps), cos, sin).to(dtype).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
    x = x + linear(out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate), w["o_proj"])
    return x + mlp(s, x, w)


@dataclass(frozen=True)
class Blocks:
    """The two layer kinds as functions, plain or compiled."""

    delta: Callable[..., Tensor] = delta_block
    attention: Callable[..., Tensor] = attention_block

    @classmethod
    @cache
    def compiled(cls) -> "Blocks":
        return cls(*(torch.compile(f, dynamic=False) for f in (delta_block, attention_block)))


PLAIN = Blocks()


def forward(
    w: Working, ids: Tensor, taps: Sequence[int] = (), blocks: Blocks = PLAIN
) -> tuple[Tensor, list[Tensor]]:
    """Normed last hidden rows ``[B, T, hidden]`` and the raw outputs of the tapped layers.

    ``ids`` is ``[B, T]`` with T a multiple of 64 (pad at the right: the model is causal).
    """
    s = w.shape
    x = F.embedding(ids, w.embedding)
    positions = torch.arange(ids.shape[1], device=ids.device)
    cos, sin = rope_table(positions, int(s.head_dim * s.rotary_fraction), s.rope_theta)
    tapped = []
    for i, layer in enumerate(w.layers):
        if s.is_attention(i):
            x = blocks.attention(s, x, layer, cos, sin)
        else:
            x = blocks.delta(s, x, layer)
        if i in taps:
            tapped.append(x)
    return rms_norm(x, w.norm, s.eps), tapped
