"""A distribution over tokens: looking up, and drawing by the inverse of its running sum."""

from bisect import bisect_right
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lse_mlx.distribution import Distribution

weights = st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any)


def made(counts: list[int], ids: list[int]) -> Distribution:
    return Distribution(np.array(ids), np.array(counts) / sum(counts))


@given(counts=weights, data=st.data())
def test_a_quantile_gives_the_first_token_whose_running_sum_exceeds_it(
    counts: list[int], data: st.DataObject
) -> None:
    ids = data.draw(st.permutations(range(40)))[: len(counts)]
    at = data.draw(st.integers(0, 16 * sum(counts) - 1))
    u = (at + 0.5) / (16 * sum(counts))  # never on a border
    first = bisect_right([Fraction(c) for c in accumulate(counts)], Fraction(u) * sum(counts))
    assert made(counts, ids).draw(u) == ids[first]


@pytest.mark.parametrize("u", [0.0, 1e-300, 0.25, 0.5, 0.75, 1 - 2**-53])
def test_a_zero_entry_is_never_drawn(u: float) -> None:
    assert made([0, 1, 0, 0, 3, 0], [9, 8, 7, 6, 5, 4]).draw(u) == (8 if u < 0.25 else 5)


def test_the_last_positive_entry_answers_for_rounding_at_the_end() -> None:
    ten = Distribution(np.arange(12), np.array([0.1] * 10 + [0.0] * 2))
    assert ten.draw(1 - 2**-53) == 9
    assert ten.draw(1.0) == 9


def test_the_order_of_the_ids_is_the_order_of_drawing() -> None:
    assert [made([1, 1], [5, 2]).draw(u) for u in (0.1, 0.6)] == [5, 2]


@given(counts=weights, data=st.data())
def test_looking_up_gives_each_tokens_probability_and_zero_elsewhere(
    counts: list[int], data: st.DataObject
) -> None:
    ids = data.draw(st.permutations(range(40)))[: len(counts)]
    known = {t: c / sum(counts) for t, c in zip(ids, counts, strict=True)}
    asked = np.arange(-3, 45)
    assert made(counts, ids).of(asked).tolist() == [known.get(t, 0.0) for t in asked.tolist()]


def test_a_point_is_all_on_one_token() -> None:
    point = Distribution.point(7)
    assert point.of(np.array([6, 7, 8])).tolist() == [0, 1, 0]
    assert {point.draw(u) for u in (0.0, 0.5, 1 - 2**-53)} == {7}
