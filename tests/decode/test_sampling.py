"""What a request's settings make of a row of logits, against the definition, token by token."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from lse_mlx.decode.rules import Penalties, Rules
from lse_mlx.decode.sampling import Sampling, TargetRows
from lse_mlx.errors import RequestError, TargetError
from tests.decode.definition import Undecided, chosen_row, probabilities

INF, NAN = math.inf, math.nan


def given_by(sampling: Sampling, logits: list[float]) -> dict[int, float]:
    p = sampling.distribution(np.array(logits, np.float32))
    assert p.probs.dtype == np.float64
    assert len(set(p.ids.tolist())) == len(p.ids)
    assert p.probs.sum() == pytest.approx(1, abs=1e-12)
    return {t: w for t, w in zip(p.ids.tolist(), p.probs.tolist(), strict=True) if w > 0}


# Quarters are exact in fp32 and tie often.
value = st.one_of(st.integers(-12, 12).map(lambda n: n / 4), st.just(-INF))
rows = st.lists(value, min_size=1, max_size=24).filter(lambda row: max(row) > -INF)
settings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.6, 1.0, 1.7]),
    top_k=st.integers(0, 26),
    top_p=st.sampled_from([1.0, 0.97, 0.83, 0.5, 0.11, 1e-6]),
    min_p=st.sampled_from([0.0, 0.03, 0.21, 0.77, 1.0]),
)


@given(logits=rows, sampling=settings)
def test_every_setting_follows_the_definition(logits: list[float], sampling: Sampling) -> None:
    try:
        expected = probabilities(logits, sampling)
    except Undecided:
        reject()
    got = given_by(sampling, logits)
    assert got.keys() == expected.keys()
    assert got == pytest.approx(expected, rel=1e-9)


@given(logits=rows, k=st.integers(1, 26))
def test_top_k_keeps_the_lowest_ids_of_a_tie(logits: list[float], k: int) -> None:
    ranked = sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:k]
    finite = [t for t in ranked if logits[t] > -INF]
    assert set(given_by(Sampling(1.0, top_k=k), logits)) == set(finite)


@given(logits=rows)
def test_greedy_takes_the_lowest_id_of_the_best(logits: list[float]) -> None:
    assert given_by(Sampling(), logits) == {logits.index(max(logits)): 1.0}


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    logits = np.log([0.5, 0.25, 0.125, 0.125]).tolist()
    kept = {p: list(given_by(Sampling(1.0, top_p=p), logits)) for p in (0.4, 0.6, 0.8, 0.9)}
    assert kept == {0.4: [0], 0.6: [0, 1], 0.8: [0, 1, 2], 0.9: [0, 1, 2, 3]}


def test_top_p_drops_a_token_that_starts_at_the_mass_exactly() -> None:
    kept = {p: list(given_by(Sampling(1.0, top_p=p), [1.0] * 4)) for p in (0.25, 0.5, 0.75)}
    assert kept == {0.25: [0], 0.5: [0, 1], 0.75: [0, 1, 2]}


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=700), Sampling(1.0, top_p=0.9)], ids=str)
def test_many_ties_rank_by_token_id(sampling: Sampling) -> None:
    logits = np.random.default_rng(0).integers(0, 3, 1000).astype(np.float32)
    ids = sampling.distribution(logits).ids.tolist()
    ranked = sorted(range(1000), key=lambda t: (-logits[t], t))
    assert len(ids) > 500
    assert ids == ranked[: len(ids)]


def test_top_p_counts_mass_within_top_k_and_min_p_comes_last() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    # Of 4/7 and 3/7 the second starts at 0.571, so 0.55 keeps one and 0.6 keeps both.
    assert list(given_by(Sampling(1.0, top_k=2, top_p=0.55), logits)) == [0]
    assert list(given_by(Sampling(1.0, top_k=2, top_p=0.6), logits)) == [0, 1]
    assert list(given_by(Sampling(1.0, top_p=0.95, min_p=0.6), logits)) == [0, 1]
    # Relative to the top probability at the temperature: 0.3/0.4 becomes 0.5625 at 0.5.
    assert list(given_by(Sampling(0.5, min_p=0.6), logits)) == [0]


def test_minus_infinity_has_no_probability() -> None:
    assert given_by(Sampling(1.0), [-INF, 0.0, -INF]) == {1: 1.0}


def test_zero_and_minus_zero_tie() -> None:
    assert given_by(Sampling(), [-0.0, 0.0]) == {0: 1.0}
    assert given_by(Sampling(1.0, top_k=1), [-0.0, 0.0]) == {0: 1.0}


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-30, 1e300])
def test_extreme_temperatures_stay_distributions(temperature: float) -> None:
    p = given_by(Sampling(temperature), [3.0, 100.0, -100.0])
    assert p == pytest.approx({1: 1.0} if temperature < 1 else dict.fromkeys(range(3), 1 / 3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "named"),
    [
        ([0.0, NAN, INF], "nan at token 1"),
        ([-INF, NAN], "nan at token 1"),
        ([0.0, INF, 1.0], "inf at token 1"),
        ([-INF, -INF], "-inf at token 0"),
    ],
)
def test_logits_that_no_token_can_be_chosen_from_are_refused(
    temperature: float, logits: list[float], named: str
) -> None:
    for sampling in (Sampling(temperature), Sampling(temperature, top_k=1)):
        with pytest.raises(TargetError, match=named):
            sampling.distribution(np.array(logits, np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", NAN),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", NAN),
    ],
)
def test_values_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{field} is .*: give .*\.$"):
        Sampling(**{field: value})


def test_rows_are_made_one_at_a_time() -> None:
    """A walk stops at the first rejection, so a row behind it may hold anything."""
    rows = TargetRows(mx.array([[0.0, 2.0], [NAN, 0.0]]), Sampling())
    assert len(rows) == 2
    assert rows[0].draw(0.5) == 1
    with pytest.raises(TargetError):
        rows[1]


STOPS = frozenset({1, 2})


@dataclass(frozen=True)
class Counted(Rules):
    """Rules that keep what they were asked: the history and the emitted count of each row."""

    asked: list[tuple[list[int], int]] = field(default_factory=list)

    def apply(self, logits: mx.array, history: list[int], emitted: int) -> mx.array:
        assert logits.shape[0] == 1
        self.asked.append((list(history), emitted))
        return super().apply(logits, history, emitted)


def row_of(rows: TargetRows, i: int) -> list[float]:
    row = rows.row(i)
    assert row.dtype == np.float32
    return row.tolist()


penalties = st.builds(
    Penalties,
    repetition=st.sampled_from([1.0, 1.3]),
    repetition_window=st.integers(1, 9),
    presence=st.sampled_from([0.0, 0.7, -0.3]),
    presence_window=st.integers(1, 9),
    frequency=st.sampled_from([0.0, 0.4]),
    frequency_window=st.integers(1, 9),
    logit_bias=st.dictionaries(st.integers(0, 7), st.floats(-2, 2), max_size=2),
)
tokens = st.integers(0, 7)
block = st.lists(st.lists(value, min_size=8, max_size=8), min_size=1, max_size=5)


@given(
    wishes=penalties,
    end=st.sampled_from(["least", "banned", "required"]),
    prompt=st.lists(tokens, min_size=1, max_size=8),
    reply=st.lists(tokens, max_size=6),
    logits=block,
    sampling=settings,
    data=st.data(),
)
def test_each_row_of_a_block_is_the_row_of_one_token_decoding(
    wishes: Penalties,
    end: str,
    prompt: list[int],
    reply: list[int],
    logits: list[list[float]],
    sampling: Sampling,
    data: st.DataObject,
) -> None:
    """Row i has read the anchor, which is the last token so far, and i proposals."""
    proposal = data.draw(st.lists(tokens, min_size=len(logits) - 1, max_size=len(logits) - 1))
    count = data.draw(st.integers(0, len(reply) + len(logits)))
    rules = {
        "least": Rules(wishes, STOPS, min_tokens=count),
        "banned": Rules(wishes, STOPS, end_tokens="banned"),
        "required": Rules(wishes, STOPS, end_tokens="required", most=len(reply) + len(logits)),
    }[end]
    read = [*prompt, *reply, *proposal]
    short = read[max(0, len(read) - rules.window - len(logits)) :]
    for known in (read, short):
        rows = TargetRows(mx.array(logits), sampling, rules, known, len(reply))
        for i, raw in enumerate(logits):
            history = [*prompt, *reply, *proposal[:i]]
            expected = chosen_row(raw, history, len(reply) + i, rules)
            if max(expected) == -INF:
                with pytest.raises(TargetError):
                    rows[i]
                continue
            assert row_of(rows, i) == expected
            alone = TargetRows(mx.array([raw]), sampling, rules, history, len(reply) + i)[0]
            assert rows[i].ids.tolist() == alone.ids.tolist()
            assert rows[i].probs.tolist() == alone.probs.tolist()
            assert set(given_by(sampling, expected)) == {
                t for t, p in zip(alone.ids.tolist(), alone.probs.tolist(), strict=True) if p > 0
            }


def test_only_the_rows_asked_for_are_computed_and_each_once() -> None:
    rules = Counted(Penalties(presence=1.0, presence_window=2))
    rows = TargetRows(mx.zeros((4, 3)), Sampling(1.0), rules, [2, 2, 0, 1, 2, 0], 5)
    assert rules.asked == []
    for row in (1, 1, 3):
        assert rows[row].probs.sum() == pytest.approx(1)
        assert rows.logprob(row, 1, 2).token == 1
    assert rules.asked == [([0, 1], 6), ([2, 0], 8)]


def test_rules_that_ask_nothing_are_never_run() -> None:
    for rules in (Counted(), Counted(stop_tokens=STOPS), Counted(Penalties(logit_bias={9: 0.0}))):
        rows = TargetRows(mx.array([[0.0, 2.0], [3.0, 1.0]]), Sampling(), rules)
        assert [rows[i].draw(0.5) for i in range(2)] == [1, 0]
        rows.logprob(0, 1, 1)
        assert rules.asked == []


def test_rows_after_min_tokens_are_left_alone() -> None:
    rules = Counted(stop_tokens=STOPS, min_tokens=5)
    rows = TargetRows(mx.array([[0.0, 2.0, 3.0]] * 3), Sampling(), rules, emitted=3)
    assert [rows[i].draw(0.5) for i in range(3)] == [0, 0, 2]
    assert rules.asked == [([], 3), ([], 4)]


def test_the_logits_of_a_pass_stay_as_they_are() -> None:
    logits = mx.array(np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32))
    before = np.array(logits)
    wishes = Penalties(1.5, 9, 0.5, 9, 0.25, 9, {0: 3.0})
    for rules in (
        Rules(wishes, STOPS, end_tokens="banned"),
        Rules(wishes, STOPS, end_tokens="required", most=1),
    ):
        read = [0, 1, 2, 3, 4]
        rows = TargetRows(logits, Sampling(), rules, read)
        for i in range(3):
            assert not np.array_equal(rows.row(i), before[i])
        assert read == [0, 1, 2, 3, 4]
        assert np.array_equal(np.array(logits), before)


@pytest.mark.parametrize(("value", "named"), [(NAN, "nan at token 2"), (INF, "inf at token 2")])
@pytest.mark.parametrize(
    "rules",
    [
        Rules(stop_tokens=frozenset({2}), end_tokens="banned"),
        Rules(stop_tokens=frozenset({2}), min_tokens=1),
        Rules(stop_tokens=frozenset({1}), end_tokens="required", most=1),
        Rules(Penalties(logit_bias={2: -100})),
    ],
    ids=["banned", "min_tokens", "required", "bias"],
)
def test_no_rule_hides_what_the_target_may_not_say(rules: Rules, value: float, named: str) -> None:
    rows = TargetRows(mx.array([[0.0, 1.0, value, 3.0]]), Sampling(), rules)
    for ask in (lambda: rows[0], lambda: rows.row(0), lambda: rows.logprob(0, 1, 1)):
        with pytest.raises(TargetError, match=rf"{named}: .*checkpoint's weights\.$"):
            ask()


def test_a_target_that_rules_out_everything_is_not_blamed_on_the_rules() -> None:
    rules = Rules(stop_tokens=STOPS, end_tokens="banned")
    with pytest.raises(TargetError, match=r"-inf at token 0: .*checkpoint's weights\.$"):
        TargetRows(mx.array([[-INF, -INF, -INF]]), Sampling(), rules)[0]


@pytest.mark.parametrize(
    "rules",
    [
        Rules(stop_tokens=STOPS, end_tokens="banned"),
        Rules(stop_tokens=STOPS, min_tokens=7),
        Rules(stop_tokens=frozenset({0, 3}), end_tokens="required", most=5),
        Rules(Penalties(presence=1.0), STOPS, end_tokens="banned"),
    ],
    ids=["banned", "min_tokens", "required", "penalized"],
)
def test_bans_that_leave_no_token_are_named(rules: Rules) -> None:
    """The target itself allows only tokens 1 and 2."""
    rows = TargetRows(mx.array([[-INF, 2.0, 3.0, -INF]]), Sampling(), rules, [1], emitted=4)
    sentence = r"^The request's bans leave no token that could be token 5 of the reply: give .*\.$"
    for ask in (lambda: rows[0], lambda: rows.logprob(0, 1, 1)):
        with pytest.raises(TargetError, match=sentence):
            ask()


@pytest.mark.parametrize(
    ("logits", "named"), [([1e38, 0.0], "inf"), ([-1e38, -INF], "-inf")], ids=["above", "below"]
)
def test_penalties_beyond_fp32_are_named(logits: list[float], named: str) -> None:
    rules = Rules(Penalties(repetition=0.001 if logits[0] > 0 else 1000))
    rows = TargetRows(mx.array([logits]), Sampling(), rules, [0])
    with pytest.raises(TargetError, match=rf"^The request's bias .* token 0 {named}: give .*\.$"):
        rows[0]


def test_a_bias_outside_the_vocabulary_never_reaches_the_row() -> None:
    with pytest.raises(RequestError, match="logit_bias names token 3, outside"):
        TargetRows(mx.zeros((1, 3)), Sampling(), Rules(Penalties(logit_bias={3: 1.0})))


def test_rows_need_the_tokens_that_they_read() -> None:
    rules = Rules(Penalties(presence=1.0))
    rows = TargetRows(mx.zeros((3, 4)), Sampling(), rules, [0, 1])
    assert row_of(rows, 1) == [-1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="2 tokens are not the history of 3 rows"):
        rows[0]


def test_a_fraction_is_a_number() -> None:
    row = np.array([0.5, 1.0, -1.0], np.float32)
    parts = {"top_p": Fraction(9, 10), "min_p": Fraction(1, 100)}
    exact = Sampling(Fraction(1, 2), **parts).distribution(row)
    plain = Sampling(0.5, top_p=0.9, min_p=0.01).distribution(row)
    assert exact.ids.tolist() == plain.ids.tolist()
    assert exact.probs.tolist() == plain.probs.tolist()
