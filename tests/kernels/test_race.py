"""Races: who may win, by a scripted timer. Nothing here measures a time."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.choices import STOCK, Choices
from lse_mlx.kernels.race import (
    MARGIN,
    PASSES,
    ROUNDS,
    RaceResult,
    compare,
    device_timer,
    race,
    race_all,
    winners,
)
from tests.kernels.track import Track
from tests.tiny_models import on_cpu


@pytest.fixture(autouse=True)
def cpu():
    with on_cpu():
        yield


def test_the_fastest_form_wins_and_times_are_of_one_call():
    result = Track({STOCK: 8.0, "simd": 6.0, "matrix": 4.0}).race()
    assert result.winner == "matrix"
    calls = PASSES * 2
    assert result.microseconds == {
        STOCK: 8e6 / calls,
        "simd": 6e6 / calls,
        "matrix": 4e6 / calls,
    }
    assert not result.refused


@pytest.mark.parametrize(
    ("own", "winner"),
    [
        (10.0, STOCK),
        (10.0 * (1 - MARGIN), STOCK),
        (9.99 * (1 - MARGIN), "simd"),
        (11.0, STOCK),
    ],
)
def test_stock_serves_unless_it_is_beaten_by_the_margin(own: float, winner: str):
    assert Track({STOCK: 10.0, "simd": own}).race().winner == winner


def test_a_slow_round_and_the_first_one_do_not_decide():
    slow_once = [900.0, 4.0, 90.0, 4.0, 4.0, 4.0]
    result = Track({STOCK: 5.0, "simd": slow_once}).race()
    assert result.winner == "simd"
    assert result.microseconds["simd"] == 4e6 / (PASSES * 2)


def test_forms_take_turns_after_a_round_that_does_not_count():
    track = Track({STOCK: 3.0, "simd": 2.0, "matrix": 1.0})
    track.race()
    rounds = [track.runs[at : at + 3] for at in range(0, len(track.runs), 3)]
    assert len(rounds) == 1 + ROUNDS
    assert all(sorted(one) == ["matrix", "simd", STOCK] for one in rounds)
    assert {one[0] for one in rounds[1:]} == {STOCK, "simd", "matrix"}


def test_a_chain_goes_through_all_weights_and_each_call_reads_the_one_before():
    track = Track({STOCK: 1.0, "simd": 1.0})
    contest = track.contest(weights=3)
    chains: list[mx.array] = []

    def timer(chain: Callable[[], mx.array]) -> float:
        track.calls.clear()
        chains.append(chain())
        assert [weight for _, weight, _ in track.calls] == [0, 1, 2] * PASSES
        inputs = [x for _, _, x in track.calls]
        assert all(a is not b for a, b in pairwise(inputs))
        assert all(np.array_equal(np.array(x), np.array(contest.start)) for x in inputs)
        return 1.0

    race(contest, track.choices, timer)
    assert len(chains) == 2 * (1 + ROUNDS)


def test_a_form_with_wrong_numbers_loses_and_is_reported():
    result = Track({STOCK: 9.0, "simd": 1.0, "matrix": 5.0}, wrong={"simd": 0.01}).race()
    assert result.winner == "matrix"
    assert "simd" not in result.microseconds
    assert "differs from stock by 0.01" in result.refused["simd"]
    assert result.errors["simd"] == pytest.approx(0.01, rel=1e-3)
    assert result.errors["matrix"] < 1e-6


def test_a_form_that_gives_no_numbers_loses():
    result = Track({STOCK: 9.0, "simd": 1.0}, wrong={"simd": float("nan")}).race()
    assert result.winner == STOCK
    assert result.refused.keys() == {"simd"}


def test_a_form_that_does_not_run_loses():
    result = Track({STOCK: 9.0, "simd": 1.0, "matrix": 5.0}, broken="simd").race()
    assert result.winner == "matrix"
    assert result.refused == {"simd": "The kernel product does not run on this device."}


Seconds = dict[str, float | Sequence[float]]
FAILURES = [RuntimeError("GPU timeout. Sorry."), ValueError("no such shape"), MemoryError()]


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_a_form_that_fails_loses_and_is_reported(error: Exception):
    seconds: Seconds = {STOCK: 9.0, "simd": 1.0, "matrix": 5.0}
    lost = {"simd": error}
    for track in (Track(seconds, failing=lost), Track(seconds, stopped=lost)):
        result = track.race()
        assert result.winner == "matrix"
        assert result.microseconds.keys() == {STOCK, "matrix"}
        assert result.refused.keys() == {"simd"}
        assert result.refused["simd"].startswith("fails here (")
        assert result.held


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_where_stock_fails_nothing_is_raced(error: Exception):
    seconds: Seconds = {STOCK: 9.0, "simd": 1.0}
    lost = {STOCK: error}
    for track in (Track(seconds, failing=lost), Track(seconds, stopped=lost)):
        result = track.race()
        assert not result.held
        assert (result.winner, result.microseconds) == (STOCK, {})
        assert result.refused[STOCK].startswith("fails here (")
        assert winners([result]) == {f"product {result.shape}": STOCK}, "and none for exact"


def test_an_interrupt_is_no_failure():
    def timer(chain: Callable[[], mx.array]) -> float:
        raise KeyboardInterrupt

    track = Track({STOCK: 9.0, "simd": 1.0})
    with pytest.raises(KeyboardInterrupt):
        race(track.contest(), track.choices, timer)


@pytest.mark.parametrize("no_time", [float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("round_of_it", range(1 + ROUNDS))
def test_what_is_no_time_never_wins(no_time: float, round_of_it: int):
    times = [1.0] * (1 + ROUNDS)
    times[round_of_it] = no_time
    result = Track({STOCK: 9.0, "simd": times, "matrix": 5.0}).race()
    assert result.winner == "matrix"
    assert result.microseconds.keys() == {STOCK, "matrix"}
    assert "is none" in result.refused["simd"]
    assert winners([result])["product *x4x4 4-bit"] == "matrix"


def strict(result: RaceResult) -> dict[str, Any]:
    return json.loads(json.dumps(result.as_dict(), allow_nan=False))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_result_is_json_whatever_a_form_gave(bad: float):
    result = Track({STOCK: 9.0, "simd": 1.0}, wrong={"simd": bad}).race()
    assert strict(result)["errors"] == {"simd": None}
    assert strict(result)["refused"] == {"simd": "differs from stock in what is finite"}
    odd = replace(result, microseconds={STOCK: 1.0, "matrix": bad})
    assert strict(odd)["microseconds"] == {STOCK: 1.0, "matrix": None}


def test_a_contest_allows_what_it_can_have_found():
    track = Track({STOCK: 9.0, "simd": 1.0, "matrix": 5.0})
    contest, found = track.contest(), track.race()
    assert contest.allows(found)
    lost = Track({STOCK: 9.0, "simd": 1.0, "matrix": 5.0}, wrong={"simd": 0.1}).race()
    assert contest.allows(lost)
    for absurd in (
        replace(found, winner="matrix"),
        replace(found, winner=STOCK),
        replace(found, errors={"simd": 99.0, "matrix": 0.0}),
        replace(found, errors={"simd": float("nan"), "matrix": 0.0}),
        replace(found, errors={"matrix": 0.0}),
        replace(found, microseconds={STOCK: 9.0, "simd": 1.0}),
        replace(found, microseconds={**found.microseconds, "gone": 9.0}),
        replace(found, refused={"simd": "wrong"}),
        replace(found, refused={"gone": "wrong"}),
    ):
        assert not contest.allows(absurd)


def test_numbers_are_compared_without_a_race():
    track = Track({STOCK: 9.0, "simd": 1.0, "matrix": 5.0}, wrong={"simd": 0.01})
    result = compare(track.contest(), track.choices)
    assert (result.winner, result.microseconds) == (STOCK, {})
    assert result.refused.keys() == {"simd"}
    assert result.errors.keys() == {"simd", "matrix"}
    assert track.runs == []


def test_races_end_when_the_time_is_over():
    track = Track({STOCK: 2.0, "simd": 1.0})
    contests = [track.contest(f"{rows}x4x4 4-bit") for rows in range(1, 9)]
    now, told = iter([0.0, 1.0, 2.0, 30.0]), []
    results = race_all(
        contests,
        track.choices,
        30.0,
        lambda done, result: told.append((done, result.shape)),
        track.timer,
        lambda: next(now),
    )
    assert [r.shape for r in results] == ["1x4x4 4-bit", "2x4x4 4-bit"]
    assert told == [(1, "1x4x4 4-bit"), (2, "2x4x4 4-bit")]


def result(rows: int, winner: str, refused: str = "", **microseconds: float) -> RaceResult:
    return RaceResult(
        "product",
        f"{rows}x4x4 4-bit",
        winner,
        microseconds,
        {form: 0.0 for form in microseconds if form != STOCK},
        {refused: "wrong"} if refused else {},
    )


def test_winners_are_one_a_shape_and_one_for_all_rows():
    found = winners(
        [
            result(1, "simd", stock=9, simd=5, matrix=8),
            result(8, STOCK, stock=3, simd=10, matrix=4),
        ]
    )
    assert found == {
        "product 1x4x4 4-bit": "simd",
        "product 8x4x4 4-bit": STOCK,
        "product *x4x4 4-bit": "matrix",
    }
    exact = Choices("auto", exact=True, winners=found)
    assert exact.form("product", "512x4x4 4-bit", ("simd", "matrix")) == "matrix"
    assert Choices("auto", winners=found).form("product", "1x4x4 4-bit", ("simd",)) == "simd"


def test_a_form_refused_at_one_row_count_is_not_the_exact_one():
    found = winners(
        [
            result(1, "simd", stock=9, simd=5, matrix=8),
            result(8, STOCK, "simd", stock=3, matrix=4),
        ]
    )
    assert found["product *x4x4 4-bit"] == "matrix"


def test_forms_that_were_only_compared_count_for_exact_in_their_order():
    errors = {"simd": 0.0, "matrix": 0.0}
    compared = RaceResult("product", "8x4x4 4-bit", STOCK, {}, errors, {})
    assert winners([compared])["product *x4x4 4-bit"] == "simd"
    raced = result(1, "matrix", stock=9, simd=8, matrix=5)
    assert winners([raced, compared])["product *x4x4 4-bit"] == "matrix"
    wrong = replace(compared, refused={"simd": "wrong"})
    assert winners([wrong])["product *x4x4 4-bit"] == "matrix"


def test_a_real_chain_is_computed():
    track = Track({STOCK: 1.0, "simd": 1.0})
    result = race(track.contest(), track.choices, device_timer)
    assert result.microseconds.keys() == {STOCK, "simd"}
    assert result.winner in (STOCK, "simd")
