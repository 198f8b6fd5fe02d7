"""A distribution over tokens, as the target and the drafter both give it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Distribution:
    """Probabilities of the tokens in the support; every other token has probability zero.

    ids:   int64 [n], distinct token ids.
    probs: float64 [n], non-negative, summing to one.
    """

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    @classmethod
    def point(cls, token: int) -> "Distribution":
        """All mass on one token: what greedy decoding uses for both p and q."""
        return cls(np.array([token], np.int64), np.ones(1))

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(self.ids, kind="stable")

    def of(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Probability of each of `tokens` (int64 [m]) as float64 [m]."""
        ranked = self.ids[self._order]
        at = np.searchsorted(ranked, tokens)
        at = np.minimum(at, len(ranked) - 1)
        return np.where(ranked[at] == tokens, self.probs[self._order][at], 0.0)

    def draw(self, u: float) -> int:
        """The token at quantile `u` in [0, 1) of the distribution, in the order of `ids`.

        Inverse CDF: the first token whose running sum exceeds u * total; entries of zero
        probability are never drawn, and the last positive one answers for rounding at the end.
        """
        running = np.cumsum(self.probs)
        at = int(np.searchsorted(running, u * running[-1], side="right"))
        at = min(at, int(np.flatnonzero(self.probs)[-1]))
        return int(self.ids[at])
