"""The dynamic convolutions around each sublayer."""

from dataclasses import dataclass

from lse_mlx.drafters.dflash2.operations import Array
from lse_mlx.drafters.dflash2.projections import Projection
from lse_mlx.kernels.dynamic_conv import dynamic_conv
from lse_mlx.kernels.registry import Registry


@dataclass(frozen=True)
class Convolution:
    """The convolutions before (side 0) and after (side 1) one sublayer.

    Both read coefficients that `coefficients` computes from the sublayer's input.
    """

    registry: Registry
    base: Array  # fp32 [sides, taps, groups, channels of a group]
    coefficients: Projection

    def __call__(self, x: Array, dynamic: Array, side: int) -> Array:
        return dynamic_conv(self.registry, x, self.base, dynamic, side)
