"""The modes find what makes a kernel's result depend on how it is compiled or scheduled."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.registry import Registry
from tests.kernels.modes import assert_same_bits, every_mode, in_every_mode, needs_compiler
from tests.metal_host.host import CompileError, HostError

Run = Callable[[Registry], list[mx.array]]

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


def launch_by_launch(run: Run) -> list[np.ndarray]:
    return [np.array(array) for array in run(every_mode())]


each_way = pytest.mark.parametrize("compared", [in_every_mode, launch_by_launch])


@needs_compiler
@each_way
def test_what_all_modes_agree_on_comes_back(compared: Callable[[Run], list[np.ndarray]]) -> None:
    body = "o[i] = i == 3 ? T(NAN) : T(fma(x[i], x[i], 1.0f));"
    (got,) = compared(lambda registry: launch(registry, body))
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
@each_way
def test_a_product_that_may_be_fused_or_not(compared: Callable[[Run], list[np.ndarray]]) -> None:
    body = "o[i] = (x[i] * x[i]) * x[i] + x[i] * 0.1f;"
    with pytest.raises(
        AssertionError, match=r"plain and with fused multiply-add: \d+ of 64 differ"
    ):
        compared(lambda registry: launch(registry, body))


@needs_compiler
@each_way
def test_a_race_that_changes_nothing(compared: Callable[[Run], list[np.ndarray]]) -> None:
    body = "threadgroup float t[64]; t[i] = 1; o[i] = t[63 - i];"
    with pytest.raises(HostError, match=r"race|uninitialised"):
        compared(lambda registry: launch(registry, body))


@needs_compiler
@each_way
def test_an_error_names_its_mode(compared: Callable[[Run], list[np.ndarray]]) -> None:
    outside = "o[i] = x[int(i) - 1];"
    with pytest.raises(HostError, match=r"^checked, threads in random order: k: read outside"):
        compared(lambda registry: launch(registry, outside))
    with pytest.raises(CompileError, match=r"^plain: The kernel k does not compile"):
        compared(lambda registry: launch(registry, "o[i] = nothing;"))


@needs_compiler
def test_some_lanes_alone_at_a_simd_function() -> None:
    body = "float v = x[i]; if (i < 5) v = simd_max(v); o[i] = v;"

    def run(registry: Registry) -> list[mx.array]:
        return launch(registry, body)

    for refused in (lambda: in_every_mode(run), lambda: run(every_mode())):
        with pytest.raises(HostError, match=r"^checked, .*simd_max reached by lanes 0x0000001f"):
            refused()
    wanted = 1 + np.maximum(np.arange(64), np.where(np.arange(64) < 5, 4, 0)) / 512
    assert (in_every_mode(run, partial_simd=True)[0] == wanted).all()
    assert (np.array(run(every_mode(partial_simd=True))[0]) == wanted).all()


def test_bits_are_compared() -> None:
    zero, nan = np.zeros(3, np.float32), np.full(3, np.nan, np.float32)
    assert_same_bits(zero, zero)
    assert_same_bits(nan, -nan)
    with pytest.raises(AssertionError, match=r"3 of 3 differ, the first at \(0,\)"):
        assert_same_bits(zero, -zero)
    with pytest.raises(AssertionError, match="here"):
        assert_same_bits(zero, zero[:2], "here")
