"""Log-probabilities of a row's tokens: against the log-softmax written out, and in blocks."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lse_mlx.decode.rules import Penalties, Rules
from lse_mlx.decode.sampling import Sampling, TargetRows, TokenLogprob
from lse_mlx.errors import TargetError
from tests.decode.definition import chosen_row, log_probabilities

INF, NAN = math.inf, math.nan

# Quarters tie often; the others have all of fp32's digits.
value = st.one_of(
    st.integers(-12, 12).map(lambda n: n / 4), st.floats(-50, 50, width=32), st.just(-INF)
)
lists = st.lists(value, min_size=1, max_size=24).filter(lambda row: max(row) > -INF)


def logprobs(logits: list[float], token: int, top: int) -> TokenLogprob:
    return TargetRows(mx.array([logits], mx.float32), Sampling()).logprob(0, token, top)


@given(logits=lists, top=st.integers(0, 26), data=st.data())
def test_a_row_gives_its_log_softmax(logits: list[float], top: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    expected = log_probabilities(logits)
    found = logprobs(logits, token, top)
    assert found.token == token
    assert found.logprob == pytest.approx(expected[token], abs=1e-13)
    ranked = sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:top]
    assert [t for t, _ in found.top] == [t for t in ranked if logits[t] > -INF]
    for t, logprob in found.top:
        assert type(t) is int and type(logprob) is float
        assert logprob == pytest.approx(expected[t], abs=1e-13)
        assert t != token or logprob == found.logprob


def test_equal_logits_share_their_probability_and_rank_by_id() -> None:
    found = logprobs([1.0, 3.0, -INF, 3.0, 3.0, 3.0], 5, 3)
    assert [t for t, _ in found.top] == [1, 3, 4]
    assert {logprob for _, logprob in found.top} == {found.logprob}


def test_zero_and_minus_zero_tie() -> None:
    assert [t for t, _ in logprobs([-0.0, 0.0, -0.0], 0, 3).top] == [0, 1, 2]


def test_a_single_possible_token_is_certain() -> None:
    assert logprobs([-INF, 5.0, -INF], 1, 20) == TokenLogprob(1, 0.0, [(1, 0.0)])


def test_no_alternatives_unless_asked() -> None:
    assert logprobs([0.0, 0.0], 1, 0) == TokenLogprob(1, -math.log(2), [])


def test_logits_far_apart_keep_their_distance() -> None:
    """In float64, where fp32 would have no digits left for the unlikely one."""
    found = logprobs([1e4, -3.4e38, 1e4], 1, 3)
    assert found.logprob == float(np.float32(-3.4e38)) - 1e4
    assert [t for t, _ in found.top] == [0, 2, 1]
    assert found.top[0][1] == -math.log(2)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.3), Sampling(1.7, top_k=1), Sampling(1.0, top_p=0.1, min_p=0.9)],
    ids=str,
)
def test_no_sampling_setting_changes_them(sampling: Sampling) -> None:
    logits = [0.5, 1.5, -2.0, 1.0]
    rows = TargetRows(mx.array([logits]), sampling)
    assert rows.logprob(0, 2, 4) == logprobs(logits, 2, 4)


def test_they_are_of_the_row_after_the_rules() -> None:
    rules = Rules(
        Penalties(1.3, 9, 0.5, 9, 0.25, 9, {0: 1.5}), frozenset({3}), min_tokens=9, most=20
    )
    logits, history = [0.5, 1.5, -2.0, 6.0, 1.0], [4, 1, 1, 3]
    chosen = chosen_row(logits, history, 4, rules)
    rows = TargetRows(mx.array([logits]), Sampling(), rules, history, 4)
    assert rows.logprob(0, 1, 5) == logprobs(chosen, 1, 5)
    assert 3 not in dict(rows.logprob(0, 1, 5).top)


@given(logits=st.lists(st.lists(value, min_size=6, max_size=6), min_size=2, max_size=5))
def test_a_row_in_a_block_gives_the_bits_that_it_gives_alone(logits: list[list[float]]) -> None:
    rules = Rules(Penalties(1.3, 4, 0.5, 3, 0.25, 2), frozenset({2}), min_tokens=3, most=9)
    logits = [[*row, 0.25] for row in logits]
    read = [3, 1, 3, 0, 2, 5, 6][: len(logits) + 2]
    block = TargetRows(mx.array(logits), Sampling(), rules, read, 1)
    for i, row in enumerate(logits):
        alone = TargetRows(mx.array([row]), Sampling(), rules, read[: 3 + i], 1 + i)
        assert block.logprob(i, 6, 7) == alone.logprob(0, 6, 7)


def test_the_greedy_token_comes_first() -> None:
    for seed in range(20):
        row = np.random.default_rng(seed).integers(0, 5, 40).astype(np.float32)
        rows = TargetRows(mx.array(row[None]), Sampling())
        token = rows[0].draw(0.5)
        found = rows.logprob(0, token, 1)
        assert found.top == [(token, found.logprob)]


@pytest.mark.parametrize("row", [[0.0, NAN], [INF, 0.0], [-INF, -INF]], ids=str)
def test_a_row_without_probabilities_is_refused(row: list[float]) -> None:
    with pytest.raises(TargetError, match="no token can be chosen"):
        logprobs(row, 1, 2)
