"""Every kernel on this machine's GPU, by Metal or CUDA alike: `pytest -m gpu -n 0 tests/kernels`.

The checks are those of `lse-mlx selftest`. Here they also run in fp16, once more for the same bits,
and against the host harness.
"""

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.registry import Registry
from lse_mlx.selftest.checks import Check, Outcome
from lse_mlx.selftest.report import kernel_checks
from lse_mlx.selftest.values import dtype_name, value_checks
from tests.kernels.modes import assert_same_bits, needs_compiler, own_registry
from tests.metal_host.host import MetalHost

pytestmark = pytest.mark.gpu

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
HALVES = pytest.mark.parametrize("half", FLOATS[1:], ids=dtype_name)

EXACT = {"topk", "selector", "dynamic_conv", "gated_delta_verify", "skinny_qmm"}
"""Kernels of nothing but exact fma, sums, products, divisions and roots in a fixed order."""


@pytest.fixture(autouse=True)
def cpu() -> None:
    """In place of the fixture that makes the CPU the default device of tests of kernels."""


@pytest.fixture(scope="module")
def device() -> Registry:
    """This machine's GPU, which runs every kernel of the project and never stock MLX."""
    if mx.default_device() == mx.cpu:
        pytest.skip("MLX computes on the CPU here")
    return Registry.for_device(Choices(mode="own"), required=True)


@HALVES
def test_every_check_of_the_selftest_passes(half: mx.Dtype, device: Registry) -> None:
    outcomes = [outcome for check in kernel_checks(device, half) for outcome in check.run(device)]
    assert [_said(outcome) for outcome in outcomes if outcome.status != "passed"] == []
    assert {o.served for o in outcomes} == {device.form, "stock"}


@HALVES
def test_a_second_call_gives_the_same_bits_and_compiles_nothing(
    half: mx.Dtype, device: Registry
) -> None:
    for check in kernel_checks(device, half):
        for form in check.forms:
            first = _run(check, form, device)
            compiled = device.counts().jit_compiles
            again = _run(check, form, device)
            assert device.counts().jit_compiles == compiled, check.name
            for n, (a, b) in enumerate(zip(again, first, strict=True)):
                assert_same_bits(b, a, f"{check.subject}, {check.name}, output {n}")


@needs_compiler
@HALVES
def test_the_device_and_the_host_harness_agree_to_the_bit(half: mx.Dtype, device: Registry) -> None:
    harness = own_registry(MetalHost().metal_kernel)
    for check in value_checks(device, half):
        # A matrix instruction adds up in an order that Metal does not tell.
        for form in set(check.forms) - {"matrix"} if check.subject in EXACT else ():
            got = _run(check, form, device)
            with mx.stream(mx.cpu):
                wanted = _run(check, form, harness)
            for n, (a, b) in enumerate(zip(got, wanted, strict=True)):
                assert_same_bits(b, a, f"{check.subject}, {check.name}, output {n}")


def _said(outcome: Outcome) -> str:
    return f"{outcome.subject}, {outcome.name}: {outcome.error} {outcome.why}"


def _run(check: Check, form: str, registry: Registry) -> list[np.ndarray]:
    if not form:
        return [_numpy(array) for array in check.arrays(registry)]
    with registry.choices.forcing(form):
        return [_numpy(array) for array in check.arrays(registry)]


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
