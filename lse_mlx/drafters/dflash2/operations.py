"""The arithmetic between the matrix products: MLX on a device, NumPy on a CPU.

The drafter is written once, over the methods and functions that both array types have under one
name; what differs stands here. On a CPU the products are NumPy's (`HostLinear`), and MLX between
them would hand every few small operations to its own thread and wait for it: that costs more than
the arithmetic, and much more on a busy machine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lse_mlx.kernels.host_arithmetic import host_norm, host_silu

Array = Any
"""An mx.array on a device, a NumPy array on a CPU; never both in one pass."""


@dataclass(frozen=True)
class Operations:
    """What the passes need besides methods of arrays. Contracts stand at the MLX functions.

    arrays: mlx.core or numpy, for the functions that both have.
    own:    an mx.array as an array of this kind.
    start:  lets the device begin to compute some arrays, and lets go of what they are made of.
    """

    arrays: ModuleType
    own: Callable[[mx.array], Array]
    norm: Callable[[Array, Array, float], Array]
    attend: Callable[[Array, Array, Array], Array]
    gate: Callable[[Array], Array]
    start: Callable[[list[Array]], None]


def norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * weight along the last axis.

    x: fp32 [..., width]; weight: fp32, of x's last axes or fewer. Returns fp32 like x.
    """
    if weight.ndim == 1:
        return mx.fast.rms_norm(x, weight, eps)
    return mx.fast.rms_norm(x, None, eps) * weight


def attend(queries: mx.array, keys_values: mx.array, mask: mx.array) -> mx.array:
    """Attention of a block's queries over ring and block.

    queries:     fp32 [rows, query heads, head_dim]; head h reads key/value head h // (heads / kv).
    keys_values: fp32 [2, kv heads, slots, head_dim].
    mask:        fp32 [rows, slots]: 0 where the query sees the slot, -inf where it does not. A
                 query sees at least one slot.
    Returns fp32 [rows, query heads * head_dim].
    """
    mixed = mx.fast.scaled_dot_product_attention(
        queries.transpose(1, 0, 2)[None],
        keys_values[:1],
        keys_values[1:],
        scale=queries.shape[-1] ** -0.5,
        mask=mask,
    )
    return mixed[0].transpose(1, 0, 2).reshape(queries.shape[0], -1)


def gate(gate_up: mx.array) -> mx.array:
    """silu(gate) * up of the two halves of `gate_up`, fp32 [rows, 2 * width]; [rows, width]."""
    half = gate_up.shape[-1] // 2
    return nn.silu(gate_up[:, :half]) * gate_up[:, half:]


def _host_attend(queries: Array, keys_values: Array, mask: Array) -> Array:
    rows, heads, head_dim = queries.shape
    keys, values = keys_values
    # Query heads of one key/value head become rows of one product.
    grouped = queries.transpose(1, 0, 2).reshape(len(keys), -1, head_dim)
    grouped = grouped * np.float32(head_dim**-0.5)
    scores = np.matmul(grouped, keys.transpose(0, 2, 1)).reshape(heads, rows, -1)
    scores += mask
    scores -= scores.max(-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.matmul(weights.reshape(len(keys), -1, keys.shape[1]), values)
    return mixed.reshape(heads, rows, head_dim).transpose(1, 0, 2).reshape(rows, -1)


def _host_gate(gate_up: Array) -> Array:
    half = gate_up.shape[-1] // 2
    return host_silu(gate_up[:, :half]) * gate_up[:, half:]


DEVICE = Operations(mx, lambda array: array, norm, attend, gate, mx.async_eval)
HOST = Operations(np, np.array, host_norm, _host_attend, _host_gate, lambda arrays: None)
