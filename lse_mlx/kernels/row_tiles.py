"""Products whose rows do not depend on how many rows there are, by always having as many."""

from collections.abc import Callable

import mlx.core as mx

TILE = 8


def in_tiles(product: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """`product` of x [..., in], eight rows to a call, the last call filled up with zeros.

    For products of stock MLX that are to be exact: MLX picks a kernel, and with it an order of
    summation, by the number of rows. Returns what `product` does, with x's leading dimensions.
    """
    rows = x.reshape(-1, x.shape[-1])
    padded = mx.pad(rows, [(0, -len(rows) % TILE), (0, 0)])
    tiles = [product(padded[first : first + TILE]) for first in range(0, len(rows), TILE)]
    y = mx.concatenate(tiles)[: len(rows)]
    return y.reshape(*x.shape[:-1], y.shape[-1])
