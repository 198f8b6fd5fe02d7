"""Rotary positions: keys and queries turned by angles of their absolute position."""

from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.drafters.dflash2.operations import Array, Operations


@dataclass(frozen=True)
class Rotation:
    """Coefficients of some rows, each fp32 [rows, 1, head_dim], for any number of heads."""

    arrays: ModuleType
    cos: Array
    sin: Array

    @classmethod
    def at(
        cls, positions: NDArray[np.int64], head_dim: int, theta: float, operations: Operations
    ) -> "Rotation":
        """The coefficients at absolute `positions` (int64 [rows]).

        Angles are taken in float64: in fp32 position * frequency is off by 0.01 at 200,000.
        """
        half = head_dim // 2
        frequencies = theta ** (-np.arange(half) / half)
        angles = positions[:, None, None] * frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        # The halves trade places, so one of them takes the minus of the rotation.
        both = np.concatenate([cos, cos, -sin, sin], axis=-1).astype(np.float32)
        turned = operations.own(mx.array(both))
        return cls(operations.arrays, turned[..., :head_dim], turned[..., head_dim:])

    def __call__(self, x: Array) -> Array:
        """`x` (fp32 [rows, heads, head_dim]) with the pairs (j, j + head_dim / 2) rotated."""
        half = x.shape[-1] // 2
        swapped = self.arrays.concatenate([x[..., half:], x[..., :half]], axis=-1)
        return x * self.cos + swapped * self.sin
