"""Metal's language gives the right answers: each from its definition, in NumPy."""

import mlx.core as mx
import numpy as np

from tests.kernels.modes import needs_compiler
from tests.metal_host.host import MetalHost
from tests.metal_host.running import WHO, X, launch, run

pytestmark = needs_compiler

LANES = np.arange(64) % 32


def test_simd_reductions() -> None:
    halves = X.reshape(2, 32)
    assert (run(WHO + "o[i] = simd_sum(a0[i]);", [X]) == np.repeat(halves.sum(1), 32)).all()
    assert (run(WHO + "o[i] = simd_max(a0[i]);", [X]) == np.repeat([31, 63], 32)).all()
    assert (run(WHO + "o[i] = simd_min(a0[i]);", [X]) == np.repeat([0, 32], 32)).all()
    assert (run(WHO + "o[i] = simd_product(lane == 3 ? 5.0f : 1.0f);") == 5).all()
    assert (run(WHO + "o[i] = simd_xor(lane) + simd_or(lane) + simd_and(lane);") == 31).all()


def test_a_simd_sum_is_an_ascending_butterfly() -> None:
    values = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    sums = values.copy()
    for step in (1, 2, 4, 8, 16):
        sums = sums + sums[np.arange(32) ^ step]
    got = run("uint i = thread_position_in_grid.x; o[i] = simd_sum(a0[i]);", [values], threads=32)
    assert (got[:32] == sums[0]).all()
    ladder = "float v = a0[i]; for (ushort s = 1; s < 32; s *= 2) v += simd_shuffle_xor(v, s);"
    assert (run(WHO + ladder + "o[i] = v;", [values], threads=32)[:32] == sums).all()


def test_simd_shuffles() -> None:
    assert (run(WHO + "o[i] = simd_shuffle_xor(a0[i], 5);", [X]) == X[np.arange(64) ^ 5]).all()
    down = np.where(LANES < 29, X + 3, X)
    assert (run(WHO + "o[i] = simd_shuffle_down(a0[i], 3);", [X]) == down).all()
    up = np.where(LANES < 3, X, X - 3)
    assert (run(WHO + "o[i] = simd_shuffle_up(a0[i], 3);", [X]) == up).all()
    filled = np.where(LANES < 2, -1, X - 2)
    body = WHO + "o[i] = simd_shuffle_and_fill_up(a0[i], -1.0f, 2);"
    assert (run(body, [X]) == filled).all()
    turned = X - LANES + (LANES + 5) % 32
    assert (run(WHO + "o[i] = simd_shuffle_rotate_down(a0[i], 5);", [X]) == turned).all()
    assert (run(WHO + "o[i] = simd_broadcast(a0[i], 7);", [X]) == np.repeat([7, 39], 32)).all()
    swapped = X.reshape(-1, 4)[:, [1, 0, 3, 2]].reshape(-1)
    assert (run(WHO + "o[i] = quad_shuffle_xor(a0[i], 1);", [X]) == swapped).all()


def test_simd_prefixes_and_votes() -> None:
    assert (run(WHO + "o[i] = simd_prefix_exclusive_sum(1.0f);") == LANES).all()
    assert (run(WHO + "o[i] = simd_prefix_inclusive_sum(1.0f);") == LANES + 1).all()
    votes = "o[i] = popcount(uint(uint64_t(simd_ballot(lane % 3 == 0))));"
    assert (run(WHO + votes) == 11).all()
    assert (run(WHO + "o[i] = simd_any(lane == 3) && !simd_all(lane == 3);") == 1).all()
    assert (run(WHO + "o[i] = simd_is_first() ? 1 : 0;") == (LANES == 0)).all()


def test_a_divergent_reduction_is_over_the_active_lanes() -> None:
    body = (
        "float v = 1; if (lane < 10) { v = simd_sum(v); } else { v = 100 + simd_sum(v); } o[i] = v;"
    )
    assert (run(WHO + body) == np.where(LANES < 10, 10, 122)).all()


def test_barrier_and_threadgroup_memory() -> None:
    body = WHO + (
        "threadgroup float t[64]; t[i] = a0[i]; "
        "threadgroup_barrier(mem_flags::mem_threadgroup); o[i] = t[63 - i];"
    )
    assert (run(body, [X], checked=True, seed=4) == X[::-1]).all()


def test_several_threadgroup_variables_in_one_line() -> None:
    body = WHO + (
        "threadgroup float t[2][32], u[1]; t[sg][lane] = a0[i]; if (i == 0) u[0] = 100; "
        "threadgroup_barrier(mem_flags::mem_threadgroup); o[i] = t[1 - sg][lane] + u[0];"
    )
    record = launch(body, [X], checked=True, seed=1)
    assert (record[0] == 100 + np.roll(X, 32)).all()
    assert record[1].threadgroup_bytes == 256 + 16
    assert record[1].barriers == 1


def test_vectors_and_bits() -> None:
    wide = np.arange(256, dtype=np.float32)
    body = (
        WHO
        + """
        float4 v = ((const device float4*)a0)[i];
        v.xy = v.yx;
        float2 p = v.zw * 2;
        o[i] = v.x + dot(p, float2(1, 10)) + as_type<float>(0x3f800000u) + clz(1u) + select(0.f, 1.f, true);
    """
    )
    b = 4 * X
    assert (run(body, [wide]) == (b + 1) + (b + 2) * 2 + (b + 3) * 20 + 1 + 31 + 1).all()


def test_half_and_bfloat_round_after_each_operation() -> None:
    body = """
        half a = 2048.0h; half b = a + half(1);
        bfloat c = bfloat(256.0f) + bfloat(1.0f);
        o[0] = float(b); o[1] = float(c); o[2] = bfloat(1.5f) * 2.25f;
    """
    assert list(run(body, threads=1, shape=(3,))) == [2048, 256, 3.375]


def test_bfloat_rounds_to_even() -> None:
    # 8 bits of significand: at 256 the step is 2, and 257 and 259 lie halfway.
    values = np.array([257, 258, 259, 261, 1e-40, -0.0, np.inf, np.nan], np.float32)
    body = "uint i = thread_position_in_grid.x; o[i] = bfloat16_t(a0[i]);"
    host = MetalHost()
    kernel = host.metal_kernel("k", ["a0"], ["o"], body)
    (got,) = kernel(
        inputs=[mx.array(values)],
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
        output_shapes=[(8,)],
        output_dtypes=[mx.bfloat16],
    )
    wanted = mx.array(values).astype(mx.bfloat16).view(mx.uint16)
    assert mx.array_equal(got.view(mx.uint16)[:7], wanted[:7])
    assert np.isnan(np.array(got.astype(mx.float32))[7])
    assert list(np.array(got.astype(mx.float32))[:4]) == [256, 258, 260, 260]


def test_literals_are_single_precision() -> None:
    body = "o[0] = (0.1 + 0.2 == 0.1f + 0.2f) ? sizeof(decltype(0.1 * a0[0])) : 0;"
    assert run(body, [X], threads=1, shape=(1,))[0] == 4


def test_a_product_that_is_added_is_fused_only_where_asked() -> None:
    # 1 - (1 - e)(1 + e) is e * e, or 0 if the product is rounded first.
    e = np.array([2.0**-14], np.float32)
    body = "float e = a0[0]; o[0] = 1.0f - (1.0f - e) * (1.0f + e);"
    assert run(body, [e], threads=1, shape=(1,))[0] == 0
    assert run(body, [e], threads=1, shape=(1,), contract=True)[0] == e[0] ** 2
    assert (
        run(
            body.replace("1.0f - (", "fma(-(").replace(") * (", "), ").replace("e);", "e, 1.0f);"),
            [e],
            threads=1,
            shape=(1,),
        )[0]
        == e[0] ** 2
    )


def test_denormals_are_flushed_only_where_asked() -> None:
    small = np.array([1e-40], np.float32)
    body = "o[0] = a0[0] * 2.0f;"
    assert run(body, [small], threads=1, shape=(1,))[0] == small[0] * 2
    assert run(body, [small], threads=1, shape=(1,), ftz=True)[0] == 0


def test_template_values() -> None:
    body = "o[thread_position_in_grid.x] = T(N) / T(2) + (B ? 100 : 0);"
    values = [("T", mx.int32), ("N", 5), ("B", True)]
    assert (run(body, template=values) == 102).all()
    values = [("T", mx.float32), ("N", -5), ("B", False)]
    assert (run(body, template=values) == -2.5).all()


def test_helpers_and_constants() -> None:
    header = """
        constant float table[3] = {1, 2, 4};
        constant constexpr int width = 3;
        template <typename T> T at(T v, uint i) { return v * table[i % width]; }
    """
    wanted = X * np.array([1, 2, 4])[np.arange(64) % 3]
    assert (run(WHO + "o[i] = at(a0[i], i);", [X], header=header) == wanted).all()


def test_a_threadgroup_at_the_edge_is_smaller() -> None:
    body = WHO + (
        "o[i] = threads_per_threadgroup.x * 1000 + dispatch_threads_per_threadgroup.x "
        "+ simd_sum(1.0f) * 100000;"
    )
    got = run(body, threads=70, threadgroup=48, shape=(70,))
    assert list(got[[0, 40, 48, 69]]) == [3248048, 1648048, 2222048, 2222048]


def test_matrix_products() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 8, 8)).astype(np.float32)
    body = """
        uint lane = thread_index_in_simdgroup;
        simdgroup_matrix<float, 8, 8> A, B, C(0.0f);
        simdgroup_load(A, a0, 8);
        simdgroup_load(B, a1, 8, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(C, A, B, C);
        simdgroup_store(C, o, 8);
    """
    got, record = launch(body, [a, b], threads=32, threadgroup=32, checked=True)
    assert np.allclose(got.reshape(8, 8), a.astype(np.float64) @ b.T, atol=1e-5)
    assert record.matrix_products == 1


def test_atomics() -> None:
    body = (
        "atomic_fetch_add_explicit(&o[thread_position_in_grid.x % 4], 1.0f, memory_order_relaxed);"
    )
    got = run(body, threads=1000, shape=(4,), init=0.0, atomic=True, workers=2)
    assert (got == 250).all()


def test_strides_and_numbers() -> None:
    body = "uint i = thread_position_in_grid.x; o[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)] + s;"
    kernel = MetalHost().metal_kernel(
        "strides", ["x", "s"], ["o"], body, ensure_row_contiguous=False
    )
    x = mx.arange(24, dtype=mx.float32).reshape(4, 6).T[1:4]
    (got,) = kernel(
        inputs=[x, 0.5],
        grid=(12, 1, 1),
        threadgroup=(12, 1, 1),
        output_shapes=[(3, 4)],
        output_dtypes=[mx.float32],
    )
    assert (np.array(got) == np.arange(24).reshape(4, 6).T[1:4] + 0.5).all()


def test_outputs_begin_undefined_or_with_the_value_asked_for() -> None:
    assert np.isnan(run(WHO + "if (i != 5) o[i] = 1;")[5])
    assert run(WHO + "if (i != 5) o[i] = 1;", init=2.5)[5] == 2.5


def test_metals_own_headers_may_be_included() -> None:
    header = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\n"
    assert (run(WHO + "o[i] = 1;", header=header) == 1).all()
