"""Matrix products of the drafter in the form that suits the device: fp32 in, fp32 out.

On a device, codes are decoded inside the product (`QuantizedProduct`); scales and biases are fp32
there, as x is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.drafters.dflash2.operations import Array, Operations
from lse_mlx.drafters.dflash2.weights import Matrix
from lse_mlx.kernels.host_linear import HostLinear, host_tiles
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.skinny_qmm import QuantizedProduct

Projection = Callable[[Array], Array]
"""x fp32 [rows, in] -> x @ W.T fp32 [rows, out], of the same kind of array."""


class HostProjection:
    """A product by NumPy's BLAS on dequantized weights; a row does not depend on the others."""

    def __init__(self, matrices: Sequence[Matrix], registry: Registry):
        weight = np.concatenate([np.asarray(m.dense()) for m in matrices])
        quantized = all(m.quantization is not None for m in matrices)
        self._linear = HostLinear(weight, counted_by=registry if quantized else None)

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._linear.product(host_tiles(x))[: len(x)]


@dataclass(frozen=True)
class DenseProjection:
    """A float matrix on a device, kept in fp32.

    A product of fp32 rows with a bf16 matrix would convert the matrix anew each time, which moves
    more bytes than reading it.
    """

    weight: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.weight.T


def project(matrices: Sequence[Matrix], operations: Operations) -> Projection:
    """One projection of all `matrices`, which take the same input; outputs side by side."""
    if operations.on_host:
        return HostProjection(matrices, operations.registry)
    quantization = matrices[0].quantization
    if quantization is None or any(m.quantization is None for m in matrices):
        weight = mx.concatenate([matrix.dense() for matrix in matrices])
        mx.eval(weight)
        return DenseProjection(weight)
    parts = [(m.weight, m.scales, m.biases) for m in matrices]
    weight, scales, biases = (mx.concatenate(list(part)) for part in zip(*parts, strict=True))
    mx.eval(weight, scales, biases)
    return QuantizedProduct(
        operations.registry,
        weight,
        scales,
        biases,
        quantization.bits,
        quantization.group_size,
    )
