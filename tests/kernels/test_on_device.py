"""Every kernel on this machine's GPU, by Metal or CUDA alike: `pytest -m gpu tests/kernels`."""

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.registry import Registry
from tests.kernels.device_cases import FLOATS, Case, Product, cases, multiply, normal
from tests.kernels.modes import assert_same_bits, needs_compiler, own_registry
from tests.metal_host.host import HostOptions, MetalHost

pytestmark = pytest.mark.gpu

CASES = cases()
SAME_BITS = [case for case in CASES if case.same_bits]


@pytest.fixture(autouse=True)
def cpu() -> None:
    """In place of the fixture that makes the CPU the default device of tests of kernels."""


@pytest.fixture(scope="module")
def device() -> Registry:
    """This machine's GPU, which runs every kernel of the project and never stock MLX."""
    if mx.default_device() == mx.cpu:
        pytest.skip("MLX computes on the CPU here")
    return Registry.for_device(Choices(mode="own"), required=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_gives_what_its_reference_gives(case: Case, device: Registry) -> None:
    got = [_numpy(array) for array in case.run(device)]
    with mx.stream(mx.cpu):
        wanted = [_numpy(array) for array in case.expected()]

    assert [a.shape for a in got] == [a.shape for a in wanted]
    for a, b in zip(got, wanted, strict=True):
        if a.dtype.kind != "f":
            np.testing.assert_array_equal(a, b)
            continue
        largest = np.abs(b[np.isfinite(b)], dtype=np.float64).max(initial=1.0)
        np.testing.assert_allclose(a, b, rtol=0, atol=case.tolerance * largest)


@needs_compiler
@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_the_device_and_the_host_harness_agree_to_the_bit(case: Case, device: Registry) -> None:
    got = [_numpy(array) for array in case.run(device)]
    with mx.stream(mx.cpu):
        harness = own_registry(MetalHost(HostOptions()).metal_kernel)
        wanted = [_numpy(array) for array in case.run(harness)]

    for n, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert_same_bits(b, a, f"output {n}")


def test_a_second_call_gives_the_same_bits_and_compiles_nothing(device: Registry) -> None:
    for case in CASES:
        first = [_numpy(array) for array in case.run(device)]
        compiled = device.counts().jit_compiles
        again = [_numpy(array) for array in case.run(device)]

        assert device.counts().jit_compiles == compiled, str(case)
        for n, (a, b) in enumerate(zip(again, first, strict=True)):
            assert_same_bits(b, a, f"{case}, output {n}")


@pytest.mark.parametrize(("bits", "dtype"), [(4, mx.bfloat16), (8, mx.float32)], ids=str)
def test_a_row_of_a_product_does_not_depend_on_the_others(
    bits: int, dtype: mx.Dtype, device: Registry
) -> None:
    product = Product(1024, 300, dtype, bits, 64)
    x = normal(0, (8, product.width), dtype)
    [eight] = [_numpy(y) for y in multiply(product, x, device)]

    for rows in range(1, 8):
        for first in (0, 8 - rows):
            [y] = multiply(product, x[first : first + rows], device)
            assert_same_bits(eight[first : first + rows], _numpy(y), f"{rows} rows from {first}")


PROBE = """
const uint i = thread_position_in_grid.x;
threadgroup float turned[64];
turned[63 - thread_index_in_threadgroup] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
rounded[i] = T(x[i]);
places[i] = int(thread_index_in_simdgroup + 100 * simdgroup_index_in_threadgroup
    + 1000 * threadgroup_position_in_grid.x + 100000 * uint(x_shape[0]));
results[8 * i + 0] = simd_sum(x[i]);
results[8 * i + 1] = simd_max(x[i]);
results[8 * i + 2] = simd_shuffle_xor(x[i], ushort(5));
results[8 * i + 3] = simd_broadcast(x[i], ushort(7));
results[8 * i + 4] = turned[thread_index_in_threadgroup];
results[8 * i + 5] = fma(x[i], x[i], -1.0f);
results[8 * i + 6] = 1.0f / sqrt(x[i] * x[i]);
results[8 * i + 7] = as_type<float>(as_type<uint>(x[i]) ^ 0x80000000u);
"""


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_words_of_a_kernel_mean_what_the_host_harness_takes_them_for(
    dtype: mx.Dtype, device: Registry
) -> None:
    threads, group = 256, 64
    values = np.random.default_rng(0).normal(size=threads).astype(np.float32)
    x = mx.array(values)
    assert device.build is not None
    probe = device.build(
        name="probe",
        input_names=["x"],
        output_names=["rounded", "places", "results"],
        source=PROBE,
    )
    rounded, places, results = probe(
        inputs=[x],
        template=[("T", dtype)],
        grid=(threads, 1, 1),
        threadgroup=(group, 1, 1),
        output_shapes=[(threads,), (threads,), (threads, 8)],
        output_dtypes=[dtype, mx.int32, mx.float32],
    )

    # A SIMD group adds up lanes 1 apart, then 2, 4, 8 and 16.
    lanes = values.reshape(-1, 32)
    sums = lanes
    for step in (1, 2, 4, 8, 16):
        sums = sums + sums[:, np.arange(32) ^ step]
    squares = values.astype(np.float64) ** 2
    wanted = [
        sums,
        np.broadcast_to(lanes.max(axis=1, keepdims=True), lanes.shape),
        lanes[:, np.arange(32) ^ 5],
        np.broadcast_to(lanes[:, 7:8], lanes.shape),
        values.reshape(-1, group)[:, ::-1],
        (squares - 1).astype(np.float32),
        np.float32(1) / np.sqrt(values * values),
        -values,
    ]
    with mx.stream(mx.cpu):
        assert_same_bits(_numpy(x.astype(dtype)), _numpy(rounded), "rounded")
    at = np.arange(threads)
    np.testing.assert_array_equal(
        places, at % 32 + 100 * (at % group // 32) + 1000 * (at // group) + 100_000 * threads
    )
    for n, result in enumerate(wanted):
        assert_same_bits(result.reshape(-1), np.array(results)[:, n], f"result {n}")


def _numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
