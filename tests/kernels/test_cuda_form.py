"""The text of a Metal kernel as CUDA: what is rewritten, and that NVRTC compiles every kernel."""

import re

import mlx.core as mx
import pytest

from lse_mlx.errors import KernelError
from lse_mlx.kernels.cuda_form import CudaForm, cuda_form, cuda_kernel, cuda_text, has_cuda_form
from lse_mlx.kernels.kernel_text import kernel_folder
from tests.kernels import nvrtc
from tests.kernels.variants import FLOATS, Variant, variants

needs_nvrtc = pytest.mark.skipif(nvrtc.compiler() is None, reason=nvrtc.MISSING)


@pytest.mark.parametrize(
    ("metal", "cuda"),
    [
        ("threadgroup float part[8];", "__shared__ float part[8];"),
        ("threadgroup float part[2 * N][32];", "__shared__ float part[2 * N][32];"),
        ("threadgroup uint best, last;", "__shared__ uint best, last;"),
        ("threadgroup vec<T, 4> tile[N];", "__shared__ vec<T, 4> tile[N];"),
        ("float f(threadgroup float* a, threadgroup T (&b)[8])", "float f(float* a, T (&b)[8])"),
        ("float f(const threadgroup float *a)", "float f(const float *a)"),
        ("const device T* row = x + 1;", "const T* row = x + 1;"),
        ("*(const device float4*)(p)", "*(const float4*)(p)"),
        ("thread float s[4] = {0};", "float s[4] = {0};"),
        ("threadgroup_barrier(mem_flags::mem_threadgroup);",) * 2,
        ("const uint n = thread_position_in_grid.x + device_count;",) * 2,
        ("constant float TABLE[2] = {1, 2};", "__constant__ float TABLE[2] = {1, 2};"),
        ("constant constexpr int N = 4;", "constexpr int N = 4;"),
        ("#include <metal_simdgroup>\nusing namespace metal;\nint a;", "\n\nint a;"),
    ],
)
def test_metals_words_become_cudas(metal: str, cuda: str) -> None:
    assert cuda_text(metal) == cuda


def test_an_input_without_dimensions_is_a_number_and_others_are_pointers() -> None:
    module = cuda_form(
        "k", ["x", "n"], ["out"], "out[0] = x[n] + thread_position_in_grid.x;"
    ).module([mx.zeros((4, 4)), mx.array(3)], [mx.float32])

    assert (
        "lse_k(const float* __restrict__ x, const int& n, float* __restrict__ out)" in module.header
    )
    assert module.source == (
        "  metal::lse_k(reinterpret_cast<const float*>(x), "
        "*reinterpret_cast<const int*>(n), reinterpret_cast<float*>(out));"
    )


def test_shapes_and_attributes_are_there_where_the_body_names_them() -> None:
    body = "out[0] = x_shape[0] + x_strides[1] + x_ndim + thread_index_in_simdgroup;"
    module = cuda_form("k", ["x", "y"], ["out"], body).module(
        [mx.zeros((4, 4)), mx.zeros(4)], [mx.int32]
    )

    assert "const int* x_shape, const int64_t* x_strides, const int& x_ndim" in module.header
    assert all(f"x_{word}" in module.source for word in ("shape", "strides", "ndim"))
    assert "y_shape" not in module.header + module.source
    assert "const auto thread_index_in_simdgroup =" in module.header
    assert "const auto thread_position_in_grid =" not in module.header


def test_template_values_are_declared_with_the_types_of_metal() -> None:
    module = cuda_form("k", ["x"], ["out"], "out[0] = T(N);").module(
        [mx.zeros(8, mx.bfloat16)], [mx.bfloat16], [("T", mx.bfloat16), ("N", -3), ("B", True)]
    )

    for line in ("using T = bfloat16_t;", "constexpr int N = -3;", "constexpr bool B = true;"):
        assert line in module.header.splitlines()
    assert "reinterpret_cast<const metal::bfloat16_t*>(x)" in module.source


def test_matrices_of_a_simd_group_have_no_cuda_form() -> None:
    body = "simdgroup_float8x8 tile; out[0] = 0;"

    assert not has_cuda_form(body)
    assert not has_cuda_form(
        "int a;", "#include <metal_simdgroup_matrix>\nsimdgroup_matrix<T, 8, 8> m;"
    )
    assert has_cuda_form(
        "uint a = simdgroup_index_in_threadgroup; simdgroup_barrier(mem_flags::mem_none);"
    )
    with pytest.raises(KernelError, match="The kernel tiles multiplies matrices of a SIMD group"):
        cuda_kernel("tiles", ["x"], ["out"], body)


@pytest.mark.parametrize(
    ("grid", "threadgroup"), [((48, 1, 1), (32, 1, 1)), ((32, 1, 1), (16, 1, 1))]
)
def test_a_launch_that_cuda_cannot_make_is_refused(
    grid: tuple[int, int, int], threadgroup: tuple[int, int, int]
) -> None:
    call = cuda_kernel("k", ["x"], ["out"], "out[thread_position_in_grid.x] = x[0];")

    with pytest.raises(
        KernelError, match="a threadgroup divides the grid and has a multiple of 32"
    ):
        call(
            inputs=[mx.zeros(8)],
            output_shapes=[grid[:1]],
            output_dtypes=[mx.float32],
            grid=grid,
            threadgroup=threadgroup,
        )


LANGUAGE = """
threadgroup float part[32];
threadgroup float tile[N][32];
const uint lane = thread_index_in_simdgroup;
const uint3 at = thread_position_in_grid;
part[lane] = float(x[at.x]) * 2.0f;
tile[0][lane] = 0.0f;
threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
thread float keep[4] = {0.0f, 1.0f, 2.0f, 3.0f};
float s = product<T>(x, part, keep) + tile[0][lane];
s = simd_sum(s) + simd_max(metal::exp(s)) + precise::exp(-INFINITY) + NAN;
const device float4* quads = (const device float4*)(f);
float4 v = quads[0] * 2.0f;
v = fma(float4(0.5f), v, 3.0f * quads[1]);
v += 1.0f;
s += v.x + v[2] + rsqrt(v.w) + clamp(v.y, 0.0f, 1.0f);
struct Pair { float value; int index; };
Pair pair = {s, int(lane)};
pair = simd_shuffle_down(pair, 4);
const uint bits = as_type<uint>(pair.value) ^ simd_shuffle_xor(lane, 3) ^ simd_broadcast(lane, 0);
simdgroup_barrier(mem_flags::mem_none);
const T rounded = x[0] * x[1];
const float exact = x[0] * 2.0f;
if (!isnan(s) && !isinf(s) && isfinite(exact)) {
  out[at.x] = T(s + float(min(n, 3)) + float(rounded));
}
other[at.x] = int(popcount(bits)) + x_shape[0];
"""
HELPERS = """
constant float TABLE[2] = {1.0f, 2.0f};
template <typename T>
METAL_FUNC float product(const device T* a, threadgroup float* b, thread float (&c)[4]) {
  float s = 0.0f;
  for (int i = 0; i < 4; ++i) {
    s = fma(float(a[i]), b[i], s);
  }
  return s + TABLE[1] + c[0];
}
"""


@needs_nvrtc
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_prelude_covers_the_language_that_kernels_use(dtype: mx.Dtype) -> None:
    form = cuda_form("language", ["x", "f", "n"], ["out", "other"], LANGUAGE, HELPERS)

    nvrtc.check(
        form,
        [mx.zeros((8, 4), dtype), mx.zeros(32), mx.array(3)],
        [dtype, mx.int32],
        [("T", dtype), ("N", 3)],
    )


@needs_nvrtc
def test_a_float_does_not_become_bfloat16_without_a_cast() -> None:
    form = cuda_form("k", ["x"], ["out"], "out[0] = x[0] * 0.5f;")

    with pytest.raises(AssertionError, match='no operator "=" matches'):
        nvrtc.check(form, [mx.zeros(8, mx.bfloat16)], [mx.bfloat16])


@pytest.fixture(scope="module")
def every_form() -> list[tuple[CudaForm, Variant]]:
    """The CUDA form of every variant that the project's models use."""
    return [
        (cuda_form(v.kernel.name, v.kernel.input_names, v.kernel.output_names, *texts), v)
        for v in variants()
        if has_cuda_form(*(texts := (v.kernel.source, v.kernel.header)))
    ]


def test_every_kernel_but_those_on_matrices_has_a_form(
    every_form: list[tuple[CudaForm, Variant]],
) -> None:
    kernels = {path.stem for path in kernel_folder().glob("*.metal")}

    assert kernels - {form.name for form, _ in every_form} == {"skinny_qmm_matrix"}


def test_the_text_of_every_kernel_is_left_without_a_word_of_metal(
    every_form: list[tuple[CudaForm, Variant]],
) -> None:
    for form, variant in every_form:
        module = form.module(variant.inputs, variant.output_dtypes, variant.template)
        shares = re.search(r"^\s*threadgroup \w+ \w+\[", variant.kernel.source, re.M)

        assert (module.header + module.source).isascii()
        assert not re.search(r"\b(device|constant|threadgroup|thread)\b|\[\[", module.header)
        assert ("__shared__" in module.header) == bool(shares)
        assert f"metal::lse_{form.name}(" in module.source


@needs_nvrtc
def test_nvrtc_compiles_every_variant(every_form: list[tuple[CudaForm, Variant]]) -> None:
    compiled: set[str] = set()
    for form, variant in every_form:
        # Small inputs are a variant on Metal alone.
        if str(variant) not in compiled:
            nvrtc.check(form, variant.inputs, variant.output_dtypes, variant.template)
            compiled.add(str(variant))
