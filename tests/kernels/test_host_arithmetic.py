"""Norm, sigmoid and silu in NumPy: against float64, at extremes, and row by row."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit

from lse_mlx.kernels.host_arithmetic import host_norm, host_sigmoid, host_silu

EPS = 1e-6


def rows() -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(0, 3, (9, 4, 33)).astype(np.float32)


def weight() -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(1, 0.2, 33).astype(np.float32)


def norm64(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight()


FORMS = pytest.mark.parametrize(
    ("form", "exact"),
    [
        pytest.param(lambda x: host_norm(x, weight(), EPS), norm64, id="norm"),
        pytest.param(host_sigmoid, expit, id="sigmoid"),
        pytest.param(host_silu, lambda x: x * expit(x), id="silu"),
    ],
)
Function = Callable[[NDArray], NDArray]


@FORMS
def test_values_are_right_and_stay_fp32(form: Function, exact: Function) -> None:
    y = form(rows())
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, exact(rows().astype(np.float64)), rtol=2e-6)


@FORMS
def test_a_row_has_the_same_bits_alone(form: Function, exact: Function) -> None:
    together = form(rows())
    for i in range(len(together)):
        assert np.array_equal(form(rows()[i : i + 1])[0], together[i])


def test_large_values_saturate_without_a_warning() -> None:
    x = np.array([-1e4, -100, 0, 100, 1e4], np.float32)
    np.testing.assert_allclose(host_sigmoid(x), [0, 0, 0.5, 1, 1], atol=1e-40)
    np.testing.assert_allclose(host_silu(x), [0, 0, 0, 100, 1e4], atol=1e-40)
    assert np.isnan(host_silu(np.array([np.nan], np.float32))).all()
