"""Whether counts are those of an exact distribution: Pearson's chi-square test."""

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

LEAST_EXPECTED = 5.0
"""Outcomes that are expected fewer times make one cell together: the test's law holds for no less."""


def p_value(counts: Mapping[Key, int], chances: Mapping[Key, float]) -> float:
    """How likely counts at least as far from `chances` are, if those are right.

    counts: how often each outcome was seen; chances: the exact probability of every outcome, in sum 1.
    0 where an outcome was seen that has no chance; 1 where all outcomes make one cell, which says
    nothing. Source: Pearson 1900.
    """
    total = sum(counts.values())
    if any(count and chances.get(key, 0.0) <= 0 for key, count in counts.items()):
        return 0.0
    often = {key: c * total for key, c in chances.items() if c * total >= LEAST_EXPECTED}
    cells = [(counts.get(key, 0), expected) for key, expected in often.items()]
    rest = total - sum(expected for _, expected in cells)
    seen = total - sum(count for count, _ in cells)
    if rest >= LEAST_EXPECTED or not cells:
        cells.append((seen, rest))
    elif seen or rest > 0:  # too few for a cell of their own: with the least expected one
        least = min(range(len(cells)), key=lambda i: cells[i][1])
        cells[least] = (cells[least][0] + seen, cells[least][1] + rest)
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return survival(statistic, len(cells) - 1)


def survival(statistic: float, freedom: int) -> float:
    """P(X >= statistic) of a chi-square variable of `freedom` degrees, a whole number from 0.

    The finite sums of Abramowitz and Stegun 26.4.4 and 26.4.5, each term as a logarithm so that none
    overflows. Degrees of 0 are no test at all: 1.
    """
    half = statistic / 2
    if freedom == 0 or half <= 0:
        return 1.0
    odd = freedom % 2
    powers = [i + odd / 2 for i in range(freedom // 2)]
    terms = [math.exp(a * math.log(half) - half - math.lgamma(a + 1)) for a in powers]
    return min(1.0, math.fsum(terms) + (math.erfc(math.sqrt(half)) if odd else 0.0))
