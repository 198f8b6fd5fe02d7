"""A target as a function of its tokens, in NumPy, and drafters for it: fast, and nothing forgotten.

The features of a row say which token it read and where, so that a drafter's context tells whether it
was given the rows of the committed tokens and no others.
"""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.decode.session import Session
from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.target.model import Pass
from tests.boundaries.one_token import Row
from tests.boundaries.slow_walk import Draft

TAPS = (0, 1)


@dataclass
class ReadState:
    """The committed tokens, and those of the open pass."""

    committed: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.committed)

    def commit(self, n: int) -> None:
        assert 1 <= n <= len(self.open)
        self.committed = [*self.committed, *self.open[:n]]
        self.open = []


@dataclass(frozen=True)
class FastTarget:
    """Logits by the last two tokens and the position, so that greedy text never goes in a circle.

    table: fp32 [vocab, vocab, vocab] in sixteenths, so that equal logits occur
    """

    table: NDArray[np.float32]

    @classmethod
    def random(cls, seed: int, vocab: int) -> "FastTarget":
        drawn = np.random.default_rng(seed).normal(0, 1.5, (vocab, vocab, vocab))
        return cls((np.round(drawn * 16) / 16).astype(np.float32))

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    def logits(self, tokens: list[int]) -> Row:
        """fp32 [vocab] of the token after `tokens` (at least one)."""
        before = tokens[-2] if len(tokens) > 1 else 0
        return np.roll(self.table[before, tokens[-1]], len(tokens))

    def new_state(self) -> ReadState:
        return ReadState()

    def advance(self, tokens: list[int], state: ReadState, taps: tuple[int, ...]) -> Pass:
        answer = self._pass(tokens, state, taps, last=True)
        state.commit(len(tokens))
        return answer

    def verify(self, tokens: list[int], state: ReadState, taps: tuple[int, ...]) -> Pass:
        return self._pass(tokens, state, taps, last=False)

    def _pass(self, tokens: list[int], state: ReadState, taps: tuple[int, ...], last: bool) -> Pass:
        assert tokens and not state.open
        state.open = list(tokens)
        every, first = [*state.committed, *tokens], state.position
        counts = range(first + 1, len(every) + 1)
        rows = [self.logits(every[:n]) for n in (counts[-1:] if last else counts)]
        said = features_of(every, first) if taps else np.zeros((len(tokens), 0), np.float32)
        return Pass(mx.array(np.stack(rows)), mx.array(said))


def features_of(tokens: list[int], first: int = 0) -> NDArray[np.float32]:
    """What the rows from `first` on give to a drafter: each its token and its position."""
    rows = [[token, at] for at, token in enumerate(tokens)][first:]
    return np.array(rows, np.float32).reshape(-1, 2)


@dataclass
class ReadingContext:
    """Reads the tokens back from the features it was given, and drafts by them alone."""

    draft: Draft
    rows: list[list[float]] = field(default_factory=list)
    drafts: int = 0

    @property
    def position(self) -> int:
        return len(self.rows)

    def append(self, features: mx.array, first: int) -> None:
        assert first == len(self.rows)
        assert features.shape[0] >= 1 and features.shape[1] == len(TAPS)
        self.rows += np.array(features).tolist()

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        tokens = [*(int(token) for token, _ in self.rows), anchor]
        drafted = self.draft(tokens, self.drafts, uniform)
        self.drafts += 1
        return Proposal([x for x, _ in drafted], [_distribution(q) for _, q in drafted])


@dataclass(frozen=True)
class ReadingDrafter:
    """Drafts by a function of the tokens that the context took in, and of nothing else."""

    draft: Draft
    depth: int = 7
    name: str = "reading"
    taps: tuple[int, ...] = TAPS

    def new_context(self) -> ReadingContext:
        return ReadingContext(self.draft)


def _distribution(q: list[tuple[int, float]]) -> Distribution:
    return Distribution(
        np.array([t for t, _ in q], np.int64), np.array([p for _, p in q], np.float64)
    )


def assert_table_holds(session: Session, tokens: list[int]) -> None:
    """The session holds exactly `tokens`, and so does its drafter if it has one."""
    assert session.tokens == tokens
    assert session.state.committed == tokens  # pyright: ignore[reportAttributeAccessIssue]
    context = session.context
    assert (context is None) == (session.drafter is None)
    if isinstance(context, ReadingContext):
        assert context.rows == features_of(tokens).tolist()
