"""From scores of all [predecessor, candidate] pairs to one path of drafted tokens."""

import math

import numpy as np
from numpy.typing import NDArray

from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.errors import DraftError

Scores = NDArray[np.float32]
"""[positions, k, k]: the score of candidate b after predecessor a; any float dtype."""

Ids = NDArray[np.int32]
"""[positions, k]: token ids of the candidates, best first."""


def greedy_walk(scores: Scores, ids: Ids, vocab_size: int) -> Proposal:
    """Take the best candidate at every position, given the one taken before.

    The first position starts from predecessor 0. Ties go to the smallest token id, then to the
    smallest index. Raises DraftError for no positions, for a non-finite score on a row that the
    walk visits (other rows may hold anything), and for an id outside the vocabulary anywhere.
    Source: DFlash2, selector.
    """
    _check_ids(ids, vocab_size)
    tokens: list[int] = []
    taken = 0
    for position in range(len(ids)):
        row = _finite_row(scores, position, taken)
        tied = np.flatnonzero(row == row.max())
        taken = int(tied[np.argmin(ids[position, tied])])
        tokens.append(int(ids[position, taken]))
    return Proposal.certain(tokens)


def sampled_walk(
    scores: Scores, ids: Ids, vocab_size: int, temperature: float, uniform: Uniform
) -> Proposal:
    """Draw a candidate at every position from q, given the one drawn before.

    q is the softmax of the visited row over `temperature`, in float64, over the candidates best
    first; one uniform a position. Raises DraftError as `greedy_walk` does, and for a temperature
    that is not finite and positive or an id that a position holds twice.
    """
    if not 0 < temperature < math.inf:
        raise DraftError(
            f"A draft cannot be drawn at temperature {temperature}: "
            "pass a finite positive one, or 0 for the greedy walk."
        )
    _check_ids(ids, vocab_size)
    _check_distinct(ids)
    tokens: list[int] = []
    q: list[Distribution] = []
    taken = 0
    for position in range(len(ids)):
        chance = _chance(scores, ids, position, taken, temperature)
        token = chance.draw(uniform())
        taken = int(np.flatnonzero(ids[position] == token)[0])
        tokens.append(token)
        q.append(chance)
    return Proposal(tokens, q)


def chances_along(scores: Scores, ids: Ids, tokens: list[int]) -> list[Distribution]:
    """What `sampled_walk` would draw from at temperature 1 at each position of the path `tokens`.

    Raises DraftError as it does, for the rows that the path visits.
    """
    _check_distinct(ids)
    chances: list[Distribution] = []
    taken = 0
    for position, token in enumerate(tokens):
        chances.append(_chance(scores, ids, position, taken, 1.0))
        taken = int(np.flatnonzero(ids[position] == token)[0])
    return chances


def _chance(
    scores: Scores, ids: Ids, position: int, predecessor: int, temperature: float
) -> Distribution:
    row = _finite_row(scores, position, predecessor).astype(np.float64)
    # The difference first: a tiny temperature may overflow, but only towards a weight of 0.
    with np.errstate(over="ignore"):
        weights = np.exp((row - row.max()) / temperature)
    return Distribution(ids[position].astype(np.int64), weights / weights.sum())


def _finite_row(scores: Scores, position: int, predecessor: int) -> Scores:
    row = scores[position, predecessor]
    if not np.isfinite(row).all():
        bad = int(np.flatnonzero(~np.isfinite(row))[0])
        raise DraftError(
            f"Draft position {position} has the score {row[bad]} for candidate {bad}: "
            "check the drafter's weights and the target's features for non-finite values."
        )
    return row


def _check_ids(ids: Ids, vocab_size: int) -> None:
    if not len(ids):
        raise DraftError("A draft of 0 positions was asked for: a draft has at least one.")
    # Written so that fractions and NaN are refused too, should ids come as floats.
    malformed = ~((ids >= 0) & (ids < vocab_size) & (ids == np.floor(ids)))
    if malformed.any():
        position, candidate = (int(at) for at in np.argwhere(malformed)[0])
        raise DraftError(
            f"Draft position {position} has the id {ids[position, candidate]} for candidate "
            f"{candidate}, outside the vocabulary 0..{vocab_size - 1}: "
            "check that drafter and target belong together."
        )


def _check_distinct(ids: Ids) -> None:
    ranked = np.sort(ids, axis=1)
    repeated = np.argwhere(ranked[:, 1:] == ranked[:, :-1])
    if len(repeated):
        position, at = (int(i) for i in repeated[0])
        raise DraftError(
            f"Draft position {position} has the id {ranked[position, at]} twice among its "
            "candidates, so q is not a distribution: check the candidate selection."
        )
