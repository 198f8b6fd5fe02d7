"""Candidates and their scores: order, ties, values that are not finite, and the formula."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lse_mlx.drafters.dflash2.candidates import top_candidates
from lse_mlx.drafters.dflash2.selector import Selector
from lse_mlx.drafters.dflash2.weights import Matrix

PER_ROW = 4  # values to choose from, so that rows are full of ties


def sorted_ids(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Every id, sorted: best first, the lower id where equal, NaN as if it were +inf."""
    ranked = np.where(np.isnan(logits), np.inf, logits)
    return np.array([sorted(range(len(r)), key=lambda t: (-r[t], t))[:k] for r in ranked])


def assert_best(logits: NDArray[np.float32], k: int) -> None:
    values, ids = top_candidates(mx.array(logits), k)
    expected = sorted_ids(logits, k)
    np.testing.assert_array_equal(np.array(ids), expected)
    np.testing.assert_array_equal(np.array(values), np.take_along_axis(logits, expected, axis=1))


@given(st.integers(1, 400), st.integers(1, 20), st.integers(0, 10_000))
def test_the_best_k_in_order(vocab: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    choices = np.array([-np.inf, -1.0, 0.0, 2.5, np.inf, np.nan], np.float32)
    assert_best(rng.choice(rng.choice(choices, PER_ROW), (3, vocab)), min(k, vocab))


def test_edge_rows_of_a_long_vocabulary() -> None:
    columns = np.arange(4097)
    logits = np.stack([((columns * 37) % 997) * 0.03125 - 17] * 4).astype(np.float32)
    logits[0, [73, 513]], logits[0, [17, 514]] = np.inf, -np.inf
    logits[0, [511, 512, 1025, 4096]] = 100
    logits[1, [511, 512, 4096]], logits[1, 1023], logits[1, 1024] = np.nan, np.inf, -np.inf
    logits[2] = -np.inf
    logits[3] = -9
    logits[3, [0, 511, 512, 1025, 2048, 4096]] = 7
    for k in (1, 3, 16):
        assert_best(logits, k)


def test_the_best_of_rows_as_wide_as_a_real_vocabulary() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 248_320)).astype(np.float32)
    logits[0, [1, 511, 512, 248_319]] = 20
    _, ids = top_candidates(mx.array(logits), 16)
    np.testing.assert_array_equal(np.array(ids), np.argsort(-logits, axis=1, kind="stable")[:, :16])


@pytest.mark.parametrize("nans", [1, 16, 30])
def test_nan_never_hides_below_finite_logits(nans: int) -> None:
    logits = np.linspace(5, 1, 300, dtype=np.float32)[None].repeat(2, axis=0)
    logits[0, 270 : 270 + nans] = np.nan
    values, _ = top_candidates(mx.array(logits), 16)
    assert np.isnan(np.array(values)).sum(axis=1).tolist() == [min(nans, 16), 0]


def test_scores_by_hand() -> None:
    """Rank 2, two candidates, two positions; position 0 stands after the anchor."""
    codebook = mx.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 3.0]])
    selector = Selector(lambda hidden: 2 * hidden, Matrix(codebook), Matrix(codebook))
    scores = selector.scores(
        hidden=mx.array([[1.0, 0.5], [0.5, 1.0]]),
        logits=mx.array([[10.0, 20.0], [30.0, 40.0]]),
        ids=mx.array([[0, 1], [2, 3]], mx.int32),
        anchor=3,
    )
    # Gates [2, 1] and [1, 2]. After 3: [1, 3] * [2, 1] = [2, 3] against [1, 0] and [0, 1].
    after_anchor = [10 + 2, 20 + 3]
    # After 0: [1, 0] * [1, 2] against [2, 1] and [1, 3]; after 1: [0, 1] * [1, 2] = [0, 2].
    assert scores.tolist() == [[after_anchor] * 2, [[30 + 2, 40 + 1], [30 + 2, 40 + 6]]]
