"""The product of few rows with affine codes: right, and a row's bits are its own."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.skinny_qmm import QuantizedProduct, parts_of_k, skinny_qmm
from tests.kernels.affine import Codes, as_doubles, assert_within_rounding, normal
from tests.kernels.modes import (
    Harness,
    assert_same_bits,
    each_harness,
    every_mode,
    in_every_mode,
    needs_compiler,
    plain,
)

pytestmark = needs_compiler

FORMS = ("simd", "matrix")
each_form = pytest.mark.parametrize("form", FORMS)
each_size = pytest.mark.parametrize("bits", [4, 8])


def product(registry: Registry, form: str, x: mx.array, codes: Codes) -> mx.array:
    """`skinny_qmm` in one form."""
    with registry.choices.forcing(form):
        return skinny_qmm(
            registry, x, codes.weight, codes.scales, codes.biases, codes.bits, codes.group_size
        )


def on_host(harness: Harness, run: Callable[[Registry], mx.array]) -> np.ndarray:
    """What `run` returns, in fp32."""
    return np.array(run(harness()).astype(mx.float32))


@each_form
@each_size
@pytest.mark.parametrize(
    ("rows", "in_width", "out_width", "group_size"),
    [
        (1, 64, 1, 64),  # one group; scales that MLX passes as constants
        (3, 320, 7, 64),  # K ends inside a run of lanes
        (8, 320, 97, 64),  # outputs end inside a tile
        (5, 896, 33, 128),
        (2, 96, 40, 32),  # K is no multiple of 64
        (4, 2304, 16, 64),  # parts of K go around more than once
    ],
)
def test_the_product_is_right(
    form: str, bits: int, rows: int, in_width: int, out_width: int, group_size: int
) -> None:
    codes = Codes.random(out_width, in_width, bits, group_size)
    x = normal(rows, in_width)
    [y] = in_every_mode(lambda registry: [product(registry, form, x, codes)])
    assert_within_rounding(y, as_doubles(x), codes.dense(), mx.float32)


@each_form
@each_size
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (mx.bfloat16, mx.bfloat16),
        (mx.float16, mx.float16),
        (mx.float32, mx.bfloat16),
        (mx.bfloat16, mx.float32),
    ],
)
def test_every_dtype_is_rounded_once(
    form: str, bits: int, dtype: mx.Dtype, scales: mx.Dtype
) -> None:
    codes = Codes.random(50, 320, bits, dtype=scales)
    x = normal(7, 320, dtype=dtype)
    [y] = in_every_mode(lambda registry: [product(registry, form, x, codes)])
    assert_within_rounding(y, as_doubles(x), codes.dense(), dtype)
    [wide] = in_every_mode(lambda r: [product(r, form, x.astype(mx.float32), codes)])
    rounded = mx.array(wide).astype(dtype).astype(mx.float32)
    assert_same_bits(np.array(rounded), y.astype(np.float32))


@each_harness
@each_form
@each_size
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_has_the_same_bits_among_one_to_eight(
    harness: Harness, form: str, bits: int, dtype: mx.Dtype
) -> None:
    """In all modes always: each variant that is compiled, and one that is not full."""
    codes = Codes.random(19, 320, bits, dtype=mx.bfloat16)
    x = normal(8, 320, dtype=dtype)
    row_counts = (1, 2, 3, 8)

    def run(registry: Registry) -> list[mx.array]:
        return [product(registry, form, x[:rows], codes) for rows in row_counts]

    together = dict(zip(row_counts, in_every_mode(run), strict=True))
    for rows in range(1, 9):
        y = on_host(harness, partial(product, form=form, x=x[:rows], codes=codes))
        assert_same_bits(together[8][:rows], y, f"{rows} rows")
        if rows in row_counts:
            assert_same_bits(together[rows].astype(np.float32), y, f"{rows} rows, every mode")


@each_harness
@each_form
@each_size
def test_a_row_has_the_same_bits_in_every_place(harness: Harness, form: str, bits: int) -> None:
    codes = Codes.random(21, 576, bits)
    x = normal(8, 576)
    [straight] = in_every_mode(lambda registry: [product(registry, form, x, codes)])
    for place in range(1, 8):
        rolled = mx.roll(x, place, axis=0)
        y = on_host(harness, partial(product, form=form, x=rolled, codes=codes))
        assert_same_bits(np.roll(straight, place, axis=0), y, f"rolled by {place}")


@each_form
def test_what_is_not_finite_stays_in_its_row(form: str) -> None:
    codes = Codes.random(21, 320, 4)
    x = np.array(normal(8, 320))
    [before] = in_every_mode(lambda registry: [product(registry, form, mx.array(x), codes)])
    x[2, 300], x[5, 0], x[7] = np.inf, np.nan, 3e38
    [y] = in_every_mode(lambda registry: [product(registry, form, mx.array(x), codes)])
    others = [0, 1, 3, 4, 6]
    assert_same_bits(before[others], y[others])
    assert not np.isfinite(y[[2, 5]]).any()


@each_form
@each_size
def test_more_rows_go_eight_at_a_time_where_choices_are_exact(form: str, bits: int) -> None:
    codes = Codes.random(21, 320, bits, dtype=mx.bfloat16)
    x = normal(19, 320, dtype=mx.bfloat16)

    def run(registry: Registry) -> list[mx.array]:
        registry.choices.exact = True
        alone = [product(registry, form, x[i : i + 1], codes) for i in range(19)]
        return [product(registry, form, x, codes), mx.concatenate(alone)]

    together, alone = in_every_mode(run)
    assert_same_bits(alone, together)


@each_form
@each_size
def test_scales_of_any_size(form: str, bits: int) -> None:
    """Groups from 1e-38 to 1e30, negative, constant, and all zeros as MLX writes them."""
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2**32, (8, 512 * bits // 32), np.uint32)
    scales = np.full((8, 8), 1e-3)
    biases = rng.normal(size=(8, 8)) / 100
    scales[1], biases[1] = 1e30, -8e30
    scales[2], biases[2] = -3e-30, 1e-29
    scales[3], biases[3] = 2e-38, 0.0
    scales[4], biases[4], words[4] = -1e-7, 0.0, 0
    scales[5], biases[5], words[5] = -1e-7, 1.5, 0
    scales[6], biases[6] = np.geomspace(1e-20, 1e20, 8), 0.0
    scales[7], biases[7] = 0.25, -100.0
    codes = Codes.of(words, scales, biases, bits, 64)
    x = normal(8, 512)
    [y] = in_every_mode(lambda registry: [product(registry, form, x, codes)])
    for output in range(8):
        one = codes.dense()[output : output + 1]
        assert_within_rounding(y[:, output : output + 1], as_doubles(x), one, mx.float32)
    assert (y[:, 4] == 0).all()


@each_form
def test_a_broken_group_stays_in_its_output(form: str) -> None:
    codes = Codes.random(21, 320, 4)
    scales, biases = np.array(codes.scales), np.array(codes.biases)
    scales[3, 1], biases[3, 1] = np.nan, -np.inf
    broken = Codes.of(np.array(codes.weight), scales, biases, 4, 64)
    x = normal(4, 320)
    [y] = in_every_mode(lambda registry: [product(registry, form, x, broken)])
    [whole] = in_every_mode(lambda registry: [product(registry, form, x, codes)])
    assert np.isnan(y[:, 3]).all()
    assert_same_bits(np.delete(whole, 3, axis=1), np.delete(y, 3, axis=1))


@each_harness
@each_form
@pytest.mark.parametrize("out_width", [8_200, 16_400, 33_000, 65_600])
def test_k_in_every_number_of_parts(harness: Harness, form: str, out_width: int) -> None:
    codes = Codes.random(out_width, 320, 4, dtype=mx.bfloat16)
    x = normal(2, 320)
    y = on_host(harness, lambda registry: product(registry, form, x, codes))
    assert_within_rounding(y, as_doubles(x), codes.dense(), mx.float32)


def test_fewer_outputs_cut_k_into_more_parts() -> None:
    assert [parts_of_k(n, 16) for n in (48, 5_120, 12_288, 17_408, 248_320)] == [8, 8, 4, 2, 1]
    assert [parts_of_k(n, 32) for n in (48, 5_120, 12_288, 17_408, 248_320)] == [8, 8, 8, 4, 1]


@pytest.mark.slow
@each_form
@pytest.mark.parametrize(
    ("harness", "bits", "in_width", "out_width"),
    [
        (every_mode, 4, 5_120, 17_408),
        (every_mode, 4, 17_408, 5_120),
        (every_mode, 4, 5_120, 48),
        (plain, 4, 5_120, 248_320),
        (every_mode, 8, 25_600, 5_120),
        (every_mode, 8, 5_120, 34_816),
    ],
)
def test_the_shapes_of_a_27b_pair(
    harness: Harness, form: str, bits: int, in_width: int, out_width: int
) -> None:
    """Some outputs at both ends; the others are the same code at addresses in between.

    The vocabulary runs plainly alone: checked, it takes eight minutes under each seed. In every mode
    its K runs here with fewer outputs, and K in one part, as it has it, in
    `test_k_in_every_number_of_parts`. The others take one or two minutes.
    """
    codes = Codes.random(out_width, in_width, bits, dtype=mx.bfloat16)
    x = normal(8, in_width)
    y = on_host(harness, lambda registry: product(registry, form, x, codes))
    for part in (slice(0, 40), slice(out_width - 40, out_width)):
        some = Codes(codes.weight[part], codes.scales[part], codes.biases[part], bits, 64)
        assert_within_rounding(y[:, part], as_doubles(x), some.dense(), mx.float32)


@pytest.mark.slow
@each_form
@pytest.mark.parametrize(("in_width", "out_width"), [(5_120, 17_408), (17_408, 5_120)])
def test_rows_have_the_same_bits_at_the_shapes_of_a_27b_target(
    form: str, in_width: int, out_width: int
) -> None:
    """Plainly alone: checked, eight products take minutes. Every number of rows runs in every mode
    at small shapes, and eight rows at these ones above.
    """
    codes = Codes.random(out_width, in_width, 4, dtype=mx.bfloat16)
    x = normal(8, in_width, dtype=mx.bfloat16)
    eight = on_host(plain, partial(product, form=form, x=x, codes=codes))
    for rows in range(1, 8):
        y = on_host(plain, partial(product, form=form, x=x[:rows], codes=codes))
        assert_same_bits(eight[:rows], y, f"{rows} rows")


def test_a_product_keeps_leading_dimensions() -> None:
    codes = Codes.random(21, 320, 4)
    x = normal(2, 3, 320)
    of = QuantizedProduct(every_mode(), codes.weight, codes.scales, codes.biases, 4, 64)
    assert (of.in_width, of.out_width) == (320, 21)
    y = of(x)
    assert y.shape == (2, 3, 21)
    assert np.array_equal(np.array(y).reshape(6, 21), np.array(of(x.reshape(6, 320))))
    assert of(x[0, 0]).shape == (21,)
    assert np.array_equal(np.array(of(x[0, 0])), np.array(y)[0, 0])
