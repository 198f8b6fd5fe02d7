"""The two-tap convolution by hand and against float64: NumPy, plain MLX and the kernel."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from lse_mlx.kernels.dynamic_conv import dynamic_conv
from lse_mlx.kernels.registry import Registry
from lse_mlx.selftest.definitions import convolution
from tests.kernels.modes import assert_same_bits, in_every_mode, needs_compiler, plain

Floats = NDArray[np.float32]
Form = Callable[[Floats, Floats, Floats, int], Floats]


def by_numpy(x: Floats, base: Floats, dynamic: Floats, side: int) -> Floats:
    return dynamic_conv(Registry("reference"), x, base, dynamic, side)


def by_reference(x: Floats, base: Floats, dynamic: Floats, side: int) -> Floats:
    arrays = map(mx.array, (x, base, dynamic))
    return np.array(dynamic_conv(Registry("reference"), *arrays, side))


def by_kernel_in_every_mode(x: Floats, base: Floats, dynamic: Floats, side: int) -> Floats:
    arrays = [mx.array(a) for a in (x, base, dynamic)]
    (y,) = in_every_mode(lambda registry: [dynamic_conv(registry, *arrays, side)])
    return y


FORMS = pytest.mark.parametrize(
    "form",
    [
        pytest.param(by_numpy, id="numpy"),
        pytest.param(by_reference, id="reference"),
        pytest.param(by_kernel_in_every_mode, id="kernel", marks=needs_compiler),
    ],
)


def waves(rows: int, groups: int, channels: int, seed: int = 0) -> tuple[Floats, Floats, Floats]:
    rng = np.random.default_rng([seed, rows, groups])

    def normal(*shape: int) -> Floats:
        return (0.5 * rng.standard_normal(shape)).astype(np.float32)

    x, base = normal(rows, groups * channels), normal(2, 2, groups, channels)
    return x, base, normal(rows, 2 * 2 * groups)


@FORMS
def test_by_hand(form: Form) -> None:
    """Two channels of one group, three rows: the edge has no row before it."""
    x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    base = np.zeros((2, 2, 1, 2), np.float32)
    base[1, 0, 0] = [10, 20]
    base[1, 1, 0] = [0.5, 0.25]
    # Rows of [side 0: tap 0, tap 1; side 1: tap 0, tap 1].
    dynamic = np.array([[9, 9, 1, 7], [9, 9, 2, 0], [9, 9, 0, 1]], np.float32)
    assert form(x, base, dynamic, 1).tolist() == [
        [11 * 1, 21 * 2],  # tap 1 of row 0 would read before the block
        [12 * 3 + 0.5 * 1, 22 * 4 + 0.25 * 2],
        [10 * 5 + 1.5 * 3, 20 * 6 + 1.25 * 4],
    ]


@FORMS
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_small_blocks(form: Form, rows: int) -> None:
    """Two of each length: a batch of two is two calls."""
    for side, seed in ((0, 0), (1, 0), (0, 1), (1, 1)):
        given = waves(rows, groups=5, channels=4, seed=seed)
        kept = [array.copy() for array in given]
        y = form(*given, side)
        np.testing.assert_allclose(y, convolution(*given, side), rtol=0, atol=1e-6)
        assert y.dtype == np.float32
        for array, before in zip(given, kept, strict=True):
            np.testing.assert_array_equal(array, before)


@FORMS
def test_a_block_of_a_27b_drafter(form: Form) -> None:
    given = waves(8, groups=320, channels=16)
    np.testing.assert_allclose(form(*given, 1), convolution(*given, 1), rtol=0, atol=1e-6)


@FORMS
def test_a_row_does_not_depend_on_later_ones(form: Form) -> None:
    x, base, dynamic = waves(8, groups=5, channels=4)
    whole = form(x, base, dynamic, 0)
    for rows in range(1, 8):
        some = form(x[:rows], base, dynamic[:rows], 0)
        assert_same_bits(some, whole[:rows])


@needs_compiler
def test_an_array_of_numpy_is_served_by_numpy_also_on_a_device() -> None:
    registry = plain()
    assert isinstance(dynamic_conv(registry, *waves(2, 5, 4), 0), np.ndarray)
    assert dict(registry.served) == {("dynamic_conv", "reference"): 1}
