"""What the decode loop asks of a drafter. Nothing here knows which drafter it is.

A `Drafter` is weights: shared, immutable. A `DraftContext` is what one session owns in it: the
drafter's memory of the committed tokens. A context holds rows [position - live, position); it grows
by `append` with the target's features of committed rows and shrinks by at most one block.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from lse_mlx.checkpoints.drafter_config import TargetDimensions
from lse_mlx.distribution import Distribution

Uniform = Callable[[], float]
"""A stream of independent uniforms in [0, 1)."""


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens d1..dk and, for each, the distribution q it was drawn from.

    candidates: where q does not tell, as in a greedy draft, what could have stood at each position
                and how likely the drafter holds it after the tokens before, at temperature 1. For
                those who look at a draft; nothing is computed until it is called
    """

    tokens: list[int]
    q: list[Distribution]
    candidates: Callable[[], list[Distribution]] | None = field(
        default=None, repr=False, compare=False
    )

    @classmethod
    def certain(cls, tokens: list[int]) -> "Proposal":
        """A proposal made without chance: q is all on the drafted token."""
        return cls(tokens, [Distribution.point(t) for t in tokens])

    def first(self, k: int) -> "Proposal":
        """The first `k` drafted tokens."""
        whole = self.candidates
        candidates = None if whole is None else lambda: whole()[:k]
        return Proposal(self.tokens[:k], self.q[:k], candidates)


class SharedTarget(TargetDimensions, Protocol):
    """What a drafter may use of its target: the dimensions, the embedding and the output head."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings of `tokens` (int32 [n]) as [n, hidden] in the target's activation dtype."""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """Logits fp32 [n, vocab] of `hidden` [n, hidden], which is already normed."""
        ...


class DraftContext(Protocol):
    """One session's side of a drafter."""

    @property
    def position(self) -> int:
        """Absolute position after the last appended row: the position of the next anchor."""
        ...

    def append(self, features: mx.array, first: int) -> None:
        """Take in committed rows.

        features: fp32 [rows, taps * hidden], the target's taps of positions first..first+rows-1.
        A `first` below `position` replaces the rows from there on (a rewind of at most one block);
        one above it is a gap and is refused with DraftError.
        """
        ...

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        """Draft the tokens after `anchor`, which stands at `position`.

        At temperature 0 the choice is deterministic; above it each token is drawn with one call of
        `uniform` from the drafter's own conditional at that temperature. Changes no state.
        Raises DraftError for non-finite scores or malformed ids.
        """
        ...


class Drafter(Protocol):
    """Weights that propose."""

    @property
    def name(self) -> str:
        """What timings call it, for example "dflash2"."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Zero-based target blocks whose outputs `append` wants, in order; may be empty."""
        ...

    @property
    def depth(self) -> int:
        """The most tokens one proposal holds."""
        ...

    def new_context(self) -> DraftContext:
        """An empty context, at position 0."""
        ...
