"""The gated delta rule, in chunks for training and step by step for decoding and tests.

Shapes: B sequences, T positions, K key heads, R value heads for each key head, D key and E value
dimensions. A state is ``[B, K, R, D, E]``; position t does

    S <- exp(log_decay_t) S;   S <- S + k_t (beta_t (v_t - k_t S));   out_t = q_t S / sqrt(D)
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CHUNK = 64
LEAF = 16


@contextmanager
def full_precision_products() -> Iterator[None]:
    """Inside, fp32 matrix products use no TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _invert(matrix: Tensor) -> Tensor:
    """Inverse of unit lower triangular matrices: halves down to LEAF, then a Neumann product."""
    size = matrix.shape[-1]
    if size <= LEAF:
        identity = torch.eye(size, device=matrix.device, dtype=matrix.dtype)
        power = identity - matrix
        inverse = identity + power
        reached = 2
        while reached < size:
            power = power @ power
            inverse = inverse + inverse @ power
            reached *= 2
        return inverse
    half = size // 2
    corners = torch.stack([matrix[..., :half, :half], matrix[..., half:, half:]])
    upper, lower = _invert(corners)
    coupling = -(lower @ (matrix[..., half:, :half] @ upper))
    top = torch.cat([upper, torch.zeros_like(upper)], -1)
    return torch.cat([top, torch.cat([coupling, lower], -1)], -2)


@torch.library.custom_op("demo_pair::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(matrix: Tensor) -> Tensor:
    """Inverse of ``[..., n, n]`` unit lower triangular matrices, n = 2^i. The diagonal must be 1."""
    with full_precision_products():
        return _invert(matrix).contiguous()


@unit_lower_inverse.register_fake
def _(matrix: Tensor) -> Tensor:
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


def _save_inverse(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_gradient(ctx, gradient: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    transposed = inverse.transpose(-1, -2)
    return -(transposed @ (gradient @ transposed))


unit_lower_inverse.register_autograd(_inverse_gradient, setup_context=_save_inverse)


def chunked(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """All outputs ``[B, T, K, R, E]`` from a zero state; T is a multiple of 64.

    q and k are ``[B, T, K, D]`` (unit length), v ``[B, T, K, R, E]``, log_decay and beta
    ``[B, T, K, R]``. Inside a chunk the recurrence is one unit lower triangular system.
    """
    batch, length, heads, width = k.shape
    chunks = length // CHUNK

    def split(x: Tensor) -> Tensor:  # [B, T, K, (R,) X] -> [B, K, R or 1, n, 64, X]
        x = x.reshape(batch, chunks, CHUNK, heads, -1, x.shape[-1])
        return x.permute(0, 3, 4, 1, 2, 5)

    q, k, v = split(q * width**-0.5), split(k), split(v)
    beta = split(beta[..., None])
    total = split(log_decay[..., None]).cumsum(-2)  # log decay from the chunk's start, inclusive
    last = total[..., -1:, :]
    ones = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device)
    decay = (total - total.transpose(-1, -2)).masked_fill(ones.triu(1), float("-inf")).exp()
    keys = k.transpose(-1, -2)
    system = ((k @ keys) * decay * beta).masked_fill(ones.triu(), 0.0)
    inverse = unit_lower_inverse(system + torch.eye(CHUNK, device=q.device, dtype=q.dtype))
    written = inverse @ (v * beta)
    erased = inverse @ (k * (beta * total.exp()))
    scores = (q @ keys) * decay
    q_in = q * total.exp()
    k_out = (k * (last - total).exp()).transpose(-1, -2)
    keep = last.exp()
    state = torch.zeros(*v.shape[:3], width, v.shape[-1], device=q.device, dtype=q.dtype)
    outputs = []
    for i in range(chunks):
        new = written[:, :, :, i] - erased[:, :, :, i] @ state
        outputs.append(q_in[:, :, :, i] @ state + scores[:, :, :, i] @ new)
        state = state * keep[:, :, :, i] + k_out[:, :, :, i] @ new
    out = torch.stack(outputs, 3)  # [B, K, R, n, 64, E]
    return out.permute(0, 3, 4, 1, 2, 5).reshape(batch, length, heads, v.shape[2], -1)


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """One position; changes ``state [B, K, R, D, E]`` in place and returns ``[B, K, R, E]``.

    q and k are ``[B, K, D]``, v ``[B, K, R, E]``, log_decay and beta ``[B, K, R]``. The state is
    read once for both products and updated in place, because it is most of the memory traffic.
    """
    decay = log_decay.exp()[..., None]
    read = torch.stack([k, q], -2)[:, :, None] @ state  # [B, K, R, 2, E]
    change = (v - read[..., 0, :] * decay) * beta[..., None]
    overlap = (q * k).sum(-1)[:, :, None, None]
    state.mul_(decay[..., None]).addcmul_(k[:, :, None, :, None], change[..., None, :])
    return (read[..., 1, :] * decay + overlap * change) * q.shape[-1] ** -0.5


def recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The definition, position by position: same arguments and result as ``chunked``."""
    batch, length, heads, width = k.shape
    ratio, depth = v.shape[-2:]
    state = torch.zeros(batch, heads, ratio, width, depth, device=q.device, dtype=q.dtype)
    outputs = []
    for t in range(length):
        state = state * log_decay[:, t].exp()[..., None, None]
        key = k[:, t, :, None, :, None]
        change = (v[:, t] - (key * state).sum(-2)) * beta[:, t, ..., None]
        state = state + key * change[..., None, :]
        query = q[:, t, :, None, :, None] * width**-0.5
        outputs.append((query * state).sum(-2))
    return torch.stack(outputs, 1)
