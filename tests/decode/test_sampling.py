"""What a request's settings make of a row of logits, against the definition, token by token."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from lse_mlx.decode.sampling import Sampling, TargetRows
from lse_mlx.errors import RequestError, TargetError
from tests.decode.definition import Undecided, probabilities

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
def test_values_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=rf"^{field} is .*: give .*\.$"):
        Sampling(**{field: value})


def test_rows_are_made_one_at_a_time() -> None:
    """A walk stops at the first rejection, so a row behind it may hold anything."""
    rows = TargetRows(mx.array([[0.0, 2.0], [NAN, 0.0]]), Sampling())
    assert len(rows) == 2
    assert rows[0].draw(0.5) == 1
    with pytest.raises(TargetError):
        rows[1]
