"""The chi-square test against SciPy's."""

import numpy as np
import pytest
from scipy.stats import chi2, chisquare

from lse_mlx.qualify.chi_square import p_value, survival


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 26, 63, 200])
def test_survival_is_scipys(freedom: int) -> None:
    for statistic in np.linspace(0.01, 400, 60):
        assert survival(float(statistic), freedom) == pytest.approx(
            float(chi2.sf(statistic, freedom)), rel=1e-10, abs=1e-300
        )


def test_no_deviation_is_certain_and_no_freedom_is_no_test() -> None:
    assert survival(0.0, 5) == 1.0
    assert survival(9.0, 0) == 1.0


def test_p_is_scipys_where_every_outcome_is_expected_often() -> None:
    counts, chances = {"a": 40, "b": 25, "c": 35}, {"a": 0.5, "b": 0.2, "c": 0.3}
    expected = chisquare([40, 25, 35], [50, 20, 30]).pvalue
    assert p_value(counts, chances) == pytest.approx(float(expected), rel=1e-12)


def test_rare_outcomes_make_one_cell() -> None:
    chances = {"a": 0.9, "b": 0.04, "c": 0.03, "d": 0.03}
    counts = {"a": 85, "b": 9, "c": 6}
    expected = chisquare([85, 15], [90, 10]).pvalue
    assert p_value(counts, chances) == pytest.approx(float(expected), rel=1e-12)


def test_too_few_rare_ones_join_the_least_expected_cell() -> None:
    chances = {"a": 0.9, "b": 0.08, "c": 0.02}
    counts = {"a": 88, "b": 9, "c": 3}
    expected = chisquare([88, 12], [90, 10]).pvalue
    assert p_value(counts, chances) == pytest.approx(float(expected), rel=1e-12)


def test_the_impossible_seen_is_no_chance() -> None:
    assert p_value({"a": 99, "b": 1}, {"a": 1.0}) == 0.0
    assert p_value({"a": 99, "b": 1}, {"a": 1.0, "b": 0.0}) == 0.0


def test_one_outcome_says_nothing() -> None:
    assert p_value({"a": 100}, {"a": 1.0}) == 1.0


def test_right_counts_give_every_p_alike() -> None:
    """Of a thousand samples of the law itself, about a tenth are below 0.1."""
    rng = np.random.default_rng(5)
    law = {key: float(c) for key, c in enumerate(rng.dirichlet([1.0] * 6))}
    low = 0
    for _ in range(1000):
        drawn = rng.multinomial(400, list(law.values()))
        low += p_value(dict(enumerate(drawn.tolist())), law) < 0.1
    assert 60 <= low <= 140
