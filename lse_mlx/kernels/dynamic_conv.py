"""The dynamic convolution around each drafter sublayer: two taps along a block, weights by group.

Source: DFlash2, draft pass.
"""

from typing import Any

import mlx.core as mx

from lse_mlx.kernels.registry import Kernel, Registry

Array = Any
"""An mx.array on a device, a NumPy array on a CPU; never both in one call."""

KERNEL = Kernel("dynamic_conv", ("x", "base", "dynamic", "side"), ("y",))
_THREADS = 256


def dynamic_conv(registry: Registry, x: Array, base: Array, dynamic: Array, side: int) -> Array:
    """y[t, c] = sum over tap of (base[side, tap, c] + D[t, side, tap, group of c]) * x[t - tap, c].

    x:       fp32 [rows, hidden].
    base:    fp32 [2 sides, 2 taps, groups, hidden / groups], learned; tap 0 is the current row.
    dynamic: fp32 [rows, 2 * 2 * groups], D row by row: computed from the sublayer's input, shared
             by a group.
    side:    0 before the sublayer, 1 after it.
    Returns fp32 [rows, hidden], of the kind of array that `x` is; a NumPy array is served by NumPy.
    The row before row 0 is zero: a block does not see past its edge.
    """
    return registry.serve(
        KERNEL.name,
        isinstance(x, mx.array),
        lambda: _launch(registry, x, base, dynamic, side),
        lambda: dynamic_conv_reference(x, base, dynamic, side),
    )


def _launch(
    registry: Registry, x: mx.array, base: mx.array, dynamic: mx.array, side: int
) -> mx.array:
    rows, hidden = x.shape
    (y,) = registry.launch(
        KERNEL,
        inputs=[x, base, dynamic, side],
        outputs=[((rows, hidden), mx.float32)],
        grid=(-(-hidden // _THREADS) * _THREADS, rows, 1),
        threadgroup=(_THREADS, 1, 1),
        template={"C": base.shape[-1]},
    )
    return y


def dynamic_conv_reference(x: Array, base: Array, dynamic: Array, side: int) -> Array:
    """`dynamic_conv` in what MLX and NumPy have in common."""
    grouped = x.reshape(x.shape[0], *base.shape[2:])
    coefficients = dynamic.reshape(x.shape[0], *base.shape[:3])[:, side, :, :, None]
    y = (base[side, 0] + coefficients[:, 0]) * grouped
    y[1:] += (base[side, 1] + coefficients[1:, 1]) * grouped[:-1]
    return y.reshape(x.shape)
