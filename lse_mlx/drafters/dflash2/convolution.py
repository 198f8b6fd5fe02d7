"""The dynamic convolution around each sublayer: two taps along the block, weights by group."""

from lse_mlx.drafters.dflash2.operations import Array


def dynamic_convolution(x: Array, base: Array, dynamic: Array, side: int) -> Array:
    """y[t, c] = sum over tap of (base[side, tap, c] + D[t, side, tap, group of c]) * x[t - tap, c].

    x:       fp32 [rows, hidden].
    base:    fp32 [2 sides, 2 taps, groups, hidden / groups], learned; tap 0 is the current row.
    dynamic: fp32 [rows, 2 * 2 * groups], D row by row: computed from the sublayer's input, shared
             by a group.
    side:    0 before the sublayer, 1 after it.
    Returns fp32 [rows, hidden]. The row before row 0 is zero: a block does not see past its edge.
    Source: DFlash2, draft pass.
    """
    grouped = x.reshape(x.shape[0], *base.shape[2:])
    coefficients = dynamic.reshape(x.shape[0], *base.shape[:3])[:, side, :, :, None]
    y = (base[side, 0] + coefficients[:, 0]) * grouped
    y[1:] += (base[side, 1] + coefficients[1:, 1]) * grouped[:-1]
    return y.reshape(x.shape)
