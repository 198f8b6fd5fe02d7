"""Which products the kernels take, and what serves the others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lse_mlx.errors import KernelError
from lse_mlx.kernels.choices import Choices, Mode
from lse_mlx.kernels.registry import Build, Registry
from lse_mlx.kernels.row_tiles import in_tiles
from lse_mlx.kernels.skinny_qmm import QuantizedProduct, own_forms, skinny_qmm
from tests.dice_pair import dice
from tests.kernels.affine import Codes, as_doubles, assert_within_rounding, normal
from tests.kernels.modes import needs_compiler
from tests.metal_host.host import MetalHost

SHAPE = "3x320x21 4-bit in 64, float32/float32"


def product(registry: Registry, x: mx.array, codes: Codes) -> mx.array:
    return skinny_qmm(
        registry, x, codes.weight, codes.scales, codes.biases, codes.bits, codes.group_size
    )


def on_harness(mode: Mode = "own", exact: bool = False, required: bool = False) -> Registry:
    build: Build = MetalHost().metal_kernel
    return Registry("metal", build, Choices(mode, exact), required)


@needs_compiler
def test_the_winner_of_a_race_serves() -> None:
    codes, x = Codes.random(21, 320, 4), normal(3, 320)
    registry = on_harness("auto")
    product(registry, x, codes)
    assert not registry.served
    registry.choices.winners[f"skinny_qmm {SHAPE}"] = "matrix"
    product(registry, x, codes)
    product(registry, x[:2], codes)
    assert registry.served == {("skinny_qmm_matrix", "metal"): 1}


@needs_compiler
@pytest.mark.parametrize("exact", [False, True])
def test_more_than_eight_rows_are_stock_unless_exact(exact: bool) -> None:
    codes, x = Codes.random(21, 320, 4), normal(9, 320)
    registry = on_harness("own", exact)
    y = product(registry, x, codes)
    assert_within_rounding(np.array(y), as_doubles(x), codes.dense(), mx.float32)
    assert registry.served == ({("skinny_qmm", "metal"): 1} if exact else {})


@pytest.mark.parametrize(("bits", "group_size"), [(2, 64), (3, 64), (6, 32)])
@pytest.mark.parametrize("exact", [False, True])
def test_other_codes_are_stocks_and_said_to_be(bits: int, group_size: int, exact: bool) -> None:
    dense = normal(21, 320)
    weight, scales, biases = mx.quantize(dense, group_size=group_size, bits=bits)
    x = normal(11, 320)
    expected = as_doubles(x) @ as_doubles(mx.dequantize(weight, scales, biases, group_size, bits)).T
    registry = on_harness("own", exact)
    y = skinny_qmm(registry, x, weight, scales, biases, bits, group_size)
    np.testing.assert_allclose(np.array(y), expected, atol=1e-4)
    assert registry.served == {("skinny_qmm", "reference"): 1}
    with pytest.raises(KernelError, match="skinny_qmm"):
        skinny_qmm(on_harness(required=True), x, weight, scales, biases, bits, group_size)


def test_where_no_kernel_runs_mlx_serves_in_x_s_dtype() -> None:
    codes = Codes.random(21, 320, 8)
    registry = Registry("reference")
    for dtype in (mx.float32, mx.bfloat16):
        x = normal(3, 320, dtype=dtype)
        y = product(registry, x, codes)
        assert y.dtype == dtype
        assert_within_rounding(as_doubles(y), as_doubles(x), codes.dense(), dtype)
    assert registry.served == {("skinny_qmm", "reference"): 2}


def of(codes: Codes, registry: Registry | None = None) -> QuantizedProduct:
    registry = registry or on_harness()
    parts = (codes.weight, codes.scales, codes.biases)
    return QuantizedProduct(registry, *parts, codes.bits, codes.group_size)


def test_what_the_kernels_take() -> None:
    codes = Codes.random(21, 320, 4)
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        assert of(codes).has_form(dtype)
    assert not of(codes).has_form(mx.int32)
    assert not of(replace(codes, bits=5)).has_form(mx.float32)
    assert not of(replace(codes, group_size=16)).has_form(mx.float32)
    mixed = replace(codes, biases=codes.biases.astype(mx.bfloat16))
    assert not of(mixed).has_form(mx.float32)


def test_a_matrix_of_a_few_words_is_stocks() -> None:
    """MLX passes fewer than eight elements in another address space than the kernels read."""
    registry = on_harness()
    codes, x = Codes.random(1, 32, 4, 32), normal(2, 32)
    assert codes.weight.size == 4
    y = of(codes, registry)(x)
    assert_within_rounding(np.array(y), as_doubles(x), codes.dense(), mx.float32)
    assert registry.served == {("skinny_qmm", "reference"): 1}
    assert of(Codes.random(1, 64, 4, 32)).has_form(mx.float32)


def test_a_shape_names_all_that_tells_kernels_apart() -> None:
    codes = Codes.random(21, 320, 8, 32, mx.bfloat16)
    assert of(codes).shape_name(3, mx.float16) == "3x320x21 8-bit in 32, float16/bfloat16"


def test_a_kernel_that_does_not_run_is_served_by_stock_and_said() -> None:
    codes, x = Codes.random(21, 320, 4), normal(3, 320)
    registry = dice(refusing=("skinny_qmm",))
    for _ in range(2):
        y = of(codes, registry)(x)
        assert_within_rounding(np.array(y), as_doubles(x), codes.dense(), mx.float32)
    assert registry.served == {("skinny_qmm", "reference"): 2}
    assert "threadgroup too large" in registry.refused["skinny_qmm"]
    with registry.choices.forcing("matrix"):
        of(codes, registry)(x)
    assert registry.served["skinny_qmm_matrix", "metal"] == 1


def test_an_exact_product_takes_the_next_form_where_one_is_refused() -> None:
    registry = dice(exact=True, refusing=("skinny_qmm",))
    first, second = (of(Codes.random(21, 320, 4), registry) for _ in range(2))
    for product in (first, second):
        for rows in (3, 1, 9):
            assert product(normal(rows, 320)).shape == (rows, 21)
    assert list(registry.refused) == ["skinny_qmm"]
    assert "threadgroup too large" in registry.refused["skinny_qmm"]
    assert registry.served == {("skinny_qmm_matrix", "metal"): 6}
    assert list(registry.choices.chosen.values()) == ["matrix"]
    with registry.choices.forcing("simd"), pytest.raises(KernelError, match="does not run"):
        first(normal(3, 320))


def test_an_exact_product_of_which_no_form_runs_is_an_error() -> None:
    """Stock's rows have other bits than those of a form that served before."""
    registry = dice(exact=True, refusing=("skinny_qmm", "skinny_qmm_matrix"))
    for _ in range(2):
        with pytest.raises(KernelError, match="none runs on this device for 3x320x21"):
            of(Codes.random(21, 320, 4), registry)(normal(3, 320))
    assert not registry.served


def test_an_exact_product_does_not_change_its_form_once_it_served() -> None:
    """One row runs, and eight, which are compiled apart, do not: matrix would have other bits."""
    registry = dice(exact=True)
    answer = registry.build

    def build(*, name: str, **text: Any) -> Callable[..., list[mx.array]]:
        assert answer is not None
        run = answer(name=name, **text)

        def call(**arguments: Any) -> list[mx.array]:
            if name == "skinny_qmm" and ("ROWS", 8) in arguments["template"]:
                raise RuntimeError("too many registers")
            return run(**arguments)

        return call

    registry.build = build
    product = of(Codes.random(21, 320, 4), registry)
    product(normal(1, 320))
    with pytest.raises(KernelError, match="skinny_qmm does not run on this device"):
        product(normal(8, 320))
    product(normal(1, 320))
    assert registry.served == {("skinny_qmm", "metal"): 2}
    other = of(Codes.random(21, 320, 4), registry)
    other(normal(8, 320))
    other(normal(1, 320))
    assert registry.served == {("skinny_qmm", "metal"): 2, ("skinny_qmm_matrix", "metal"): 2}


@needs_compiler
def test_a_product_can_be_called_with_any_rows_and_dtype_in_turn() -> None:
    codes = Codes.random(21, 320, 4)
    product = of(codes)
    for rows, dtype in [(1, mx.float32), (8, mx.bfloat16), (3, mx.float32), (1, mx.float32)]:
        x = normal(rows, 320, dtype=dtype)
        y = product(x)
        assert y.dtype == dtype
        assert_within_rounding(as_doubles(y), as_doubles(x), codes.dense(), dtype)


def test_cuda_has_no_matrix_form() -> None:
    assert own_forms(on_harness()) == ("simd", "matrix")
    assert own_forms(Registry("cuda", MetalHost().metal_kernel)) == ("simd",)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 24])
def test_tiles_have_eight_rows_each_and_leave_out_what_they_add(rows: int) -> None:
    layer, x = nn.Linear(40, 12), normal(rows, 40)
    seen: list[tuple[int, ...]] = []

    def tile(part: mx.array) -> mx.array:
        seen.append(part.shape)
        return layer(part)

    y = in_tiles(tile, x)
    assert set(seen) == {(8, 40)} and len(seen) == -(-rows // 8)
    expected = as_doubles(x) @ as_doubles(layer.weight).T + as_doubles(layer.bias)
    np.testing.assert_allclose(np.array(y), expected, atol=1e-5)
    assert in_tiles(layer, x[None]).shape == (1, rows, 12)
