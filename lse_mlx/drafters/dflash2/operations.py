"""The arithmetic between the matrix products: MLX on a device, NumPy on a CPU.

The drafter is written once, over the methods and functions that both array types have under one
name; what differs stands here. On a CPU the products are NumPy's (`HostLinear`), and MLX between
them would hand every few small operations to its own thread and wait for it: that costs more than
the arithmetic, and much more on a busy machine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import mlx.core as mx
import numpy as np

from lse_mlx.kernels.dynamic_conv import Array
from lse_mlx.kernels.host_arithmetic import host_norm, host_silu
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.sliding_attention import KERNEL, RingView, sliding_attention


@dataclass(frozen=True)
class Operations:
    """What the passes need besides methods of arrays. Contracts stand at the MLX functions.

    registry: the door to device kernels, and what counts the calls that none served.
    arrays:   mlx.core or numpy, for the functions that both have.
    own:      an mx.array as an array of this kind.
    attend:   a block's queries over a layer's ring and the block's own keys and values; see
              `device_operations`.
    start:    lets the device begin to compute some arrays, and lets go of what they are made of.
    """

    registry: Registry
    arrays: ModuleType
    own: Callable[[mx.array], Array]
    norm: Callable[[Array, Array, float], Array]
    attend: Callable[[Array, Array, Array, RingView], Array]
    gate: Callable[[Array], Array]
    start: Callable[[list[Array]], None]

    @property
    def on_host(self) -> bool:
        """Whether arrays are NumPy's."""
        return self.arrays is np


def device_operations(registry: Registry) -> Operations:
    """The form for a device: MLX, and the kernels that `registry` runs.

    `attend` is `sliding_attention`, of a layer's whole ring. `gate` takes fp32 [rows, 2 * width], a
    gate and what it lets through side by side, and returns `gated` of them, fp32 [rows, width].
    """

    def gate(gate_up: mx.array) -> mx.array:
        half = gate_up.shape[-1] // 2
        return registry.compiled(gated)(gate_up[:, :half], gate_up[:, half:])

    attend = partial(sliding_attention, registry)
    return Operations(registry, mx, lambda array: array, norm, attend, gate, mx.async_eval)


def host_operations(registry: Registry) -> Operations:
    """The form for a CPU: NumPy, every call counted as one that no device kernel served.

    `attend` uses the last rows of the ring, behind its slots, as scratch.
    """

    def attend(queries: Array, ring: Array, block: Array, view: RingView) -> Array:
        registry.reference(KERNEL.name)
        return _host_attend(queries, ring, block, view)

    return Operations(registry, np, np.array, host_norm, attend, _host_gate, lambda arrays: None)


def norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * weight along the last axis.

    x: fp32 [..., width]; weight: fp32, of x's last axes or fewer. Returns fp32 like x.
    """
    if weight.ndim == 1:
        return mx.fast.rms_norm(x, weight, eps)
    return mx.fast.rms_norm(x, None, eps) * weight


def gated(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up, element-wise: fp32 of any shape, both of the same."""
    return gate * mx.sigmoid(gate) * up


def _host_attend(queries: Array, ring: Array, block: Array, view: RingView) -> Array:
    rows, heads, head_dim = queries.shape
    # One array of fixed shape for each of the two products, and the ring is never copied.
    ring[:, :, view.slots :] = block
    keys, values = ring
    # Query heads of one key/value head become rows of one product.
    grouped = queries.transpose(1, 0, 2).reshape(len(keys), -1, head_dim)
    grouped = grouped * np.float32(head_dim**-0.5)
    scores = np.matmul(grouped, keys.transpose(0, 2, 1)).reshape(heads, rows, -1)
    np.copyto(scores, -np.inf, where=~view.seen_with_block)  # not a sum: NaN plus -inf is NaN
    scores -= scores.max(-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(-1, keepdims=True)
    weights = weights.reshape(len(keys), -1, keys.shape[1])
    mixed = np.matmul(weights, values)
    if not np.isfinite(mixed).all():
        # A weight of zero does not stop a NaN in a slot that nobody sees; rare, so not always done.
        seen = np.any(view.seen_with_block, axis=0)
        mixed = np.matmul(weights, np.where(seen[:, None], values, 0))
    return mixed.reshape(heads, rows, head_dim).transpose(1, 0, 2).reshape(rows, -1)


def _host_gate(gate_up: Array) -> Array:
    half = gate_up.shape[-1] // 2
    return host_silu(gate_up[:, :half]) * gate_up[:, half:]
