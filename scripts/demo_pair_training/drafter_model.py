"""The DFlash2 drafter: seven proposals in one pass from the target's features, with a selector.

A block is the anchor token and seven masks. Its rows attend to the target's features below the
anchor (inside the window) and to all rows of their own block. Each layer mixes neighboring rows
before and after its two sublayers by a short convolution whose kernel depends on the row.

Shapes: B segments of T context positions, N anchors in each, block rows J = 8, hidden H.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .target_model import Layer, linear, rms_norm, rope_table, rotate

MATRICES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
PROJECTIONS = ("attention_conv_projection", "mlp_conv_projection")


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of the drafter; the defaults are the shipped one (5.30 M parameters)."""

    vocabulary: int = 4096
    hidden: int = 320
    layers: int = 3
    intermediate: int = 1024
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    target_layers: int = 8
    taps: tuple[int, ...] = (1, 3, 5, 7)
    window: int = 128
    block: int = 8
    mask_token: int = 3
    conv_group: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16
    eps: float = 1e-6

    @property
    def groups(self) -> int:
        return self.hidden // self.conv_group

    @property
    def proposals(self) -> int:
        return self.block - 1


@dataclass
class DrafterWorking:
    """Tensors of one pass: matrices in the compute precision, the rest fp32."""

    shape: DrafterShape
    fc: Tensor
    hidden_norm: Tensor
    norm: Tensor
    predecessor: Tensor
    successor: Tensor
    selector_projection: Tensor
    layers: list[Layer] = field(default_factory=list)


def _normal(*size: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size) * std)


def _ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


def _base_kernel(s: DrafterShape) -> nn.Parameter:
    """``[side, tap, H]``: the row itself and nothing of the one before it."""
    kernel = torch.zeros(2, 2, s.hidden)
    kernel[:, 0] = 1
    return nn.Parameter(kernel)


def _layer_parameters(s: DrafterShape) -> nn.ParameterDict:
    std, q_width, kv_width = 0.02 / math.sqrt(2 * s.layers), s.heads, s.kv_heads
    q_width, kv_width = q_width * s.head_dim, kv_width * s.head_dim
    p = nn.ParameterDict()
    p["input_layernorm"], p["post_attention_layernorm"] = _ones(s.hidden), _ones(s.hidden)
    p["q_proj"], p["o_proj"] = _normal(q_width, s.hidden), _normal(s.hidden, q_width, std=std)
    p["k_proj"], p["v_proj"] = _normal(kv_width, s.hidden), _normal(kv_width, s.hidden)
    p["q_norm"], p["k_norm"] = _ones(s.head_dim), _ones(s.head_dim)
    p["gate_proj"] = _normal(s.intermediate, s.hidden)
    p["up_proj"] = _normal(s.intermediate, s.hidden)
    p["down_proj"] = _normal(s.hidden, s.intermediate, std=std)
    for name in ("attention_conv", "mlp_conv"):
        p[name] = _base_kernel(s)
        p[f"{name}_projection"] = nn.Parameter(torch.zeros(4 * s.groups, s.hidden))
    return p


class DrafterModel(nn.Module):
    """Holds the fp32 parameters."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        self.fc = _normal(shape.hidden, shape.hidden * len(shape.taps))
        self.hidden_norm, self.norm = _ones(shape.hidden), _ones(shape.hidden)
        self.predecessor = _normal(shape.vocabulary, shape.selector_rank, std=0.5)
        self.successor = _normal(shape.vocabulary, shape.selector_rank, std=0.1)
        self.selector_projection = _normal(shape.selector_rank, shape.hidden)
        self.layers = nn.ModuleList(_layer_parameters(shape) for _ in range(shape.layers))

    def working(self, dtype: torch.dtype) -> DrafterWorking:
        layers = [
            {k: v.to(dtype) if k in MATRICES + PROJECTIONS else v for k, v in layer.items()}
            for layer in self.layers
        ]
        return DrafterWorking(
            self.shape,
            self.fc.to(dtype),
            self.hidden_norm,
            self.norm,
            self.predecessor,
            self.successor,
            self.selector_projection.to(dtype),
            layers,
        )

    def matrices(self) -> list[nn.Parameter]:
        """The matrices that an orthogonalizing optimizer may take."""
        return [self.fc] + [layer[name] for layer in self.layers for name in MATRICES]

    def decayed(self) -> list[nn.Parameter]:
        """Other matrices with weight decay."""
        rest = [layer[name] for layer in self.layers for name in PROJECTIONS]
        return [self.selector_projection, *rest]


def visibility(s: DrafterShape, context: Tensor, anchors: Tensor) -> Tensor:
    """Which keys a block row sees, by definition: ``[B, N * J, T + N * J]``.

    ``context [B, T]`` and ``anchors [B, N]`` are absolute positions. Row j of a block with its
    anchor at p sees the context position c if c < p and p + j - c < window, and all rows of its
    own block; no row of another block.
    """
    rows = anchors[..., None] + torch.arange(s.block, device=anchors.device)  # [B, N, J]
    below = context[:, None, None] < anchors[..., None, None]
    near = rows[..., None] - context[:, None, None] < s.window
    own = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device)
    own = own.repeat_interleave(s.block, 0).repeat_interleave(s.block, 1)
    own = own.expand(anchors.shape[0], -1, -1)
    return torch.cat([(below & near).flatten(1, 2), own], -1)


def convolve(s: DrafterShape, x: Tensor, base: Tensor, change: Tensor) -> Tensor:
    """Mix each row with the one before it in its block, fp32.

    ``x [..., J, H]``, base kernel ``[tap, H]``, row-dependent change ``[..., J, tap, groups]``.
    """
    x = x.float().unflatten(-1, (s.groups, s.conv_group))
    before = F.pad(x[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
    base = base.unflatten(-1, (s.groups, s.conv_group))
    change = change.float()[..., None]
    here, past = base[0] + change[..., 0, :, :], base[1] + change[..., 1, :, :]
    return (here * x + past * before).flatten(-2)


def _rotary(x: Tensor, weight: Tensor, rope: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """Norm and rotate heads ``[B, L, heads, d]`` -> ``[B, heads, L, d]``, in x's precision."""
    cos, sin = rope[0][:, :, None], rope[1][:, :, None]
    return rotate(rms_norm(x, weight, eps), cos, sin).to(x.dtype).transpose(1, 2)


def _changes(s: DrafterShape, n: Tensor, projection: Tensor) -> Tensor:
    """Kernel changes ``[B, N, J, side, tap, groups]`` of normed rows."""
    return linear(n, projection).unflatten(-1, (2, 2, s.groups))


def drafter_block(
    s: DrafterShape,
    x: Tensor,
    context: Tensor,
    visible: Tensor,
    block_rope: tuple[Tensor, Tensor],
    context_rope: tuple[Tensor, Tensor],
    w: Layer,
) -> Tensor:
    """One layer over ``x [B, N, J, H]``; ``context [B, T, H]``, ropes ``[B, length, d / 2]``."""
    dtype, shape = w["q_proj"].dtype, x.shape

    def heads(rows: Tensor, name: str, count: int) -> Tensor:
        return linear(rows, w[name]).unflatten(-1, (count, s.head_dim))

    n = rms_norm(x, w["input_layernorm"], s.eps)
    change = _changes(s, n, w["attention_conv_projection"])
    rows = convolve(s, n, w["attention_conv"][0], change[..., 0, :, :]).to(dtype).flatten(1, 2)
    q = _rotary(heads(rows, "q_proj", s.heads), w["q_norm"], block_rope, s.eps)
    own_k = _rotary(heads(rows, "k_proj", s.kv_heads), w["k_norm"], block_rope, s.eps)
    own_v = heads(rows, "v_proj", s.kv_heads).transpose(1, 2)
    past_k = _rotary(heads(context, "k_proj", s.kv_heads), w["k_norm"], context_rope, s.eps)
    past_v = heads(context, "v_proj", s.kv_heads).transpose(1, 2)
    ratio = s.heads // s.kv_heads
    k = torch.cat([past_k, own_k], 2).repeat_interleave(ratio, 1)
    v = torch.cat([past_v, own_v], 2).repeat_interleave(ratio, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])
    out = linear(out.transpose(1, 2).flatten(2), w["o_proj"]).view(shape)
    x = x + convolve(s, out, w["attention_conv"][1], change[..., 1, :, :])
    n = rms_norm(x, w["post_attention_layernorm"], s.eps)
    change = _changes(s, n, w["mlp_conv_projection"])
    rows = convolve(s, n, w["mlp_conv"][0], change[..., 0, :, :]).to(dtype)
    out = linear(F.silu(linear(rows, w["gate_proj"])) * linear(rows, w["up_proj"]), w["down_proj"])
    return x + convolve(s, out, w["mlp_conv"][1], change[..., 1, :, :])


@cache
def compiled_block() -> Callable[..., Tensor]:
    return torch.compile(drafter_block, dynamic=False)


def forward(
    w: DrafterWorking,
    features: Tensor,
    first: Tensor,
    anchors: Tensor,
    tokens: Tensor,
    embedding: Tensor,
    block: Callable[..., Tensor] = drafter_block,
) -> Tensor:
    """Normed proposal rows ``[B, N, 7, H]`` for the target's head.

    ``features [B, T, taps * H]`` start at the absolute positions ``first [B]``; ``anchors [B, N]``
    are absolute positions of the anchor tokens ``tokens [B, N]``.
    """
    s = w.shape
    positions = first[:, None] + torch.arange(features.shape[1], device=features.device)
    context = rms_norm(linear(features, w.fc), w.hidden_norm, s.eps).to(w.fc.dtype)
    rows = anchors[..., None] + torch.arange(s.block, device=anchors.device)
    block_rope = rope_table(rows.flatten(1), s.head_dim, s.rope_theta)
    context_rope = rope_table(positions, s.head_dim, s.rope_theta)
    masks = torch.full_like(rows[..., 1:], s.mask_token)
    x = F.embedding(torch.cat([tokens[..., None], masks], -1), embedding)
    visible = visibility(s, positions, anchors)
    for layer in w.layers:
        x = block(s, x, context, visible, block_rope, context_rope, layer)
    return rms_norm(x[..., 1:, :], w.norm, s.eps)


def selector_term(w: DrafterWorking, hidden: Tensor, predecessors: Tensor) -> Tensor:
    """What the selector adds to all logits ``[..., V]``, given the tokens before (``[...]``)."""
    gate = linear(hidden, w.selector_projection)
    return F.linear(F.embedding(predecessors, w.predecessor) * gate, w.successor)


@dataclass
class Draft:
    """Proposals ``path [R, 7]``, candidates ``[R, 7, 16]`` and their probabilities (or None)."""

    path: Tensor
    candidates: Tensor
    probabilities: Tensor | None


def select(
    w: DrafterWorking,
    hidden: Tensor,
    logits: Tensor,
    anchors: Tensor,
    temperature: float = 0.0,
    *,
    use_selector: bool = True,
) -> Draft:
    """Walk the candidates of ``logits [R, 7, V]`` one position after the other.

    At a temperature a proposal is drawn from the softmax over the candidates' scores.
    """
    best, ids = logits.topk(w.shape.selector_top_k, -1)
    gate = linear(hidden, w.selector_projection).float()
    previous, path, drawn = anchors, [], []
    for i in range(w.shape.proposals):
        scores = best[:, i]
        if use_selector:
            rows = w.predecessor[previous] * gate[:, i]
            scores = scores + (rows[:, None] * w.successor[ids[:, i]]).sum(-1)
        if temperature > 0:
            q = (scores.double() / temperature).softmax(-1)
            drawn.append(q)
            choice = torch.multinomial(q, 1)
        else:
            choice = scores.argmax(-1, keepdim=True)
        previous = ids[:, i].gather(1, choice)[:, 0]
        path.append(previous)
    return Draft(torch.stack(path, 1), ids, torch.stack(drawn, 1) if drawn else None)
