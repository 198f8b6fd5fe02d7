"""The drafter's products: joined, in fp32, by kernels on a device and counted on a CPU."""

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.checkpoints.drafter_config import Quantization
from lse_mlx.drafters.dflash2.operations import device_operations, host_operations
from lse_mlx.drafters.dflash2.projections import project
from lse_mlx.drafters.dflash2.weights import Matrix
from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.registry import Registry
from tests.kernels.affine import Codes, as_doubles, assert_within_rounding, normal
from tests.kernels.modes import needs_compiler
from tests.metal_host.host import MetalHost

IN = 192


def coded(out_width: int, bits: int) -> tuple[Matrix, np.ndarray]:
    """A matrix in codes and its weights in float64."""
    codes = Codes.random(out_width, IN, bits)
    quantization = Quantization(group_size=64, bits=bits)
    return Matrix(codes.weight, codes.scales, codes.biases, quantization), codes.dense()


def floats(out_width: int) -> tuple[Matrix, np.ndarray]:
    """A matrix in bf16 and its weights in float64."""
    weight = normal(out_width, IN, dtype=mx.bfloat16)
    return Matrix(weight), as_doubles(weight)


@needs_compiler
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_meet_fp32_rows_in_the_kernel(bits: int) -> None:
    registry = Registry("metal", MetalHost().metal_kernel, Choices("own"))
    (first, a), (second, b) = coded(24, bits), coded(9, bits)
    projection = project([first, second], device_operations(registry))
    x = normal(8, IN)
    y = projection(x)
    assert y.dtype == mx.float32
    assert_within_rounding(np.array(y), as_doubles(x), np.concatenate([a, b]), mx.float32)
    assert registry.served == {("skinny_qmm", "metal"): 1}


@needs_compiler
def test_a_float_among_them_makes_all_of_them_floats() -> None:
    registry = Registry("metal", MetalHost().metal_kernel, Choices("own"))
    (first, a), (second, b) = coded(24, 8), floats(9)
    y = project([first, second], device_operations(registry))(normal(3, IN))
    expected = as_doubles(normal(3, IN)) @ np.concatenate([a, b]).T
    np.testing.assert_allclose(np.array(y), expected, atol=1e-4)
    assert not registry.served


def test_on_a_cpu_a_product_of_codes_counts_once() -> None:
    registry = Registry("reference")
    operations = host_operations(registry)
    (first, a), (second, b), (dense, _) = coded(24, 8), coded(9, 8), floats(9)
    x = np.array(normal(3, IN))
    y = project([first, second], operations)(x)
    assert_within_rounding(y, x.astype(float), np.concatenate([a, b]), mx.float32)
    assert registry.served == {("skinny_qmm", "reference"): 1}
    project([dense], operations)(x)
    project([first, dense], operations)(x)
    assert registry.served == {("skinny_qmm", "reference"): 1}
