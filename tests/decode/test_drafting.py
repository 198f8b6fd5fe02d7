"""A session whose drafter fails: what its later replies cost, and that they stay right."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.decode.session import Session
from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import DraftError, RequestError, TargetError
from lse_mlx.target.model import Target
from tests.decode.runs import TAPS, Cold, known_sequence, request, run, start
from tests.tiny_models import RecordingContext, RecordingDrafter, random_prompt

START, TURN, COUNT = 7, 6, 40


@pytest.fixture(scope="module")
def cold(target: Target) -> Cold:
    return known_sequence(target, random_prompt(START, 4), COUNT)


@dataclass
class FailingContext(RecordingContext):
    """Fails in every draft, or in every append but the first ones."""

    name: str = "propose"
    appends: int = 0

    def append(self, features: mx.array, first: int) -> None:
        self.appends += 1
        if self.name == "append" and self.appends > 1:
            raise DraftError("The drafter is broken: mend it.")
        super().append(features, first)

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        if self.name == "propose":
            raise DraftError("The drafter is broken: mend it.")
        return super().propose(anchor, temperature, uniform)


@dataclass(frozen=True)
class FailingDrafter(RecordingDrafter):
    fails_in: str = "propose"

    def new_context(self) -> FailingContext:
        return FailingContext(self.scripted.new_context(), name=self.fails_in)


def failing_session(target: Target, cold: Cold, fails_in: str) -> Session:
    drafter = FailingDrafter(ScriptedDrafter.right(cold.tokens, taps=TAPS), fails_in=fails_in)
    return Session(target, drafter)


@pytest.mark.parametrize("fails_in", ["propose", "append"])
def test_a_drafter_that_stays_broken_costs_two_cold_starts_and_no_more(
    target: Target, cold: Cold, fails_in: str
) -> None:
    session = failing_session(target, cold, fails_in)
    failures, cached = [], []
    for at in range(START, START + 4 * TURN, TURN):
        reply = run(session, cold.tokens[:at], max_tokens=TURN - 1, strict_draft=False)
        assert reply.tokens == cold.tokens[at : at + TURN - 1]
        cold.assert_holds(session, at + TURN - 2)
        failures.append(reply.timings.draft_failures)
        cached.append(reply.timings.prompt_cached_n)
    assert failures == [1, 1, 0, 0]
    assert cached == [0, 0, START + 2 * TURN - 2, START + 3 * TURN - 2]


def test_after_a_failure_replies_that_do_not_speculate_go_on(target: Target, cold: Cold) -> None:
    session = failing_session(target, cold, "propose")
    run(session, cold.tokens[:START], max_tokens=TURN - 1, strict_draft=False)
    at = START + TURN
    reply = run(session, cold.tokens[:at], max_tokens=TURN - 1, speculate=False)
    assert reply.timings.prompt_cached_n == at - 2
    assert reply.tokens == cold.tokens[at : at + TURN - 1]
    assert reply.timings.draft_failures == 0
    cold.assert_holds(session, at + TURN - 2)


def test_a_strict_reply_fails_however_often_the_drafter_failed(target: Target, cold: Cold) -> None:
    session = failing_session(target, cold, "propose")
    for _ in range(4):
        with pytest.raises(DraftError, match="broken"):
            run(session, cold.tokens[:START], max_tokens=TURN, strict_draft=True)
        assert session.tokens == []


Broken = Callable[[list[int]], Any]
NOTHING = np.zeros(0)
BROKEN: dict[str, Broken] = {
    "nothing": lambda tokens: None,
    "text": lambda tokens: "a b",
    "no tokens": lambda tokens: Proposal(None, []),  # type: ignore[arg-type]
    "no q": lambda tokens: Proposal(tokens, None),  # type: ignore[arg-type]
    "q of something else": lambda tokens: Proposal(tokens, [{}] * len(tokens)),  # type: ignore[arg-type]
    "floats": lambda tokens: Proposal.certain([float(t) for t in tokens]),  # type: ignore[arg-type]
    "truth values": lambda tokens: Proposal.certain([True]),
    "arrays": lambda tokens: Proposal.certain([mx.array(t) for t in tokens]),  # type: ignore[arg-type]
    "too many probabilities": lambda tokens: Proposal(
        tokens[:1], [Distribution(np.array(tokens[:1]), np.array([0.5, 0.5]))]
    ),
    "an empty q": lambda tokens: Proposal(tokens[:1], [Distribution(NOTHING.astype(int), NOTHING)]),
}
RAISED = [TypeError("t"), AttributeError("a"), OSError("o"), AssertionError(), StopIteration()]
RAISED += [RequestError("r"), TargetError("t"), Exception("e")]


@dataclass
class AnyContext(RecordingContext):
    """Proposes what a function makes of the right tokens."""

    make: Broken = Proposal.certain

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        return self.make(super().propose(anchor, temperature, uniform).tokens)


@dataclass(frozen=True)
class AnyDrafter(RecordingDrafter):
    make: Broken = Proposal.certain
    error: BaseException | None = None

    def new_context(self) -> AnyContext:
        if self.error is not None:
            raise self.error
        return AnyContext(self.scripted.new_context(), make=self.make)


def assert_plain_but_told(target: Target, cold: Cold, drafter: AnyDrafter) -> None:
    session = Session(target, drafter)
    for at in (START, START + TURN, START + 2 * TURN):
        reply = run(session, cold.tokens[:at], max_tokens=TURN - 1, strict_draft=False)
        assert reply.tokens == cold.tokens[at : at + TURN - 1]
        assert reply.timings.draft_failures == (at < START + 2 * TURN)
        cold.assert_holds(session, at + TURN - 2)


@pytest.mark.parametrize("what", BROKEN)
def test_whatever_a_drafter_proposes_costs_speed_only(
    target: Target, cold: Cold, what: str
) -> None:
    scripted = ScriptedDrafter.right(cold.tokens, taps=TAPS)
    assert_plain_but_told(target, cold, AnyDrafter(scripted, make=BROKEN[what]))


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_whatever_a_drafter_raises_costs_speed_only(
    target: Target, cold: Cold, error: Exception
) -> None:
    def fail(tokens: list[int]) -> Proposal:
        raise error

    scripted = ScriptedDrafter.right(cold.tokens, taps=TAPS)
    assert_plain_but_told(target, cold, AnyDrafter(scripted, make=fail))
    assert_plain_but_told(target, cold, AnyDrafter(scripted, error=error))


def test_numpys_integers_are_tokens(target: Target, cold: Cold) -> None:
    scripted = ScriptedDrafter.right(cold.tokens, taps=TAPS)
    drafter = AnyDrafter(scripted, make=lambda tokens: Proposal.certain(list(np.array(tokens))))
    session = Session(target, drafter)
    reply = run(session, cold.tokens[:START], max_tokens=20)
    assert reply.tokens == cold.tokens[START : START + 20]
    assert {type(token) for token in [*reply.tokens, *session.tokens]} == {int}


def test_a_failure_now_and_then_does_not_cost_the_drafter(target: Target, cold: Cold) -> None:
    """It fails in every second reply; in between it drafts, and the count begins anew."""
    broken = [False]

    def sometimes(tokens: list[int]) -> Proposal:
        if broken[0]:
            raise DraftError("Not now: later.")
        return Proposal.certain(tokens)

    scripted = ScriptedDrafter.right(cold.tokens, taps=TAPS)
    session = Session(target, AnyDrafter(scripted, make=sometimes))
    for n, at in enumerate(range(START, START + 5 * TURN, TURN)):
        # The reply after a failure goes well, and so does the next, which finds that it did.
        broken[0] = n in (0, 3)
        reply = run(session, cold.tokens[:at], max_tokens=TURN - 1, strict_draft=False)
        assert reply.tokens == cold.tokens[at : at + TURN - 1]
        assert reply.timings.draft_failures == (n in (0, 3))
        assert session.drafter is not None


def test_a_drafter_that_cannot_follow_a_plain_reply_is_told(target: Target, cold: Cold) -> None:
    session = failing_session(target, cold, "append")
    steps, timings = start(session, request(cold.tokens[:START], TURN, speculate=False))
    assert [t for step in steps for t in step.tokens] == cold.tokens[START : START + TURN]
    shown = timings.as_dict()
    assert (shown["spec_failures"], shown["spec_failure"]) == (1, "The drafter is broken: mend it")
