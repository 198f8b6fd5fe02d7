"""Bias, penalties and end tokens on one row of logits, against fp32 scalars in plain Python."""

import math
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lse_mlx.decode.rules import NO_RULES, Penalties, Rules
from lse_mlx.errors import RequestError
from tests.decode.definition import chosen_row

INF, NAN = math.inf, math.nan
VOCAB = 12


def applied(
    rules: Rules, logits: list[float], history: list[int] | None = None, emitted: int = 0
) -> list[float]:
    """What `apply` makes of a row; neither the row nor the history may change."""
    given_row, given_history = mx.array([logits], mx.float32), list(history or [])
    row = rules.apply(given_row, given_history, emitted)
    assert row.dtype == mx.float32
    assert row.shape == (1, len(logits))
    found = np.array(row)[0].tolist()
    assert np.array(given_row)[0].tolist() == np.array(logits, np.float32).tolist()
    assert given_history == list(history or [])
    return found


def penalized(logits: list[float], history: list[int], **options: Any) -> list[float]:
    return applied(Rules(Penalties(**options)), logits, history)


def number(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(np.float32(low).item(), np.float32(high).item(), width=32)


logit = st.one_of(number(-40, 40), st.integers(-9, 9).map(lambda n: n / 4), st.just(-INF))
rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB)
histories = st.lists(st.integers(0, VOCAB - 1), max_size=20)
windows = st.integers(1, 22)
# Not only numbers that fp32 holds: what a caller writes is rounded once, to the nearest.
penalty = st.one_of(st.floats(-3, 3), st.floats(-100, 100), st.just(0.0))
repetition = st.one_of(st.floats(0.5, 2), st.floats(0.001, 1000), st.just(1.0))
bias = st.one_of(st.floats(-100, 100), st.floats(-1e30, 1e30), st.just(0.0))
biases = st.dictionaries(st.integers(0, VOCAB - 1), bias, max_size=5)
ALONE = {
    "repetition": st.builds(Penalties, repetition=repetition, repetition_window=windows),
    "presence": st.builds(Penalties, presence=penalty, presence_window=windows),
    "frequency": st.builds(Penalties, frequency=penalty, frequency_window=windows),
    "bias": st.builds(Penalties, logit_bias=biases),
}
together = st.builds(
    Penalties,
    repetition=repetition,
    repetition_window=windows,
    presence=penalty,
    presence_window=windows,
    frequency=penalty,
    frequency_window=windows,
    logit_bias=biases,
)
ends = st.one_of(
    st.builds(Rules, stop_tokens=st.just(frozenset({0, 7})), min_tokens=st.integers(0, 4)),
    st.builds(Rules, stop_tokens=st.just(frozenset({3})), end_tokens=st.just("banned")),
    st.builds(
        Rules,
        stop_tokens=st.just(frozenset({2, 5, 11})),
        end_tokens=st.just("required"),
        most=st.integers(5, 7),
        min_tokens=st.integers(0, 4),
    ),
)


@pytest.mark.parametrize("kind", ALONE)
@settings(max_examples=200)
@given(data=st.data(), logits=rows, history=histories)
def test_each_alone_follows_the_definition(
    kind: str, data: st.DataObject, logits: list[float], history: list[int]
) -> None:
    rules = Rules(data.draw(ALONE[kind]))
    assert applied(rules, logits, history) == chosen_row(logits, history, 0, rules)


@settings(max_examples=600)
@given(wishes=together, end=ends, logits=rows, history=histories, emitted=st.integers(0, 6))
def test_all_together_follow_the_definition(
    wishes: Penalties, end: Rules, logits: list[float], history: list[int], emitted: int
) -> None:
    rules = Rules(wishes, end.stop_tokens, end.min_tokens, end.end_tokens, end.most)
    if end.most is not None and emitted >= end.most:
        emitted = end.most - 1
    expected = chosen_row(logits, history, emitted, rules)
    assert applied(rules, logits, history, emitted) == expected
    if not rules.acts(emitted):
        assert expected == np.array(logits, np.float32).tolist()


def test_repetition_counts_a_token_once_and_knows_the_sign() -> None:
    found = penalized([4.0, -4.0, 0.0, 4.0, -INF], [0, 0, 1, 2, 0, 4], repetition=2.0)
    assert found == [2.0, -8.0, 0.0, 4.0, -INF]


def test_presence_counts_a_token_once() -> None:
    found = penalized([4.0, -4.0, 0.0, 4.0, -INF], [0, 0, 1, 2, 0, 4], presence=1.5)
    assert found == [2.5, -5.5, -1.5, 4.0, -INF]


def test_frequency_counts_every_occurrence() -> None:
    found = penalized([4.0, -4.0, 0.0, 4.0, -INF], [0, 0, 1, 2, 0, 4], frequency=1.5)
    assert found == [-0.5, -5.5, -1.5, 4.0, -INF]


def test_frequency_subtracts_one_after_another() -> None:
    """In fp32 that is not the count times the penalty."""
    step, row = np.float32(0.1), np.float32(1.0)
    for _ in range(7):
        row = row - step
    assert row != np.float32(1.0) - np.float32(7) * step
    assert penalized([1.0, 0.0], [0] * 7, frequency=0.1) == [float(row), 0.0]


def test_bias_needs_no_history() -> None:
    bias = {1: 2.5, "3": -100, np.int64(0): np.float32(0.5)}
    assert penalized([1.0, 1.0, 1.0, 1.0], [], logit_bias=bias) == [1.5, 3.5, 1.0, -99.0]


def test_bias_comes_first_and_frequency_last() -> None:
    """(2 - 3) is negative, so repetition multiplies: -1 * 4 - 0.5 - 0.25 * 2."""
    every = {"repetition": 4.0, "presence": 0.5, "frequency": 0.25, "logit_bias": {0: -3.0}}
    assert penalized([2.0, 2.0], [0, 0], **every) == [-5.0, 2.0]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("kind", ["repetition", "presence", "frequency"])
def test_a_window_ends_at_the_token_it_names(kind: str, window: int) -> None:
    found = penalized([8.0] * 4, [0, 1, 2], **{kind: 2.0, f"{kind}_window": window})
    changed = {token for token, value in enumerate(found) if value != 8.0}
    assert changed == set([0, 1, 2][-window:])


def test_each_penalty_has_its_own_window() -> None:
    every = {"repetition": 2.0, "presence": 1.0, "frequency": 0.25}
    own = {"repetition_window": 1, "presence_window": 3, "frequency_window": 2}
    assert penalized([8.0] * 4, [0, 1, 1], **every, **own) == [7.0, 2.5, 8.0, 8.0]


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, 0),
        ({"repetition": 1.0, "repetition_window": 9}, 0),
        ({"logit_bias": {1: 1.0}}, 0),
        ({"repetition": 1.1}, 64),
        ({"presence": -1, "presence_window": 7, "frequency_window": 90}, 7),
        ({"presence": 1, "presence_window": 7, "frequency": 1, "frequency_window": 90}, 90),
    ],
)
def test_the_window_is_the_widest_that_counts(options: dict[str, Any], window: int) -> None:
    assert Rules(Penalties(**options)).window == window


def test_a_huge_bias_decides_and_stays_finite() -> None:
    huge, factor = np.float32(1e30), np.float32(0.001)
    row = penalized([-40.0, 40.0, -INF], [0, 1], repetition=0.001, logit_bias={0: 1e30, 1: -1e30})
    assert row == [float(huge / factor), float(-huge * factor), -INF]


def test_nothing_asked_changes_nothing() -> None:
    idle = Penalties(1.0, 3, 0.0, 4, -0.0, 5, {3: 0.0, 4: 0})
    for rules in (NO_RULES, Rules(), Rules(idle), Rules(stop_tokens=frozenset({1}))):
        assert not rules.active
        assert not any(rules.acts(emitted) for emitted in range(5))
        assert applied(rules, [1.0, -INF, 3.0], [0, 1, 2]) == [1.0, -INF, 3.0]


def test_bans_without_a_stop_token_change_nothing() -> None:
    for rules in (Rules(min_tokens=3), Rules(end_tokens="banned")):
        assert not rules.active
        assert applied(rules, [1.0, 2.0]) == [1.0, 2.0]


STOPS = frozenset({1, 3})
ROW = [4.0, 5.0, 6.0, 7.0]
BANNED, ONLY = [4.0, -INF, 6.0, -INF], [-INF, 5.0, -INF, 7.0]


def test_no_stop_token_is_among_the_first_min_tokens() -> None:
    rules = Rules(stop_tokens=STOPS, min_tokens=2, most=2)
    assert [applied(rules, ROW, emitted=n) for n in range(4)] == [BANNED, BANNED, ROW, ROW]
    assert [rules.acts(n) for n in range(4)] == [True, True, False, False]


def test_banned_stop_tokens_never_come() -> None:
    for rules in (
        Rules(stop_tokens=STOPS, end_tokens="banned"),
        Rules(stop_tokens=STOPS, end_tokens="banned", min_tokens=2, most=2),
    ):
        assert all(applied(rules, ROW, emitted=n) == BANNED for n in range(4))
        assert all(rules.acts(n) for n in range(4))


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_a_required_stop_token_comes_last(most: int) -> None:
    rules = Rules(stop_tokens=STOPS, end_tokens="required", most=most)
    found = [applied(rules, ROW, emitted=n) for n in range(most)]
    assert found == [ROW] * (most - 1) + [ONLY]


def test_min_tokens_may_reach_up_to_the_required_one() -> None:
    rules = Rules(stop_tokens=STOPS, min_tokens=2, end_tokens="required", most=3)
    assert [applied(rules, ROW, emitted=n) for n in range(3)] == [BANNED, BANNED, ONLY]


def test_a_required_stop_token_is_chosen_by_its_penalized_logit() -> None:
    rules = Rules(
        Penalties(presence=3.0, logit_bias={0: 50.0}), STOPS, end_tokens="required", most=1
    )
    assert applied(rules, ROW, [3]) == [-INF, 5.0, -INF, 4.0]


def test_a_stop_token_outside_the_vocabulary_touches_nothing() -> None:
    outside = frozenset({1, 4, 10**6, 2**40, -1})
    rules = Rules(stop_tokens=outside, end_tokens="banned")
    rules.check_vocab(4)
    assert applied(rules, ROW) == [4.0, -INF, 6.0, 7.0]


def test_an_array_made_from_a_row_and_the_row_both_stay() -> None:
    """mlx-lm's processors write into what they are given, and a pass's rows share one buffer."""
    logits = mx.array(np.arange(12, dtype=np.float32).reshape(3, 4))
    mx.eval(logits)
    view, before = np.asarray(logits), np.array(logits)
    rules = Rules(
        Penalties(2.0, 9, 1.0, 9, 0.5, 9, {0: 1.0}), STOPS, min_tokens=1, end_tokens="banned"
    )
    row = logits[1:2]
    first = np.array(rules.apply(row, [0, 1, 2, 3], 0))
    assert np.array_equal(view, before)
    assert np.array_equal(np.array(row), before[1:2])
    assert np.array_equal(np.array(rules.apply(row, [0, 1, 2, 3], 0)), first)


def test_the_bias_is_a_copy_with_plain_ids() -> None:
    given_bias: dict[Any, Any] = {"12": 1, np.int32(3): np.float64(2.0), 0: Fraction(1, 2)}
    penalties = Penalties(logit_bias=given_bias)
    given_bias[5] = 1.0
    assert penalties.logit_bias == {12: 1.0, 3: 2.0, 0: 0.5}
    assert {type(token) for token in penalties.logit_bias} == {int}
    assert {type(value) for value in penalties.logit_bias.values()} == {float}


def test_numbers_of_numpy_are_taken() -> None:
    taken = Penalties(np.float32(2), np.int64(3), np.int8(1), np.int64(3))  # type: ignore[arg-type]
    assert taken == Penalties(2.0, 3, 1.0, 3)
    assert type(taken.repetition) is type(taken.presence) is float
    assert type(taken.repetition_window) is int


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition", 0.001), ("repetition", 1000), ("presence", -100), ("frequency", 100.0)],
)
def test_the_ends_of_a_range_belong_to_it(field: str, value: Any) -> None:
    assert getattr(Penalties(**{field: value}), field) == value


NO_NUMBER = (NAN, INF, -INF, True, None, "1.1", [1.0], 1j, 10**400, -(10**5000), Fraction(10**400))
WRONG: list[tuple[str, str, Any]] = [
    *(("repetition_penalty", "repetition", v) for v in (0, 0.0, -0.0, -1, 0.0009, 1001, 1e9)),
    *(("presence_penalty", "presence", v) for v in (-100.1, 101, 1e9)),
    *(("frequency_penalty", "frequency", v) for v in (-100.1, 101, 1e9)),
    *((f"{n}_penalty", n, v) for n in ("repetition", "presence", "frequency") for v in NO_NUMBER),
    *(
        (f"{n}_window", f"{n}_window", v)
        for n in ("repetition", "presence", "frequency")
        for v in (0, -1, 1.0, 2.5, True, None, "64", NAN, -(10**5000))
    ),
    *(("logit_bias", "logit_bias", v) for v in (None, 3, "{}", [(1, 2.0)], {1, 2})),
    *(
        ("logit_bias id", "logit_bias", {key: 1.0})
        for key in (-1, 1.5, 2.0, True, None, (1,), b"1")
    ),
    *(
        ("logit_bias id", "logit_bias", {key: 1.0})
        for key in (
            "",
            "-1",
            "+1",
            "01",
            " 1",
            "1 ",
            "1\n",
            "1_0",
            "1.0",
            "x",
            "²",
            "٣",
            "9" * 6000,
        )
    ),
    *(("logit_bias of token 4", "logit_bias", {4: v}) for v in (*NO_NUMBER, 1.1e30, -1e31)),
]


@pytest.mark.parametrize(("named", "field", "value"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_value_is_named(named: str, field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        Penalties(**{field: value})
    sentence = str(caught.value)
    assert sentence.startswith(f"{named} is ")
    assert ": give " in sentence and sentence.endswith(".")
    assert len(sentence) < 200


def test_an_id_given_twice_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^logit_bias names token 7 twice, .*: give .*\.$"):
        Penalties(logit_bias={7: 1.0, "7": 1.0})  # type: ignore[dict-item]


@pytest.mark.parametrize("token", [12, 2**31, 2**70])
def test_a_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    rules = Rules(Penalties(logit_bias={3: 1.0, token: 1.0}))
    with pytest.raises(
        RequestError, match=rf"^logit_bias names token {token}, outside .* of 12: give .*\.$"
    ):
        rules.check_vocab(12)
    Rules(Penalties(logit_bias={3: 1.0, 11: 1.0})).check_vocab(12)


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "3", NAN])
def test_a_wrong_least_count_is_named(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^min_tokens is .*: give .*\.$"):
        Rules(min_tokens=value)


@pytest.mark.parametrize(
    "value", ["", "Banned", "none", None, True, 1, ["banned"], [10**5000], "x" * 500]
)
def test_another_word_for_end_tokens_is_named(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^end_tokens is .*: give 'allowed', .*\.$") as caught:
        Rules(end_tokens=value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_tokens": 4, "most": 3}, "min_tokens is 4, and at most 3"),
        ({"min_tokens": 1, "most": 0}, "min_tokens is 1, and at most 0"),
        ({"end_tokens": "required", "most": 9}, "no stop token to end by"),
        ({"end_tokens": "required", "stop_tokens": STOPS}, "no limit says"),
        (
            {"end_tokens": "required", "stop_tokens": STOPS, "most": 3, "min_tokens": 3},
            "at most 2 tokens before the stop token, and min_tokens is 3",
        ),
    ],
)
def test_wishes_that_exclude_each_other_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        Rules(**options)


def test_a_required_stop_token_must_be_in_the_vocabulary() -> None:
    rules = Rules(stop_tokens=frozenset({50, 60}), end_tokens="required", most=3)
    rules.check_vocab(51)
    with pytest.raises(RequestError, match="no stop token to end by"):
        rules.check_vocab(50)


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_a_window_longer_than_any_text_is_all_of_it(name: str) -> None:
    row, history = mx.array([[1.0, -2.0, 0.5, 3.0]]), [0, 1, 1, 3]
    value = 1.5
    whole = Penalties(**{name: value, f"{name}_window": len(history)})
    for window in (2**31, 2**32, 2**64, 10**30):
        longer = Penalties(**{name: value, f"{name}_window": window})
        assert longer.apply(row, history).tolist() == whole.apply(row, history).tolist()
