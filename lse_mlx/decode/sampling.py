"""The target's distribution over the next token: what a request's settings make of a row of logits."""

import sys
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.decode.values import check_integer, check_number
from lse_mlx.distribution import Distribution
from lse_mlx.errors import TargetError

MAX_FLOAT = sys.float_info.max
SMALLEST = sys.float_info.min


@dataclass(frozen=True)
class Sampling:
    """How a request chooses among tokens; the same settings serve plain and speculative decoding.

    temperature: 0 is greedy; top_k: 0 keeps all; top_p in (0, 1], 1 keeps all; min_p in [0, 1],
    0 keeps all. Raises RequestError for a value outside these ranges.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_number(
            "temperature", self.temperature, 0, MAX_FLOAT, "0 for greedy or a number above"
        )
        check_integer("top_k", self.top_k, 0, "0 to keep all tokens, or a count")
        check_number("top_p", self.top_p, SMALLEST, 1, "a number above 0 and at most 1")
        check_number("min_p", self.min_p, 0, 1, "a number from 0 to 1")

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        """p for one row of logits (fp32 [vocab]).

        temperature, then top-k, then top-p over the renormalized rest, then min-p relative to the
        likeliest token, then renormalized; in float64. Equal logits rank by token id, lowest first.
        Raises TargetError for NaN or +inf, or when no logit is finite.
        """
        best = int(np.argmax(logits))  # of equal values the lowest id; a NaN comes before all
        if not np.isfinite(logits[best]):
            raise TargetError(
                f"The target's logits hold {logits[best]} at token {best}: "
                "no token can be chosen from them; check the checkpoint's weights."
            )
        if self.temperature == 0:
            return Distribution.point(best)
        ids = self._top_k_ids(logits)
        below = logits[ids].astype(np.float64) - float(logits[best])
        with np.errstate(over="ignore"):  # a tiny temperature makes it -inf, which has weight 0
            weights = np.exp(below / self.temperature)
        probs = weights / weights.sum()
        if self.top_p < 1:
            # Tokens rarer than this weigh less than 1 - top_p together, so all of them lie behind
            # what stays: a large vocabulary need not be sorted.
            likely = probs >= 0.5 * (1 - self.top_p) / len(probs)
            ids, probs = ids[likely], probs[likely]
            order = np.lexsort((ids, -logits[ids]))
            ids, probs = ids[order], probs[order]
            # A token stays while the mass before it is below top_p, so the first always stays.
            keep = int(np.searchsorted(np.cumsum(probs) - probs, self.top_p, side="left"))
            ids, probs = ids[:keep], probs[:keep] / probs[:keep].sum()
        if self.min_p > 0:
            keep_mask = probs >= self.min_p * probs.max()
            ids, probs = ids[keep_mask], probs[keep_mask] / probs[keep_mask].sum()
        return Distribution(ids, probs)

    def _top_k_ids(self, logits: NDArray[np.float32]) -> NDArray[np.int64]:
        """The ids that top-k keeps: the likeliest first, or all of them in id order."""
        if not 0 < self.top_k < len(logits):
            return np.arange(len(logits))
        # Every id at least as good as the k-th value: ties at the border are cut by id below.
        border = len(logits) - int(self.top_k)
        candidates = np.flatnonzero(logits >= np.partition(logits, border)[border])
        return candidates[np.lexsort((candidates, -logits[candidates]))][: int(self.top_k)]


class TargetRows:
    """The target's distributions for the rows of a pass, each made when it is asked for.

    The walk over a proposal stops at the first rejection, so most rows are never needed.
    """

    def __init__(self, logits: mx.array, sampling: Sampling):
        """logits: fp32 [rows, vocab]; copied to the host once."""
        self._logits = np.asarray(logits)
        self._sampling = sampling

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, row: int) -> Distribution:
        return self._sampling.distribution(self._logits[row])
