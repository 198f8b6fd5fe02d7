"""`in_every_mode` finds what makes a kernel's result depend on how it is compiled or scheduled."""

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.registry import Registry
from tests.kernels.modes import assert_same_bits, in_every_mode, needs_compiler
from tests.metal_host.host import HostError

WHO = "uint i = thread_position_in_grid.x; "


def launch(registry: Registry, body: str, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    """The output of 64 threads with the input x = 1 + i / 512."""
    assert registry.build is not None
    kernel = registry.build(name="k", input_names=["x"], output_names=["o"], source=WHO + body)
    return kernel(
        inputs=[1 + mx.arange(64, dtype=mx.float32) / 512],
        template=[("T", dtype)],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[dtype],
    )


@needs_compiler
def test_what_all_modes_agree_on_comes_back() -> None:
    body = "o[i] = i == 3 ? T(NAN) : T(fma(x[i], x[i], 1.0f));"
    (got,) = in_every_mode(lambda registry: launch(registry, body))
    exact = 1 + (1 + np.arange(64) / 512) ** 2
    assert got.dtype == np.float32
    assert np.isnan(got[3])
    np.testing.assert_array_equal(np.delete(got, 3), np.delete(exact.astype(np.float32), 3))


@needs_compiler
def test_bfloat16_comes_as_float32() -> None:
    (got,) = in_every_mode(lambda registry: launch(registry, "o[i] = T(x[i]);", mx.bfloat16))
    values = (1 + mx.arange(64, dtype=mx.float32) / 512).astype(mx.bfloat16)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array(values.astype(mx.float32)))


@needs_compiler
def test_a_product_that_may_be_fused_or_not() -> None:
    body = "o[i] = (x[i] * x[i]) * x[i] + x[i] * 0.1f;"
    with pytest.raises(
        AssertionError, match=r"plain and with fused multiply-add: \d+ of 64 differ"
    ):
        in_every_mode(lambda registry: launch(registry, body))


@needs_compiler
def test_a_race_that_changes_nothing() -> None:
    body = "threadgroup float t[64]; t[i] = 1; o[i] = t[63 - i];"
    with pytest.raises(HostError, match=r"race|uninitialised"):
        in_every_mode(lambda registry: launch(registry, body))


def test_bits_are_compared() -> None:
    zero, nan = np.zeros(3, np.float32), np.full(3, np.nan, np.float32)
    assert_same_bits(zero, zero)
    assert_same_bits(nan, -nan)
    with pytest.raises(AssertionError, match=r"3 of 3 differ, the first at \(0,\)"):
        assert_same_bits(zero, -zero)
    with pytest.raises(AssertionError, match="here"):
        assert_same_bits(zero, zero[:2], "here")
