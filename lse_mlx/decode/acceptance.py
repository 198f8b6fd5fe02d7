"""Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): the target's word is final.

A token x drawn from q is kept with probability min(1, p(x) / q(x)); after a rejection the token
comes from the residual max(p - q, 0). Whatever q is, each emitted token is then distributed as p.
Greedy decoding is the same walk with p and q as point masses.
"""

from dataclasses import dataclass
from numbers import Integral
from typing import Protocol

import numpy as np

from lse_mlx.decode.randomness import Streams
from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import Proposal
from lse_mlx.errors import DraftError


@dataclass(frozen=True)
class Verdict:
    """What a verify pass decided.

    tokens:   the accepted proposals and the target's own token after them, where there is a row for
              it; row i answers tokens[i]
    accepted: how many of them were proposed
    overlap:  for each tested position the sum of min(p, q): the chance that a draft is accepted
    """

    tokens: list[int]
    accepted: int
    overlap: list[float]

    @property
    def tested(self) -> int:
        """How many proposals were judged: the accepted ones, and the rejected one if any."""
        return len(self.overlap)


class Rows(Protocol):
    """The target's distributions p_0, p_1, ..., one a row of the pass."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Distribution: ...


def judge(proposal: Proposal, p_rows: Rows, streams: Streams) -> Verdict:
    """Walk the proposal d1..dk along the target's rows p_0..p_k, or p_0..p_{k-1} near a limit.

    Without a row p_k the target adds no token of its own behind k accepted ones. The proposal is one
    that `check_proposal` lets pass. Each row consumes one uniform of each of the accept and residual
    streams, needed or not, so that a token's chance does not hang on the luck of those before it.
    """
    tokens: list[int] = []
    overlap: list[float] = []
    for row, (x, q) in enumerate(zip(proposal.tokens, proposal.q, strict=True)):
        p = p_rows[row]
        u, r = streams.accept(), streams.residual()
        overlap.append(float(np.minimum(p.of(q.ids), q.probs).sum()))
        p_x, q_x = _at(p, x), _at(q, x)
        if p_x >= q_x or u < p_x / q_x:
            tokens.append(x)
            continue
        tokens.append(residual(p, q).draw(r))
        return Verdict(tokens, len(tokens) - 1, overlap)
    accepted = len(tokens)
    if accepted < len(p_rows):
        streams.accept()
        tokens.append(p_rows[accepted].draw(streams.residual()))
    return Verdict(tokens, accepted, overlap)


def check_proposal(proposal: Proposal, depth: int, vocab_size: int) -> None:
    """Raise DraftError for a proposal that the target cannot judge.

    That is one with more tokens than `depth`, with what is no token id or one that the target has no
    embedding for, or with a q that its token cannot have been drawn from.
    """
    if len(proposal.tokens) > depth:
        raise DraftError(
            f"The drafter proposed {len(proposal.tokens)} tokens and its depth is {depth}: "
            "a drafter keeps to its depth."
        )
    for token in proposal.tokens:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise DraftError(
                f"The drafter proposed {token!r}, which is no token id: give integers."
            )
        if not 0 <= token < vocab_size:
            raise DraftError(
                f"The drafter proposed token {token}, outside the vocabulary of {vocab_size}: "
                "check that drafter and target belong together."
            )
    if len(proposal.q) != len(proposal.tokens):
        raise DraftError(
            f"The drafter gave {len(proposal.q)} distributions for {len(proposal.tokens)} tokens: "
            "each token comes with the q it was drawn from."
        )
    for x, q in zip(proposal.tokens, proposal.q, strict=True):
        _check_drawn(x, q)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """max(p - q, 0), normalized, in p's order.

    A residual without mass after a rejection is rounding (p and q are equal): p itself answers.
    """
    left = np.maximum(p.probs - q.of(p.ids), 0.0)
    mass = left.sum()
    return Distribution(p.ids, left / mass) if mass > 0 else p


def _at(distribution: Distribution, token: int) -> float:
    return float(distribution.of(np.array([token]))[0])


def _check_drawn(x: int, q: Distribution) -> None:
    """Refuse a q that `x` cannot have been drawn from: acceptance would divide by nonsense."""
    if q.ids.ndim != 1 or q.ids.shape != q.probs.shape:
        raise DraftError(
            f"The drafter gave probabilities of shape {list(q.probs.shape)} for candidates of shape "
            f"{list(q.ids.shape)}: a distribution has one for each."
        )
    if len(np.unique(q.ids)) != len(q.ids):
        raise DraftError(
            f"The drafter's candidates {q.ids.tolist()} repeat a token, so q is not a distribution: "
            "check how the drafter selects them."
        )
    if not (np.all(q.probs >= 0) and abs(q.probs.sum() - 1) <= 1e-6):
        raise DraftError(
            f"The drafter's probabilities {q.probs.tolist()} are not a distribution: "
            "check the drafter's weights for non-finite values."
        )
    if _at(q, x) <= 0:
        raise DraftError(
            f"The drafter proposed token {x}, to which it gives no probability: "
            "a proposal must be drawn from the q that comes with it."
        )
