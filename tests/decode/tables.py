"""A target and a drafter whose conditional distributions are tables that a test can enumerate."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.target.model import Pass

TOKENS = 4


@dataclass
class TableState:
    """The committed tokens, and those of the open pass."""

    committed: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)

    def commit(self, n: int) -> None:
        assert 1 <= n <= len(self.open)
        self.committed += self.open[:n]
        self.open = []


@dataclass(frozen=True)
class TableTarget:
    """Logits of the next token by the last two: `table` is fp32 [TOKENS, TOKENS, TOKENS]."""

    table: NDArray[np.float32]
    vocab_size: int = TOKENS

    @classmethod
    def random(cls, seed: int) -> "TableTarget":
        shape = (TOKENS, TOKENS, TOKENS)
        return cls(np.random.default_rng(seed).normal(0, 1.2, shape).astype(np.float32))

    def new_state(self) -> TableState:
        return TableState()

    def advance(self, tokens: list[int], state: TableState, taps: tuple[int, ...]) -> Pass:
        logits = self._open(tokens, state)[-1:]
        state.commit(len(tokens))
        return Pass(mx.array(logits), mx.zeros((len(tokens), 0)))

    def verify(self, tokens: list[int], state: TableState, taps: tuple[int, ...]) -> Pass:
        return Pass(mx.array(self._open(tokens, state)), mx.zeros((len(tokens), 0)))

    def _open(self, tokens: list[int], state: TableState) -> NDArray[np.float32]:
        assert not state.open
        state.open = list(tokens)
        behind = [0, *state.committed, *tokens]
        at = np.array(behind[-len(tokens) - 1 :])
        return self.table[at[:-1], at[1:]]


@dataclass
class TableContext:
    """Counts the committed rows and draws from the drafter's own conditional."""

    drafter: "TableDrafter"
    position: int = 0

    def append(self, features: mx.array, first: int) -> None:
        assert first == self.position
        self.position += features.shape[0]

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        tokens, q = [], []
        for _ in range(self.drafter.depth):
            q.append(self.drafter.q[tokens[-1] if tokens else anchor])
            tokens.append(q[-1].draw(uniform()))
        return Proposal(tokens, q)


@dataclass(frozen=True)
class TableDrafter:
    """Draws each token by the one before: `q` has a distribution for every token."""

    q: list[Distribution]
    depth: int = 3
    name: str = "table"
    taps: tuple[int, ...] = ()

    @classmethod
    def random(cls, seed: int) -> "TableDrafter":
        """Candidates in an order of their own; each leaves one token of the vocabulary out."""
        rng = np.random.default_rng(seed)
        return cls(
            [
                Distribution(rng.permutation(TOKENS)[: TOKENS - 1], rng.dirichlet([0.7] * 3))
                for _ in range(TOKENS)
            ]
        )

    def new_context(self) -> TableContext:
        return TableContext(self)
