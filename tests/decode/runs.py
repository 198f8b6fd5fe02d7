"""Running the real loop in tests: one call a reply, and what a cold run of the same would hold."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.decode.loop import Request, Step, decode
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.decode.stopping import Cancelled, Limits, StopReason
from lse_mlx.decode.timings import Timings
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.target.model import Pass, Target
from lse_mlx.target.state import TargetState
from tests.states import Held, assert_same, held_by
from tests.tiny_models import VOCAB, RecordingContext, RecordingDrafter, on_cpu

TAPS = (1, 4)


@dataclass
class Reply:
    """What a request gave."""

    tokens: list[int]
    reason: StopReason | None
    timings: Timings


def request(
    prompt: list[int],
    max_tokens: int | None = None,
    stops: Collection[int] = (),
    sampling: Sampling | None = None,
    seed: int = 0,
    speculate: bool = True,
    room: int = 400,
    cancelled: Cancelled | None = None,
    strict_draft: bool = True,
    **more: Any,
) -> Request:
    """A request; `more` are further fields of `Request`. A failing drafter fails a test at once."""
    limits = Limits(frozenset(stops), max_tokens, room, cancelled)
    return Request(
        prompt,
        sampling or Sampling(),
        limits,
        seed,
        speculate,
        strict_draft=strict_draft,
        **more,
    )


def start(session: Session, asked: Request) -> tuple[Iterator[Step], Timings]:
    """The steps of a reply, not asked for yet, and where they are counted."""
    drafter = session.drafter if asked.speculate else None
    timings = Timings(drafter.name, drafter.depth) if drafter else Timings()
    return decode(session, asked, timings), timings


def run(session: Session, prompt: list[int], **options: Any) -> Reply:
    """One whole reply, with the options of `request`."""
    steps, timings = start(session, request(prompt, **options))
    tokens: list[int] = []
    reason = None
    for step in steps:
        assert reason is None
        tokens += step.tokens
        reason = step.reason
    assert timings.generated_n == len(tokens)
    return Reply(tokens, reason, timings)


def speculating(target: Target, known: list[int], right: int = 7) -> Session:
    """A session whose drafter knows the sequence: each proposal is right for `right` tokens."""
    scripted = ScriptedDrafter.right_for(known, right, VOCAB, taps=TAPS)
    return Session(target, RecordingDrafter(scripted))


@dataclass
class Cold:
    """What the target holds and answers after each token of `tokens`, taken in one at a time."""

    target: Target
    tokens: list[int]
    _held: list[Held] = field(default_factory=list)
    _features: list[NDArray[np.float32]] = field(default_factory=list)

    def __post_init__(self) -> None:
        with on_cpu():
            state = self.target.new_state()
            self._held.append(held_by(state))
            for token in self.tokens:
                rows = self.target.advance([token], state, TAPS)
                self._held.append(held_by(state))
                self._features.append(np.array(rows.features[0]))

    def assert_holds(self, session: Session, count: int) -> None:
        """The session holds the first `count` tokens, bit for bit, and so does its drafter."""
        assert session.tokens == self.tokens[:count]
        assert session.state.position == count
        assert_same(session.state, self._held[count])
        context = session.context
        if isinstance(context, RecordingContext) and context.rows:
            assert context.position == count
            assert np.array_equal(np.array(context.rows), np.array(self._features[:count]))


def assert_empty(session: Session) -> None:
    """Nothing is left of earlier requests."""
    assert session.tokens == []
    assert session.state.position == 0
    assert session.state.open_rows == 0
    fresh = session.target.new_state()
    assert_same(session.state, fresh)
    assert session.context is None or session.context.position == 0


@dataclass
class Watched:
    """A target that reports every pass before it runs and lets its answer be changed after."""

    target: Target
    before: Callable[[str, list[int]], None] = lambda name, tokens: None
    after: Callable[[str, Pass], Pass] = lambda name, answer: answer

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def new_state(self) -> TargetState:
        return self.target.new_state()

    def advance(self, tokens: list[int], state: TargetState, taps: tuple[int, ...]) -> Pass:
        self.before("advance", tokens)
        return self.after("advance", self.target.advance(tokens, state, taps))

    def verify(self, tokens: list[int], state: TargetState, taps: tuple[int, ...]) -> Pass:
        self.before("verify", tokens)
        return self.after("verify", self.target.verify(tokens, state, taps))


def with_logit(answer: Pass, row: int, value: float) -> Pass:
    """The same pass with one logit of `row` replaced by `value`."""
    logits = np.array(answer.logits)
    logits[row, 5] = value
    return Pass(mx.array(logits), answer.features)


def known_sequence(target: Target, prompt: list[int], count: int) -> Cold:
    """The prompt and `count` greedy tokens of the target alone, decoded one at a time."""
    tokens = list(prompt)
    with on_cpu():
        state = target.new_state()
        rows = target.advance(tokens, state, ())
        for _ in range(count):
            tokens.append(int(np.argmax(np.array(rows.logits[0]))))
            rows = target.advance(tokens[-1:], state, ())
    return Cold(target, tokens)
