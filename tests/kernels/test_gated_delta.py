"""The gated delta rule: against float64, row by row, and without touching its input."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import gated_delta_ops
from numpy.typing import NDArray

from lse_mlx.kernels.gated_delta import (
    DeltaRows,
    fold_rows,
    host_fold_rows,
    host_read_rows,
    read_rows,
)


@dataclass(frozen=True)
class Form:
    """One form of the recurrence, fed with the kind of array that it takes."""

    own: Callable[[mx.array], Any]
    read_rows: Callable[..., tuple[Any, Any]]
    fold_rows: Callable[..., Any]

    def read(self, q: mx.array, rows: DeltaRows, state: mx.array) -> tuple[Any, Any]:
        return self.read_rows(self.own(q), self.rows(rows), self.own(state))

    def fold(self, rows: DeltaRows, state: mx.array) -> Any:
        return self.fold_rows(self.rows(rows), self.own(state))

    def rows(self, rows: DeltaRows) -> DeltaRows:
        return DeltaRows(*map(self.own, rows.arrays()))


DEVICE = Form(mx.array, read_rows, fold_rows)
HOST = Form(np.array, host_read_rows, host_fold_rows)
each_form = pytest.mark.parametrize("form", [DEVICE, HOST], ids=["device", "host"])


def random_rows(
    t: int, hk: int = 2, hv: int = 4, dk: int = 32, dv: int = 16, seed: int = 0
) -> tuple[mx.array, DeltaRows, mx.array]:
    """q, rows and a state, fp32: keys of length one, decays in (0, 1], writes in (0, 1)."""
    rng = np.random.default_rng([seed, t, hk, hv])

    def unit(*shape: int) -> NDArray[np.float64]:
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def as_mx(x: NDArray[np.float64]) -> mx.array:
        return mx.array(x.astype(np.float32))

    rows = DeltaRows(
        k=as_mx(unit(1, t, hk, dk)),
        v=as_mx(rng.standard_normal((1, t, hv, dv))),
        g=as_mx(rng.uniform(0.2, 1.0, (1, t, hv))),
        beta=as_mx(rng.uniform(0.0, 1.0, (1, t, hv))),
    )
    return as_mx(unit(1, t, hk, dk)), rows, as_mx(rng.standard_normal((1, hv, dv, dk)))


def in_float64(
    q: mx.array, rows: DeltaRows, state: mx.array
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """S <- g S + beta (v - g S k) k^T and y = S q, head by head and row by row."""
    q_, k, v, g, beta, s = (
        np.array(a.astype(mx.float32), np.float64)[0] for a in (q, *rows.arrays(), state)
    )
    t, hv = v.shape[:2]
    y = np.zeros(v.shape)
    for h in range(hv):
        of_key = h // (hv // k.shape[1])
        for i in range(t):
            key = k[i, of_key]
            decayed = g[i, h] * s[h]
            s[h] = decayed + beta[i, h] * np.outer(v[i, h] - decayed @ key, key)
            y[i, h] = s[h] @ q_[i, of_key]
    return y, s


def row(rows: DeltaRows, i: int) -> DeltaRows:
    return DeltaRows(*(a[:, i : i + 1] for a in rows.arrays()))


@pytest.mark.parametrize(("hk", "hv"), [(1, 1), (2, 2), (2, 4), (1, 6)])
@pytest.mark.parametrize("t", [1, 8, 40])
@each_form
def test_outputs_and_state_follow_the_recurrence(form: Form, t: int, hk: int, hv: int) -> None:
    q, rows, state = random_rows(t, hk, hv)
    y, after = form.read(q, rows, state)
    expected_y, expected_state = in_float64(q, rows, state)
    np.testing.assert_allclose(np.array(y[0]), expected_y, atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(np.array(after[0]), expected_state, atol=2e-6, rtol=1e-5)


@each_form
@given(t=st.integers(1, 17), hk=st.integers(1, 3), share=st.integers(1, 3), seed=st.integers(0, 99))
def test_t_rows_are_t_single_rows_bit_for_bit(
    form: Form, t: int, hk: int, share: int, seed: int
) -> None:
    q, rows, state = random_rows(t, hk, hk * share, dk=32, dv=32, seed=seed)
    y, after = form.read(q, rows, state)
    single, one_by_one = state, []
    for i in range(t):
        y_i, single = form.read(q[:, i : i + 1], row(rows, i), single)
        one_by_one.append(np.array(y_i))
    assert np.array_equal(np.array(y), np.concatenate(one_by_one, axis=1))
    assert np.array_equal(np.array(after), np.array(single))


@pytest.mark.parametrize("n", range(1, 9))
@each_form
def test_folding_the_first_rows_is_reading_them(form: Form, n: int) -> None:
    q, rows, state = random_rows(8)
    folded = form.fold(rows.first(n), state)
    _, read = form.read(q[:, :n], DeltaRows(*(a[:, :n] for a in rows.arrays())), state)
    assert np.array_equal(np.array(folded), np.array(read))


@each_form
def test_the_input_state_is_not_changed(form: Form) -> None:
    q, rows, state = random_rows(8)
    held = form.own(state)
    np.array(form.read_rows(form.own(q), form.rows(rows), held)[1])
    np.array(form.fold_rows(form.rows(rows), held))
    assert np.array_equal(np.array(held), np.array(state))


@each_form
def test_no_decay_and_no_write_keep_the_state(form: Form) -> None:
    q, rows, state = random_rows(3)
    still = DeltaRows(rows.k, rows.v, mx.ones_like(rows.g), mx.zeros_like(rows.beta))
    assert np.array_equal(np.array(form.read(q, still, state)[1]), np.array(state))


def test_a_decay_near_one_is_not_rounded_away() -> None:
    q, rows, state = random_rows(512, seed=5)
    slow = DeltaRows(
        rows.k.astype(mx.bfloat16),
        rows.v.astype(mx.bfloat16),
        mx.full(rows.g.shape, 0.999),
        mx.zeros_like(rows.beta),
    )
    after = np.array(read_rows(q.astype(mx.bfloat16), slow, state)[1])
    np.testing.assert_allclose(after, np.array(state) * 0.999**512, rtol=1e-4)


def test_outputs_take_the_dtype_of_the_query_and_the_state_stays_fp32() -> None:
    q, rows, state = random_rows(2)
    y, after = read_rows(q.astype(mx.bfloat16), rows, state)
    assert (y.dtype, after.dtype) == (mx.bfloat16, mx.float32)
    assert y.shape == rows.v.shape
    assert after.shape == state.shape


@each_form
def test_it_agrees_with_the_operations_of_mlx_lm(form: Form) -> None:
    q, rows, state = random_rows(9)
    y, after = form.read(q, rows, state)
    same_y, same_state = gated_delta_ops(q, rows.k, rows.v, rows.g, rows.beta, state)
    np.testing.assert_allclose(np.array(y), np.array(same_y), atol=2e-6)
    np.testing.assert_allclose(np.array(after), np.array(same_state), atol=2e-6)
