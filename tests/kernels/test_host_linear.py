"""Matrix products on the CPU: right, and the same for a row whatever stands around it."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lse_mlx.kernels.host_linear import HostLinear
from lse_mlx.kernels.registry import Registry

IN, OUT = 256, 83


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def run(layer: nn.Module, x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.array(layer(mx.array(x)))


@pytest.fixture(scope="module")
def plain() -> HostLinear:
    return HostLinear(normal(OUT, IN))


@pytest.mark.parametrize("rows", range(1, 18))
def test_a_row_has_the_same_bits_alone_and_among_others(plain: HostLinear, rows: int) -> None:
    x = normal(17, IN, seed=1)
    together = run(plain, x[:rows])
    assert np.array_equal(together, np.concatenate([run(plain, x[i : i + 1]) for i in range(rows)]))


@given(
    place=st.integers(0, 16),
    rows=st.integers(1, 17),
    in_width=st.sampled_from([32, 64, 100, 256, 1000]),
    out_width=st.sampled_from([1, 4, 33, 97, 512]),
)
def test_a_row_has_the_same_bits_in_every_place(
    place: int, rows: int, in_width: int, out_width: int
) -> None:
    layer = HostLinear(normal(out_width, in_width))
    x = normal(rows, in_width, seed=2)
    place %= rows
    moved = np.roll(x, place, axis=0)
    assert np.array_equal(run(layer, moved)[place], run(layer, x)[0])
    assert np.array_equal(run(layer, moved)[place], run(layer, x[:1])[0])


def test_huge_neighbours_leave_a_row_alone(plain: HostLinear) -> None:
    x = normal(8, IN, seed=3)
    alone = run(plain, x[:1])
    x[1:] = np.inf
    x[4] = np.nan
    with np.errstate(invalid="ignore"):
        assert np.array_equal(run(plain, x)[:1], alone)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 64])
def test_the_product_is_right(plain: HostLinear, rows: int) -> None:
    x = normal(rows, IN, seed=4)
    expected = x.astype(np.float64) @ normal(OUT, IN).astype(np.float64).T
    np.testing.assert_allclose(run(plain, x), expected, atol=5e-5)


def test_leading_dimensions_are_kept(plain: HostLinear) -> None:
    x = normal(6, IN, seed=5)
    assert np.array_equal(run(plain, x.reshape(1, 2, 3, IN)), run(plain, x).reshape(1, 2, 3, OUT))
    assert np.array_equal(run(plain, x[0]), run(plain, x)[0])


def test_a_view_and_a_narrow_dtype_come_in_as_their_values(plain: HostLinear) -> None:
    x = mx.array(normal(IN, 5, seed=6)).astype(mx.bfloat16)
    y = plain(x.T)
    assert y.dtype == mx.float32
    assert np.array_equal(np.array(y), run(plain, np.array(x.astype(mx.float32)).T))


def test_a_bias_is_added() -> None:
    weight, bias = normal(OUT, IN), normal(OUT)
    x = normal(3, IN, seed=7)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T + bias
    np.testing.assert_allclose(run(HostLinear(weight, bias), x), expected, atol=5e-5)


def test_joined_products_are_those_of_the_parts() -> None:
    parts = [HostLinear(normal(OUT, IN, seed=1)), HostLinear(normal(70, IN, seed=2))]
    x = normal(3, IN, seed=7)
    apart = np.concatenate([run(part, x) for part in parts], axis=1)
    np.testing.assert_allclose(run(HostLinear.joined(parts), x), apart, atol=5e-5)


def test_a_joined_product_counts_as_one() -> None:
    registry = Registry("reference")
    parts = [HostLinear(normal(OUT, IN)), HostLinear(normal(70, IN), counted_by=registry)]
    joined = HostLinear.joined(parts)
    run(joined, normal(3, IN))
    run(parts[0], normal(3, IN))
    assert registry.served == {("skinny_qmm", "reference"): 1}
