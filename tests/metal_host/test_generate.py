"""The text that g++ gets: parameters as MLX has them, the kernel's own lines where they were."""

import mlx.core as mx
import pytest

from tests.metal_host.generate import KernelSource, blank_comments, generate, parameters

FLOAT = [mx.float32]


def declarations(source: str, *inputs: mx.array, atomic: bool = False) -> list[str]:
    names = tuple(f"a{n}" for n in range(len(inputs)))
    kernel = KernelSource("k", names, ("o",), source, atomic_outputs=atomic)
    return [parameter.declaration for parameter in parameters(kernel, inputs, FLOAT)]


def text(source: str, header: str = "") -> str:
    return generate(KernelSource("k", (), ("o",), source, header), [], FLOAT, []).text


def test_an_array_below_eight_elements_is_constant() -> None:
    assert declarations("", mx.zeros(8))[0] == "const device float* a0"
    assert declarations("", mx.zeros(7))[0] == "const constant float* a0"
    assert declarations("", mx.zeros((2, 0)))[0] == "const constant float* a0"


def test_a_number_is_a_reference_and_has_no_shape() -> None:
    assert declarations("a0_shape[0]", mx.array(3)) == [
        "const constant int32_t& a0",
        "device float* o",
    ]


def test_shapes_and_attributes_are_found_in_the_text() -> None:
    source = "o[thread_position_in_grid.x] = a0[a0_strides[a0_ndim]] + a0_shape[0];"
    assert declarations(source, mx.zeros((2, 8), mx.bfloat16)) == [
        "const device bfloat16_t* a0",
        "const constant int* a0_shape",
        "const constant int64_t* a0_strides",
        "const constant int& a0_ndim",
        "device float* o",
        "uint3 thread_position_in_grid",
    ]


def test_atomic_outputs() -> None:
    assert declarations("", atomic=True) == ["device atomic<float>* o"]


def test_template_values() -> None:
    kernel = KernelSource("k", (), ("o",), "")
    template = [("T", mx.bfloat16), ("N", -3), ("B", True)]
    generated = generate(kernel, [], FLOAT, template).text
    assert "template <typename T, int N, bool B>" in generated
    assert "custom_kernel_k<bfloat16_t, -3, true>(" in generated
    with pytest.raises(TypeError, match=r"1\.5: expected bool, int or Dtype"):
        generate(kernel, [], FLOAT, [("N", 1.5)])  # pyright: ignore[reportArgumentType]


def test_a_threadgroup_variable_lies_in_the_threadgroups_memory() -> None:
    generated = text("\nthreadgroup float4 a[N * (M / 4)], b[2];\nthreadgroup uint c;")
    assert "using mh_tg0 = float4[N * (M / 4)];" in generated
    assert 'mh_tg1& b = mh::tg_var<mh_tg1>(1, "b");' in generated
    assert 'mh_tg2& c = mh::tg_var<mh_tg2>(2, "c");' in generated


@pytest.mark.parametrize(
    "line",
    [
        "threadgroup float* p = t;",
        "const threadgroup float* p = (const threadgroup float*)t;",
        "f(t, (threadgroup uint*)u);",
    ],
)
def test_a_pointer_stays_as_it_is(line: str) -> None:
    assert line in text(line)


def test_a_constant_of_the_file_is_static() -> None:
    generated = text("", "constant float table[2] = {1, 2};\nconstant constexpr int N = 3;")
    assert "static const float table[2] = {1, 2};" in generated
    assert "static constexpr int N = 3;" in generated


def test_comments_become_spaces_and_lines_stay() -> None:
    assert blank_comments("a; // b\nc /* d\n e */ f") == "a;     \nc     \n      f"
