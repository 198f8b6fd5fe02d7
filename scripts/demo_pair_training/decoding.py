"""Batched decoding of the target: many conversations at once, prompts forced, replies sampled.

Every row is a conversation of one or more user turns. A row's prompt tokens are forced, the reply
is sampled until the end token, then the next prompt follows in the same row, so no row waits for
another one. Nothing leaves the device while it runs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import delta_rule
from .target_model import (
    Layer,
    TargetShape,
    Working,
    delta_gates,
    delta_output,
    linear,
    mlp,
    rms_norm,
    rope_table,
    rotate,
    split_qkv,
    split_query_gate,
)

END = 2  # <|im_end|>
# Without cuDNN, which would build a plan for every new number of keys.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Rollouts:
    """Conversations ``tokens [rows, T]`` (uint16 range) and what each position is.

    ``turn [rows, T]`` is 0 in prompts and padding and i in the i-th reply, its end token included.
    ``nats [rows, T]``, where it was asked for, is -log p of each token at temperature 1.
    """

    tokens: Tensor
    turn: Tensor
    nats: Tensor | None = None

    def first_reply(self) -> tuple[Tensor, Tensor]:
        """Start and end (exclusive) ``[rows]`` of the first reply."""
        inside = self.turn == 1
        start = inside.int().argmax(1)
        return start, start + inside.sum(1)


@dataclass
class Conversations:
    """Forced prompts: ``tokens [rows, turns, P]``, ``lengths [rows, turns]``.

    From the second turn on a prompt begins with the newline that follows an end token.
    """

    tokens: Tensor
    lengths: Tensor

    @classmethod
    def draw(
        cls, prompts: Tensor, lengths: Tensor, choice: Tensor, newline: list[int]
    ) -> "Conversations":
        """Conversations of the prompts ``choice [rows, turns]`` out of ``prompts [n, P]``."""
        prefix = torch.tensor(newline, device=prompts.device, dtype=prompts.dtype)
        plain = F.pad(prompts[choice], (0, len(newline)))
        later = torch.cat([prefix.expand(*choice.shape, -1), prompts[choice]], -1)
        first = (torch.arange(choice.shape[1], device=prompts.device) == 0)[None, :, None]
        extra = torch.where(first[..., 0], 0, len(newline))
        return cls(torch.where(first, plain, later), lengths[choice] + extra)


class _State:
    """Keys and values of attention layers; conv ring and delta state of the others."""

    def __init__(self, w: Working, rows: int, total: int):
        s, device = w.shape, w.head.device
        dtype = w.layers[0]["gate_proj"].dtype
        self.slots: list[tuple[Tensor, Tensor]] = []
        for i in range(s.layers):
            if s.is_attention(i):
                size = (rows, s.kv_heads, total, s.head_dim)
                first = torch.zeros(size, device=device, dtype=dtype)
                second = torch.zeros_like(first)
            else:
                ratio = s.value_heads // s.key_heads
                first = torch.zeros(rows, s.conv_kernel, s.qkv_width, device=device, dtype=dtype)
                size = (rows, s.key_heads, ratio, s.key_dim, s.value_dim)
                second = torch.zeros(size, device=device)
            self.slots.append((first, second))


def _delta_step(s: TargetShape, x: Tensor, w: Layer, ring: Tensor, state: Tensor, t: int) -> Tensor:
    n = rms_norm(x, w["input_layernorm"], s.eps).to(w["in_proj_qkv"].dtype)
    ring[:, t % s.conv_kernel] = linear(n, w["in_proj_qkv"])
    order = [(t + 1 + j) % s.conv_kernel for j in range(s.conv_kernel)]
    kernel = w["conv1d"].to(n.dtype)
    mixed = sum(ring[:, slot] * kernel[:, j] for j, slot in enumerate(order))
    q, k, v = split_qkv(s, F.silu(mixed))
    out = delta_rule.step(state, q, k, v, *delta_gates(s, n, w))
    x = x + delta_output(s, out, n, w)
    return x + mlp(s, x, w)


def _attention_step(
    s: TargetShape, x: Tensor, w: Layer, cache: tuple[Tensor, Tensor], rope: tuple, t: int
) -> Tensor:
    dtype = w["q_proj"].dtype
    n = rms_norm(x, w["input_layernorm"], s.eps).to(dtype)
    cos, sin = rope[0][t], rope[1][t]
    q, gate = split_query_gate(s, linear(n, w["q_proj"]))
    q = rotate(rms_norm(q, w["q_norm"], s.eps), cos, sin).to(dtype)
    k = linear(n, w["k_proj"]).unflatten(-1, (s.kv_heads, -1))
    keys, values = cache
    keys[:, :, t] = rotate(rms_norm(k, w["k_norm"], s.eps), cos, sin).to(dtype)
    values[:, :, t] = linear(n, w["v_proj"]).unflatten(-1, (s.kv_heads, -1))
    grouped = q.unflatten(1, (s.kv_heads, -1))  # query heads of one key head beside each other
    with sdpa_kernel(KERNELS):
        out = F.scaled_dot_product_attention(grouped, keys[:, :, : t + 1], values[:, :, : t + 1])
    x = x + linear(out.flatten(1) * torch.sigmoid(gate), w["o_proj"])
    return x + mlp(s, x, w)


def _step(w: Working, state: _State, tokens: Tensor, rope: tuple, t: int) -> Tensor:
    """Normed hidden rows ``[rows, hidden]`` of the tokens at position t."""
    s = w.shape
    x = F.embedding(tokens, w.embedding)
    for i, layer in enumerate(w.layers):
        if s.is_attention(i):
            x = _attention_step(s, x, layer, state.slots[i], rope, t)
        else:
            x = _delta_step(s, x, layer, *state.slots[i], t)
    return rms_norm(x, w.norm, s.eps)


@torch.no_grad()
def roll_out(
    w: Working, talks: Conversations, temperature: Tensor, total: int, *, with_nats: bool = False
) -> Rollouts:
    """Hold all conversations up to ``total`` tokens; ``temperature [rows]``, 0 is greedy."""
    device, (rows, turns, _) = w.head.device, talks.tokens.shape
    row = torch.arange(rows, device=device)
    tokens = torch.full((rows, total), END, device=device, dtype=torch.int64)
    turn = torch.zeros(rows, total, device=device, dtype=torch.int8)
    nats = torch.zeros(rows, total, device=device) if with_nats else None
    tokens[:, 0] = talks.tokens[:, 0, 0]
    current = torch.zeros(rows, device=device, dtype=torch.int64)  # the turn being held
    forced = torch.ones_like(current)  # prompt tokens already given in this turn
    state = _State(w, rows, total)
    width = int(w.shape.head_dim * w.shape.rotary_fraction)
    rope = rope_table(torch.arange(total, device=device), width, w.shape.rope_theta)
    for t in range(total - 1):
        hidden = _step(w, state, tokens[:, t], rope, t)
        logits = w.logits(hidden)
        noise = torch.empty_like(logits).exponential_().clamp_min_(1e-20).log_()
        sampled = torch.argmax(logits - temperature[:, None] * noise, -1)
        over = current >= turns
        held = current.clamp_max(turns - 1)
        replying = ~over & (forced >= talks.lengths[row, held])
        given = talks.tokens[row, held, forced.clamp_max(talks.tokens.shape[2] - 1)]
        token = torch.where(replying, sampled, torch.where(over, END, given))
        tokens[:, t + 1] = token
        if nats is not None:
            nats[:, t + 1] = logits.logsumexp(-1) - logits.gather(1, token[:, None])[:, 0]
        turn[:, t + 1] = torch.where(replying, current + 1, 0).to(torch.int8)
        ended = replying & (token == END)
        current = current + ended
        forced = torch.where(ended, 0, forced + 1)
        if t % 32 == 31 and bool((current >= turns).all()):
            break
    return Rollouts(tokens, turn, nats)


def repeated_fourgrams(tokens: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Marks of tokens that complete a 4-gram, and of those that repeat one of their own reply.

    Both are boolean ``[rows, T]``. A 4-gram lies wholly inside one reply.
    """
    rows, length = tokens.shape
    index = torch.arange(length, device=tokens.device)
    key = torch.zeros(rows, length, device=tokens.device, dtype=torch.int64)
    for back in (3, 2, 1, 0):
        key = key * 4096 + F.pad(tokens[:, : length - back], (back, 0))
    whole = (turn > 0) & (F.pad(turn[:, : length - 3], (3, 0)) == turn) & (index >= 3)
    key = torch.where(whole, key * 8 + turn, -1 - index)  # unique where there is no 4-gram
    ordered, order = torch.sort(key, dim=1, stable=True)
    again = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return whole, torch.zeros_like(whole).scatter(1, order, again)


def distinct_share(rollouts: Rollouts, number: int = 1) -> Tensor:
    """Share of distinct 4-grams among those of each row's reply ``number``; NaN without any."""
    whole, again = repeated_fourgrams(rollouts.tokens, rollouts.turn)
    mine = whole & (rollouts.turn == number)
    count = mine.sum(1)
    return torch.where(count > 0, 1 - (again & mine).sum(1) / count.clamp_min(1), torch.nan)
