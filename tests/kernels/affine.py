"""Matrices in affine codes, made without MLX's quantizer, and what they mean in float64."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.selftest.definitions import affine_matrix

Doubles = NDArray[np.float64]

UNIT = {mx.float32: 2.0**-24, mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
"""The largest relative error of one rounding to a dtype."""


@dataclass(frozen=True)
class Codes:
    """A matrix [out, in] as the kernels take it."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    @classmethod
    def random(
        cls,
        out_width: int,
        in_width: int,
        bits: int,
        group_size: int = 64,
        dtype: mx.Dtype = mx.float32,
        seed: int = 0,
    ) -> "Codes":
        """Weights around zero of size 1 / sqrt(in), as a trained matrix has them; all codes occur."""
        rng = np.random.default_rng([seed, out_width, in_width, bits])
        words = rng.integers(0, 2**32, (out_width, in_width * bits // 32), np.uint32)
        span = rng.uniform(1, 3, (out_width, in_width // group_size)) / np.sqrt(in_width)
        scales = span * rng.choice([-1, 1], span.shape) / (1 << bits)
        biases = -scales * (1 << bits) * rng.uniform(0.4, 0.6, span.shape)
        return cls.of(words, scales, biases, bits, group_size, dtype)

    @classmethod
    def of(
        cls,
        words: NDArray[np.uint32],
        scales: NDArray[np.floating],
        biases: NDArray[np.floating],
        bits: int,
        group_size: int,
        dtype: mx.Dtype = mx.float32,
    ) -> "Codes":
        """From NumPy arrays; scales and biases are rounded to `dtype`."""
        with np.errstate(over="ignore"):
            parts = [mx.array(a.astype(np.float32)).astype(dtype) for a in (scales, biases)]
        return cls(mx.array(words), parts[0], parts[1], bits, group_size)

    def dense(self) -> Doubles:
        """The matrix in float64."""
        scales, biases = as_doubles(self.scales), as_doubles(self.biases)
        return affine_matrix(np.array(self.weight), scales, biases, self.bits, self.group_size)


def normal(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """Seeded normal numbers."""
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return mx.array(values.astype(np.float32)).astype(dtype)


def as_doubles(x: mx.array) -> Doubles:
    """The values of `x` in float64."""
    return np.array(x.astype(mx.float32), np.float64)


def assert_within_rounding(y: np.ndarray, x: Doubles, weight: Doubles, dtype: mx.Dtype) -> None:
    """`y` is x @ weight.T but for what fp32 arithmetic in any order, and one rounding to `dtype`,
    may do; and in fp32 no further off than 1e-5 of the largest output.

    Every weight is rounded once, every product is exact in its fma, and no path through the sum is
    longer than K roundings: (K + 1) u sum |x w|, to first order.
    """
    exact = x @ weight.T
    fp32 = 1.01 * (x.shape[-1] + 1) * UNIT[mx.float32] * (np.abs(x) @ np.abs(weight).T)
    rounding = 0.0 if dtype == mx.float32 else UNIT[dtype] * np.abs(exact)
    error = np.abs(y - exact)
    assert (error <= fp32 + rounding).all(), (error / (fp32 + rounding)).max()
    if dtype == mx.float32:
        assert error.max() <= 1e-5 * np.abs(exact).max()
