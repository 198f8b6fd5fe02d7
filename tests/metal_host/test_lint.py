"""The lint refuses what Metal's address spaces refuse."""

import mlx.core as mx
import pytest

from tests.metal_host.generate import KernelSource
from tests.metal_host.lint import clang, lint

pytestmark = pytest.mark.skipif(
    clang() is None, reason="clang is not installed, and the lint of address spaces needs it"
)


def complaints(source: str, header: str = "", elements: int = 8, x: mx.array | None = None) -> str:
    kernel = KernelSource("k", ("x",), ("o",), source, header)
    return lint(kernel, [mx.zeros(elements) if x is None else x], [mx.float32])


def test_what_metal_takes() -> None:
    assert not complaints("const device float* p = x; o[0] = p[1];")
    assert not complaints("const constant float* p = x; o[0] = p[1];", elements=7)
    assert not complaints("o[0] = x;", x=mx.array(0.5))
    assert not complaints("o[x_shape[0]] = x[x_strides[0] + x_ndim];")
    assert not complaints(
        "threadgroup float t[4]; o[thread_position_in_grid.x] = f(t) + float2(1, 2).x;",
        "float f(threadgroup const float* p) { return p[0]; }",
    )


def test_a_small_input_is_constant() -> None:
    assert "__constant" in complaints("const device float* p = x; o[0] = p[1];", elements=7)


@pytest.mark.parametrize(
    ("source", "header"),
    [
        ("threadgroup float t[4]; device float* p = t; o[0] = p[1];", ""),
        ("o[0] = f(x);", "float f(threadgroup float* p) { return p[0]; }"),
        ("x[0] = 1; o[0] = 0;", ""),
        ("o[0] = no_such_function(x[0]);", ""),
    ],
)
def test_what_metal_refuses(source: str, header: str) -> None:
    assert "error" in complaints(source, header)


def test_a_pointer_needs_an_address_space() -> None:
    assert "k.metal:2: error: no address space" in complaints("\nconst float* p = x; o[0] = p[1];")
    said = complaints("o[0] = f(x);", "float f(const float* p) { return p[0]; }")
    assert "k.header:1: error: no address space" in said


def test_template_values() -> None:
    kernel = KernelSource("k", ("x",), ("o",), "o[0] = T(x[0]) + N + (B ? 1 : 0);")
    template = [("T", mx.bfloat16), ("N", 3), ("B", True)]
    assert not lint(kernel, [mx.zeros(8)], [mx.float32], template)
    assert "error" in lint(kernel, [mx.zeros(8)], [mx.float32], template[:2])
