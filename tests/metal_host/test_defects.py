"""Each kind of defect in a kernel ends in an error that names it."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels.modes import needs_compiler
from tests.metal_host.host import MetalHost
from tests.metal_host.running import WHO, X, launch, refused, run

pytestmark = needs_compiler

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def test_a_barrier_after_some_threads_have_returned() -> None:
    refused("threads have returned", WHO + f"if (i >= 60) return; {BARRIER} o[i] = 0;")


def test_threads_at_different_barriers() -> None:
    body = WHO + f"if (sg == 0)\n {BARRIER}\nelse\n {BARRIER}\no[i] = 0;"
    refused("wait at line", body)


def test_a_shuffle_from_a_lane_that_takes_no_part() -> None:
    body = WHO + "float v = 0; if (lane < 16) v = simd_shuffle_xor(a0[i], 16); o[i] = v;"
    refused("does not take part", body, [X])


@pytest.mark.parametrize(
    "operation",
    ["simd_max(a0[i])", "float(simd_any(a0[i] > 3))", "simd_shuffle_xor(a0[i], 1)"],
)
def test_a_simd_function_without_some_lanes(operation: str) -> None:
    body = WHO + f"float v = 0;\nif (lane < 6) v = {operation};\no[i] = v;"
    assert run(body, [X]).shape == (64,)  # Metal defines it
    said = refused("lanes 0x0000003f of simdgroup lanes 0xffffffff", body, [X], partial_simd=False)
    assert "at k.metal:3" in said
    returned = WHO + f"if (lane >= 6) return;\no[i] = {operation};"
    refused("reached by lanes 0x0000003f", returned, [X], partial_simd=False)


def test_whole_simdgroups_may_go_different_ways() -> None:
    body = WHO + "o[i] = sg == 1 ? simd_max(a0[i]) : 0;"
    assert (run(body, [X], partial_simd=False) == np.repeat([0, 63], 32)).all()


def test_a_matrix_product_without_some_lanes() -> None:
    body = WHO + (
        "simdgroup_matrix<float,8,8> A(1.0f); "
        "if (lane < 31) simdgroup_multiply_accumulate(A, A, A, A); o[i] = 0;"
    )
    refused("reached by lanes", body)


@pytest.mark.parametrize("checked", [False, True])
def test_far_outside_a_buffer(checked: bool) -> None:
    refused("outside buffer 'a0'", WHO + "o[i] = a0[i * 100];", [X], checked=checked)
    refused("outside buffer 'o'", WHO + "o[i * 1000] = 1;", checked=checked)


def test_one_element_outside_a_buffer() -> None:
    said = refused("outside buffer 'a0'", WHO + "\n\no[i] = a0[i + 1];", [X], checked=True)
    assert "element 64 of 64" in said
    assert "k.metal:4" in said
    refused("outside buffer 'o'", WHO + "o[i + 1] = 0;", checked=True)
    refused("outside buffer 'a0'", WHO + "o[i] = a0[int(i) - 1];", [X], checked=True)


def test_a_vector_over_the_end_of_a_buffer() -> None:
    body = WHO + "float4 v = ((const device float4*)(a0 + 4))[i % 16]; o[i] = v.x + v.w;"
    refused("outside buffer 'a0'", body, [X], checked=True)


def test_a_write_to_an_input() -> None:
    refused("input buffer 'a0'", WHO + "((device float*)a0)[i] = 1; o[i] = 0;", [X], checked=True)


def test_outside_a_threadgroup_array() -> None:
    array = WHO + "threadgroup float t[64]; t[i + 1] = 1; o[i] = 0;"
    refused("index outside an array bound", array, checked=True)
    pointer = WHO + "threadgroup float t[64]; threadgroup float* p = t; p[i + 1] = 1; o[i] = 0;"
    refused("outside threadgroup variable 't'", pointer, checked=True)


def test_outside_a_private_array() -> None:
    body = WHO + "float t[4]; for (uint j = 0; j <= i % 8; ++j) t[j] = a0[j]; o[i] = t[0];"
    refused("index outside an array bound", body, [X], checked=True)


def test_outside_a_private_array_by_a_pointer() -> None:
    header = """
        template <int N> inline float total(thread float* t) {
          float sum = 0;
          for (int j = 0; j <= N; ++j) sum += t[j];
          return sum;
        }
    """
    body = WHO + "float t[4]; for (uint j = 0; j < 4; ++j) t[j] = a0[j]; o[i] = total<4>(t);"
    refused("index outside an array bound", body, [X], header=header, checked=True)
    header = header.replace("<= N", "< N")
    assert (run(body, [X], header=header, checked=True) == 0 + 1 + 2 + 3).all()


def test_uninitialised_threadgroup_memory() -> None:
    body = WHO + f"threadgroup float t[64]; if (i < 63) t[i] = 1; {BARRIER} o[i] = t[i];"
    refused("uninitialised threadgroup memory 't'", body, checked=True)
    assert np.isnan(run(WHO + "threadgroup float t[64]; o[i] = t[i];")).all()


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    "instead",
    [
        "",
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
        "threadgroup_barrier(mem_flags::mem_none);",
    ],
)
def test_a_missing_barrier(instead: str, seed: int | None) -> None:
    body = WHO + f"threadgroup float t[64]; t[i] = i; {instead} o[i] = t[(i + 1) % 64];"
    refused("race|uninitialised", body, checked=True, seed=seed)
    run(
        body.replace(instead or "t[i] = i;", (instead or "t[i] = i;") + BARRIER),
        checked=True,
        seed=seed,
    )


def test_a_write_after_a_read() -> None:
    body = (
        WHO
        + f"""
        threadgroup float t[2];
        if (lane == 0) t[sg] = i;
        {BARRIER}
        float m = simd_max(t[lane % 2]);
        if (lane == 0) t[sg] = -1;
        {BARRIER}
        o[i] = m + t[1];
    """
    )
    refused("write-after-read race on 't'", body, checked=True)
    # A schedule that lets one SIMD-group run ahead shows it without the checks, too.
    assert len({run(body, seed=seed).tobytes() for seed in range(8)}) > 1


def test_lanes_are_not_in_lockstep() -> None:
    body = (
        WHO + "threadgroup float t[32]; t[lane] = lane; float v = t[lane ^ 1]; o[i] = simd_sum(v);"
    )
    refused("race|uninitialised", body, threads=32, threadgroup=32, checked=True, seed=0)


def test_two_threadgroups_write_to_one_place() -> None:
    threads = {"threads": 128, "threadgroup": 64, "checked": True}
    refused("another threadgroup", WHO + "o[thread_position_in_threadgroup.x] = i;", **threads)
    _, record = launch(WHO + "o[thread_position_in_threadgroup.x] = 1;", **threads)
    assert record.same_value_writes == 64  # the same value: counted, no error


def test_too_much_threadgroup_memory() -> None:
    body = WHO + "threadgroup float t[8192]; threadgroup float u[4]; t[i] = 1; u[0] = 1; o[i] = 0;"
    refused("the limit is 32768", body)


def test_too_many_threads() -> None:
    refused("maximum allowed threads", WHO + "o[i] = 0;", threads=2048, threadgroup=2048)


def test_too_much_private_memory() -> None:
    body = (
        WHO + "float t[1 << 18]; for (uint j = 0; j < 1 << 18; ++j) t[j] = a0[j % 64]; o[i] = t[i];"
    )
    refused("private memory", body, [X], opt="-O0")


@pytest.mark.parametrize(
    "body",
    [
        "bfloat b = 1.5f; o[i] = b;",
        "o[i] = min(1, 1.5f);",
        "o[i] = no_such_function(1);",
        "a0[i] = 1;",
    ],
)
def test_what_metal_refuses_does_not_compile(body: str) -> None:
    refused("does not compile", WHO + body, [X])


def test_integer_division_by_zero() -> None:
    refused("division by zero", WHO + "o[i] = int(i) / int(a0[0]);", [X])


def test_the_process_survives_a_defect() -> None:
    for _ in range(3):
        refused("outside buffer 'a0'", WHO + "o[i] = a0[i * 100];", [X])
        assert (run(WHO + "o[i] = a0[i];", [X]) == X).all()


def test_wrong_calls_are_value_errors() -> None:
    host = MetalHost()
    with pytest.raises(ValueError, match="at least one output"):
        host.metal_kernel("k", [], [], "")
    with pytest.raises(ValueError, match="Unknown compile option"):
        host.metal_kernel("k", [], ["o"], "", compile_options={"fast": "yes"})
    kernel = host.metal_kernel("k", ["x"], ["o"], "o[0] = x[0];")
    with pytest.raises(ValueError, match="`inputs` to have size 1 but got size 0"):
        kernel(
            inputs=[],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )


def test_a_misaligned_vector() -> None:
    body = WHO + "float4 v = ((const device float4*)(a0 + 1))[i % 15]; o[i] = v.x + v.w;"
    refused("misaligned vector", body, [X], checked=True)


@pytest.mark.parametrize("checked", [False, True])
def test_a_kernel_that_never_ends(checked: bool) -> None:
    waiting = "volatile device float* flag = o; while (flag[i] != 5.0f) {} o[i] = 0;"
    said = refused("still running after 0.2 s", WHO + waiting, checked=checked, seconds=0.2)
    assert "thread (0,0,0)" in said
