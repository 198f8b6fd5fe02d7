"""Matrix products on a CPU: dequantized once, done by NumPy's BLAS in tiles of eight rows.

MLX's own CPU matrix product costs the same per row however many rows there are, and its quantized
one is scalar, so a verify pass over eight rows would gain nothing. NumPy's BLAS does eight rows in
little more than the time of one. Tiles have exactly `TILE` rows, zero-padded, because BLAS picks
another order of summation for another shape: with one shape only, a row's bits do not depend on how
many rows are in the pass, nor on its place among them.

The outputs are cut into blocks as well. Products that small are done where the operands lie, by one
thread: no packing of the weights at each call, which takes longer than the product itself with
eight rows, and no waiting for threads on a busy machine.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.row_tiles import TILE
from lse_mlx.kernels.skinny_qmm import NAME

BLOCK = 64


class HostLinear(nn.Module):
    """y = x @ weight.T + bias in fp32 on the CPU.

    weight: fp32 [out, in]; bias: fp32 [out] or None. Called with x fp32 [..., in], returns fp32
    [..., out].
    counted_by: counts each product as one that the kernel `skinny_qmm` would serve on a device; for
    weights that were in codes.
    """

    def __init__(
        self,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None = None,
        counted_by: Registry | None = None,
    ):
        super().__init__()
        self._counted_by = counted_by
        self._out, self._in = weight.shape
        block = min(BLOCK, self._out)
        padded = np.zeros((-(-self._out // block) * block, self._in), np.float32)
        padded[: self._out] = weight
        self._blocks = np.ascontiguousarray(padded.reshape(-1, block, self._in).swapaxes(1, 2))
        self._bias = bias

    @classmethod
    def joined(cls, parts: Sequence["HostLinear"]) -> "HostLinear":
        """One product for several without a bias that take the same input; outputs side by side."""
        assert all(part._bias is None for part in parts)
        counted_by = next((p._counted_by for p in parts if p._counted_by is not None), None)
        return cls(np.concatenate([part.weight() for part in parts]), counted_by=counted_by)

    def weight(self) -> NDArray[np.float32]:
        """The weight, fp32 [out, in]."""
        return self._blocks.swapaxes(1, 2).reshape(-1, self._in)[: self._out]

    def __call__(self, x: mx.array) -> mx.array:
        y = self.product(host_tiles(x))[: row_count(x)]
        return mx.array(y).reshape(*x.shape[:-1], self._out)

    def product(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The same of whole tiles in NumPy: fp32 [n * TILE, in] to fp32 [n * TILE, out]."""
        if self._counted_by is not None:
            self._counted_by.reference(NAME)
        # [tiles, 1, TILE, in] @ [blocks, in, BLOCK] = [tiles, blocks, TILE, BLOCK]
        products = np.matmul(rows.reshape(-1, 1, TILE, self._in), self._blocks)
        y = products.swapaxes(1, 2).reshape(len(rows), -1)[:, : self._out]
        return y if self._bias is None else y + self._bias


def row_count(x: mx.array) -> int:
    """How many rows x ([..., width]) has."""
    return x.size // x.shape[-1]


def host_tiles(x: mx.array | NDArray[np.float32]) -> NDArray[np.float32]:
    """The rows of x ([..., width]) as fp32 [n * TILE, width], the last tile filled with zeros."""
    if isinstance(x, mx.array):
        x = np.asarray(x.astype(mx.float32))
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) % TILE == 0:
        return rows
    tiled = np.zeros((-(-len(rows) // TILE) * TILE, x.shape[-1]), np.float32)
    tiled[: len(rows)] = rows
    return tiled
