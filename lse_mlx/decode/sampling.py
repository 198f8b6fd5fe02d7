"""The target's distribution over the next token: what a request's settings make of a row of logits."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.decode.rules import NO_RULES, Rules
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
        for name in ("temperature", "top_p", "min_p"):  # a fraction is a number too
            object.__setattr__(self, name, float(getattr(self, name)))

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        """p for one row of logits (fp32 [vocab]).

        temperature, then top-k, then top-p over the renormalized rest, then min-p relative to the
        likeliest token, then renormalized; in float64. Equal logits rank by token id, lowest first.
        Raises TargetError for NaN or +inf, or when no logit is finite.
        """
        best = check_row(logits)
        if self.temperature == 0:
            return Distribution.point(best)
        # Where top-k cuts nothing, no order is needed, and the ids stay as they are.
        cuts = 0 < self.top_k < len(logits)
        ids = likeliest(logits, int(self.top_k)) if cuts else np.arange(len(logits))
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


def check_row(logits: NDArray[np.float32]) -> int:
    """The likeliest token of a row, of equals the lowest id.

    Raises TargetError for NaN or +inf, or when no logit is finite.
    """
    best = int(np.argmax(logits))  # a NaN comes before all
    if not np.isfinite(logits[best]):
        raise TargetError(
            f"The target's logits hold {logits[best]} at token {best}: "
            "no token can be chosen from them; check the checkpoint's weights."
        )
    return best


def likeliest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the `count` best logits, best first, equal ones by id; all where there are fewer."""
    if count == 0:
        return np.empty(0, np.int64)
    # Every id at least as good as the count-th value: ties at the border are cut by id below.
    border = max(0, len(logits) - count)
    candidates = np.flatnonzero(logits >= np.partition(logits, border)[border])
    return candidates[np.lexsort((candidates, -logits[candidates]))][:count]


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was among all that could have been chosen in its place.

    Log-probabilities are natural, of the whole row after bias, penalties and bans, at temperature 1
    and before temperature, top-k, top-p and min-p, so they do not depend on those settings.

    token:   the token's id
    logprob: its log-probability
    top:     the likeliest tokens with theirs: best first, equal logits by id, only finite ones
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


class TargetRows:
    """The target's distributions for the rows of a pass, each made when it is asked for.

    The walk over a proposal stops at the first rejection, so most rows are never needed.
    """

    def __init__(
        self,
        logits: mx.array,
        sampling: Sampling,
        rules: Rules = NO_RULES,
        read: Sequence[int] = (),
        emitted: int = 0,
    ):
        """logits: fp32 [rows, vocab]; copied to the host once.

        rules:   what the request asks of a row before a token is chosen
        read:    the tokens read up to and including the last row's, the last `rules.window + rows`
                 or all; row i's history ends by the token that row i read
        emitted: how many tokens of the reply are emitted before row 0's answer
        """
        self._device_logits = logits
        self._logits = np.asarray(logits)
        self._sampling = sampling
        self._rules = rules
        self._read = read
        self._emitted = emitted
        self._ruled: dict[int, NDArray[np.float32]] = {}
        if rules.active:
            rules.check_vocab(self._logits.shape[1])

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, row: int) -> Distribution:
        """The distribution that row `row`'s answer is drawn from. Raises TargetError as `row` does."""
        return self._sampling.distribution(self.row(row))

    def row(self, row: int) -> NDArray[np.float32]:
        """Row `row` (0 to rows - 1) as a token is chosen from it: fp32 [vocab] after the rules.

        Raises TargetError where the rules leave no token to choose, or make a logit infinite, and
        for NaN or +inf in the target's own logits, which a rule could hide.
        """
        if not self._rules.acts(self._emitted + row):
            return self._logits[row]
        if row not in self._ruled:
            self._ruled[row] = self._apply_rules(row)
        return self._ruled[row]

    def logprob(self, row: int, token: int, top: int) -> TokenLogprob:
        """Log-probabilities of row `row`: of `token`, and of the `top` likeliest; in float64."""
        logits = self.row(row)
        shifted = logits.astype(np.float64) - float(logits[check_row(logits)])
        norm = float(np.log(np.exp(shifted).sum()))
        best = [int(t) for t in likeliest(logits, top) if np.isfinite(logits[t])]
        listed = [(t, float(shifted[t]) - norm) for t in best]
        return TokenLogprob(token, float(shifted[token]) - norm, listed)

    def _apply_rules(self, row: int) -> NDArray[np.float32]:
        check_row(self._logits[row])
        end = len(self._read) - len(self) + 1 + row
        if self._rules.window and end < 1:
            raise ValueError(f"{len(self._read)} tokens are not the history of {len(self)} rows")
        history = list(self._read[max(0, end - self._rules.window) : max(0, end)])
        emitted = self._emitted + row
        ruled = self._rules.apply(self._device_logits[row : row + 1], history, emitted)
        logits = np.asarray(ruled)[0]
        best = logits.max()
        if best == -np.inf and self._rules.restricts(emitted):
            raise TargetError(
                f"The request's bans leave no token that could be token {emitted + 1} of the reply: "
                "give fewer stop tokens, or 'allowed' for end_tokens and 0 for min_tokens."
            )
        if not np.isfinite(best):
            raise TargetError(
                f"The request's bias and penalties make the logit of token {int(logits.argmax())} "
                f"{best}: give milder ones."
            )
        return logits
