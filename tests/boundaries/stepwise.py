"""A real target asked one token at a time: what it answers and holds after any sequence of tokens."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lse_mlx.decode.session import Session
from lse_mlx.target.model import Target
from lse_mlx.target.state import TargetState
from tests.boundaries.one_token import Row
from tests.states import Held, assert_same, held_by
from tests.tiny_models import RecordingContext, on_cpu

TAPS = (1, 4)


@dataclass(frozen=True)
class Known:
    """After one sequence: the logits, and the features of its last row."""

    logits: Row
    features: NDArray[np.float32]


@dataclass
class Stepwise:
    """Takes tokens one at a time through `Target.advance`, and remembers what it found.

    The state of the last sequence asked for goes on where the next one extends it; any other
    sequence is read again from its first token.
    """

    target: Target
    taps: tuple[int, ...] = TAPS
    _known: dict[tuple[int, ...], Known] = field(default_factory=dict, repr=False)
    _held: dict[tuple[int, ...], Held] = field(default_factory=dict, repr=False)
    _read: list[int] = field(default_factory=list, repr=False)
    _state: TargetState | None = field(default=None, repr=False)

    def logits(self, tokens: list[int]) -> Row:
        """fp32 [vocab] of the token after `tokens` (at least one)."""
        return self._after(tokens).logits

    def features(self, tokens: list[int]) -> NDArray[np.float32]:
        """fp32 [taps * hidden] of the last of `tokens`."""
        return self._after(tokens).features

    def assert_holds(self, session: Session, tokens: list[int]) -> None:
        """The session holds exactly `tokens`, bit for bit, and so does its drafter if it has one."""
        assert session.tokens == tokens
        self.assert_state(session.state, tokens)
        context = session.context
        if not tokens:
            assert context is None or context.position == 0
            return
        assert (context is None) == (session.drafter is None)
        if isinstance(context, RecordingContext):
            rows = [self.features(tokens[:n]) for n in range(1, len(tokens) + 1)]
            assert context.position == len(tokens)
            assert np.array_equal(np.array(context.rows), np.array(rows))

    def assert_state(self, state: TargetState, tokens: list[int]) -> None:
        """The state is that of `tokens`, bit for bit, and no pass is open."""
        assert state.position == len(tokens)
        assert state.open_rows == 0
        if tuple(tokens) not in self._held:
            self._held[tuple(tokens)] = held_by(self._state_after(tokens))
        assert_same(state, self._held[tuple(tokens)])

    def _after(self, tokens: list[int]) -> Known:
        if tuple(tokens) not in self._known:
            self._state_after(tokens)
        return self._known[tuple(tokens)]

    def _state_after(self, tokens: list[int]) -> TargetState:
        """The state that has read exactly `tokens`."""
        with on_cpu():
            if self._state is None or self._read != tokens[: len(self._read)]:
                self._state, self._read = self.target.new_state(), []
            for token in tokens[len(self._read) :]:
                answer = self.target.advance([token], self._state, self.taps)
                self._read = [*self._read, token]
                self._known[tuple(self._read)] = Known(
                    np.array(answer.logits[0]), np.array(answer.features[0])
                )
        return self._state
