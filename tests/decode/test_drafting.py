"""A session whose drafter fails: what its later replies cost, and that they stay right."""

from dataclasses import dataclass

import mlx.core as mx
import pytest

from lse_mlx.decode.session import Session
from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import DraftError
from lse_mlx.target.model import Target
from tests.decode.runs import TAPS, Cold, known_sequence, run
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
