"""The gated delta rule in NumPy: against float64, row by row, and without touching its input."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lse_mlx.kernels.host_gated_delta import (
    HostDeltaRows,
    host_fold_rows,
    host_gated_delta_verify,
)
from lse_mlx.selftest.definitions import recurrence

Array = NDArray[np.float32]
ROWS = 8


@dataclass(frozen=True)
class Given:
    """Queries, rows and a state."""

    q: Array
    rows: HostDeltaRows
    state: Array

    def cut(self, start: int, stop: int) -> tuple[Array, HostDeltaRows]:
        arrays = (a[:, start:stop] for a in self.rows.arrays())
        return self.q[:, start:stop], HostDeltaRows(*arrays)

    def verify(
        self, start: int, stop: int, before: int, state: Array, whole: bool
    ) -> tuple[Array, Array]:
        """A pass of some rows behind the first `before` rows, which are followed by NaN."""
        q, rows = self.cut(start, stop)
        pending = None
        if before:
            pending = HostDeltaRows(*(a.copy() for a in self.rows.arrays()))
            for array in pending.arrays():
                array[:, before:] = np.nan
        return host_gated_delta_verify(q, rows, pending, before, state, whole)


def draw(n: int, hk: int = 2, hv: int = 4, seed: int = 0) -> Given:
    """Keys and queries of length one, decays in (0.2, 1), writes in (0, 1); heads of 32 x 16."""
    rng = np.random.default_rng([seed, n, hk, hv])

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    def unit(*shape: int) -> Array:
        x = normal(*shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def between(low: float) -> Array:
        return rng.uniform(low, 1.0, (1, n, hv)).astype(np.float32)

    rows = HostDeltaRows(unit(1, n, hk, 32), normal(1, n, hv, 16), between(0.2), between(0.0))
    return Given(unit(1, n, hk, 32), rows, normal(1, hv, 16, 32))


@pytest.mark.parametrize(("hk", "hv"), [(1, 1), (2, 2), (2, 4), (1, 6)])
@pytest.mark.parametrize("n_pending", [0, 5])
@pytest.mark.parametrize("n", [1, 8, 40])
def test_outputs_and_state_follow_the_recurrence(n: int, n_pending: int, hk: int, hv: int) -> None:
    x = draw(n + n_pending, hk, hv)
    y, after = x.verify(n_pending, n + n_pending, n_pending, x.state, True)
    arrays = (a[0].astype(np.float64) for a in (x.q, *x.rows.arrays()))
    expected_y, expected = recurrence(*arrays, x.state[0])
    np.testing.assert_allclose(y[0], expected_y[n_pending:], atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(after[0], expected, atol=2e-6, rtol=1e-5)


@given(
    n=st.integers(1, 17), split=st.integers(0, 17), hk=st.integers(1, 3), share=st.integers(1, 3)
)
def test_passes_are_single_rows_bit_for_bit(n: int, split: int, hk: int, share: int) -> None:
    x, before = draw(n, hk, hk * share, seed=split), min(split, n - 1)
    outputs, states = [], [x.state]
    for i in range(n):
        y, after = x.verify(i, i + 1, 0, states[-1], True)
        outputs.append(y)
        states.append(after)
    for whole, kept_after in ((False, before), (True, n)):
        y, kept = x.verify(before, n, before, x.state, whole)
        assert np.array_equal(y, np.concatenate(outputs[before:], axis=1))
        assert np.array_equal(kept, states[kept_after])


@pytest.mark.parametrize("n", range(1, ROWS + 1))
def test_folding_is_what_the_next_pass_does(n: int) -> None:
    x = draw(ROWS)
    _, kept = x.verify(0, 1, n, x.state, False)
    assert np.array_equal(host_fold_rows(x.rows, n, x.state), kept)


def test_the_input_is_not_changed() -> None:
    x = draw(ROWS)
    held = [x.state, x.q, *x.rows.arrays()]
    before = [a.copy() for a in held]
    for whole in (False, True):
        host_gated_delta_verify(x.q, x.rows, x.rows, 3, x.state, whole)
        host_gated_delta_verify(x.q, x.rows, None, 0, x.state, whole)
    host_fold_rows(x.rows, 3, x.state)
    for array, then in zip(held, before, strict=True):
        assert np.array_equal(array, then)


def test_an_open_pass_with_nothing_pending_keeps_the_state_itself() -> None:
    x = draw(4)
    assert x.verify(0, 4, 0, x.state, False)[1] is x.state


def test_no_decay_and_no_write_keep_the_state() -> None:
    x = draw(3)
    rows = x.rows
    still = HostDeltaRows(rows.k, rows.v, np.ones_like(rows.g), np.zeros_like(rows.beta))
    assert np.array_equal(host_gated_delta_verify(x.q, still, None, 0, x.state, True)[1], x.state)
