"""From scores to tokens: the greedy and the sampled walk."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import chisquare

from lse_mlx.drafters.base import Proposal
from lse_mlx.drafters.dflash2.walk import (
    Ids,
    Scores,
    chances_along,
    greedy_walk,
    sampled_walk,
)
from lse_mlx.errors import DraftError

VOCAB = 100
Walk = Callable[[Scores, Ids], Proposal]


def greedy(scores: Scores, ids: Ids) -> Proposal:
    return greedy_walk(scores, ids, VOCAB)


def sampled(scores: Scores, ids: Ids, seed: int = 0, temperature: float = 1.0) -> Proposal:
    return sampled_walk(scores, ids, VOCAB, temperature, np.random.default_rng(seed).random)


WALKS = pytest.mark.parametrize("walk", [greedy, sampled])


def lattice(positions: int = 3, k: int = 4, seed: int = 0) -> tuple[Scores, Ids]:
    """Random scores and distinct ids; the rows of position 0 are the same, as after an anchor."""
    rng = np.random.default_rng([seed, positions, k])
    scores = rng.standard_normal((positions, k, k)).astype(np.float32)
    scores[0] = scores[0, 0]
    ids = np.array([rng.permutation(VOCAB)[:k] for _ in range(positions)], np.int32)
    return scores, ids


def test_the_path_follows_the_scores_after_the_token_taken() -> None:
    """Candidate 1 wins each time, but only on the row of the predecessor that was taken."""
    ids = np.array([[10, 11], [20, 21], [30, 31]], np.int32)
    scores = np.array([[[1, 2], [1, 2]], [[9, 0], [0, 1]], [[9, 0], [0, 1]]], np.float32)
    proposal = greedy(scores, ids)
    assert proposal.tokens == [11, 21, 31]
    for token, q in zip(proposal.tokens, proposal.q, strict=True):
        assert (q.ids.tolist(), q.probs.tolist()) == ([token], [1.0])


@given(st.integers(0, 10_000))
def test_greedy_equals_a_walk_by_hand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(-2, 3, (7, 6, 6)).astype(np.float32)  # ties everywhere
    ids = rng.integers(0, 8, (7, 6)).astype(np.int32)  # duplicates too
    taken, expected = 0, []
    for p in range(7):
        taken = min(range(6), key=lambda b: (-scores[p, taken, b], ids[p, b], b))
        expected.append(ids[p, taken])
    assert greedy(scores, ids).tokens == expected


def test_ties_go_to_the_smallest_id_then_to_the_first_index() -> None:
    ids = np.array([[9, 4, 7, 4], [1, 2, 3, 5]], np.int32)
    scores = np.zeros((2, 4, 4), np.float32)
    scores[1, 1] = [0, 1, 0, 0]  # reached only if index 1 was taken, not 3
    scores[1, 3] = [0, 0, 1, 0]
    assert greedy(scores, ids).tokens == [4, 2]


@WALKS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_is_refused_on_a_visited_row_only(
    walk: Walk, bad: float
) -> None:
    scores, ids = lattice()
    visited = walk(scores, ids)
    taken = int(np.flatnonzero(ids[0] == visited.tokens[0])[0])
    for row in range(4):
        harmed = scores.copy()
        harmed[1, row, 2] = bad
        if row == taken:
            with pytest.raises(DraftError, match=r"Draft position 1 has the score .*candidate 2"):
                walk(harmed, ids)
        else:
            assert walk(harmed, ids).tokens == visited.tokens


@WALKS
@pytest.mark.parametrize("bad", [-1, VOCAB, 0.25, 1.5, np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 2])
def test_a_malformed_id_is_refused_anywhere(walk: Walk, bad: float, position: int) -> None:
    scores, ids = lattice()
    scores[position, :, 3] = -50.0  # so that no walk takes it
    harmed: Any = ids.astype(np.float64)  # as ids come from a kernel that gives them as floats
    harmed[position, 3] = bad
    with pytest.raises(DraftError, match=f"Draft position {position} has the id .*0..99"):
        walk(scores, harmed)


@WALKS
def test_no_positions_are_refused(walk: Walk) -> None:
    scores, ids = lattice(positions=3)
    with pytest.raises(DraftError, match="0 positions"):
        walk(scores[:0], ids[:0])


def test_an_id_twice_at_a_position_has_no_q() -> None:
    scores, ids = lattice()
    ids[2, 3] = ids[2, 1]
    with pytest.raises(DraftError, match=f"Draft position 2 has the id {ids[2, 1]} twice"):
        sampled(scores, ids)
    greedy(scores, ids)


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan, np.inf])
def test_temperatures_that_cannot_be_drawn_at_are_refused(temperature: float) -> None:
    with pytest.raises(DraftError, match="temperature"):
        sampled(*lattice(), temperature=temperature)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_q_is_the_softmax_of_the_row_after_the_token_drawn(temperature: float) -> None:
    for seed in range(20):
        scores, ids = lattice(positions=7, k=16, seed=seed)
        proposal = sampled(scores, ids, seed, temperature)
        taken = 0
        for p, (token, q) in enumerate(zip(proposal.tokens, proposal.q, strict=True)):
            row = scores[p, taken].astype(np.float64)
            np.testing.assert_allclose(q.probs, softmax(row / temperature), rtol=0, atol=1e-12)
            np.testing.assert_array_equal(q.ids, ids[p])
            taken = int(np.flatnonzero(ids[p] == token)[0])


def test_one_uniform_a_position_at_its_quantile_in_candidate_order() -> None:
    scores, ids = lattice(positions=5, seed=3)
    calls: list[float] = []

    def uniform() -> float:
        calls.append(0.05 + 0.2 * len(calls))
        return calls[-1]

    proposal = sampled_walk(scores, ids, VOCAB, 1.0, uniform)
    assert len(calls) == 5
    for p, (token, q) in enumerate(zip(proposal.tokens, proposal.q, strict=True)):
        at = int(np.searchsorted(np.cumsum(q.probs), calls[p], side="right"))
        assert token == ids[p, at]


def test_a_replay_is_the_same_and_another_seed_is_not() -> None:
    scores, ids = lattice(positions=7, k=16)
    drafts = [sampled(scores, ids, seed).tokens for seed in (1, 1, 2)]
    assert drafts[0] == drafts[1] != drafts[2]


def test_a_tiny_temperature_is_greedy() -> None:
    scores, ids = lattice(positions=7, k=16)
    assert sampled(scores, ids, temperature=1e-300).tokens == greedy(scores, ids).tokens


def test_draws_follow_q() -> None:
    """All paths of two positions, against the product of q and the q after each token."""
    scores, ids = lattice(positions=2, k=3, seed=5)
    uniform, counts, runs = np.random.default_rng(0).random, np.zeros((3, 3)), 6000
    index = [{int(t): i for i, t in enumerate(row)} for row in ids]
    for _ in range(runs):
        one, two = sampled_walk(scores, ids, VOCAB, 0.8, uniform).tokens
        counts[index[0][one], index[1][two]] += 1
    expected = np.zeros((3, 3))
    for a, b in product(range(3), repeat=2):
        first, then = (softmax(scores[p].astype(np.float64) / 0.8, axis=1) for p in (0, 1))
        expected[a, b] = runs * first[0, a] * then[a, b]
    assert chisquare(counts.ravel(), expected.ravel()).pvalue > 0.001


def test_what_could_have_stood_on_a_path_is_what_a_draw_at_temperature_1_has() -> None:
    scores, ids = lattice(positions=7, k=6, seed=3)
    tokens = greedy(scores, ids).tokens
    taken = 0
    for position, chance in enumerate(chances_along(scores, ids, tokens)):
        assert chance.ids.tolist() == ids[position].tolist()
        expected = softmax(scores[position, taken].astype(np.float64))
        assert chance.probs == pytest.approx(expected, abs=1e-12)
        taken = ids[position].tolist().index(tokens[position])
    drawn = sampled(scores, ids)
    for chance, q in zip(chances_along(scores, ids, drawn.tokens), drawn.q, strict=True):
        assert np.array_equal(chance.probs, q.probs)
