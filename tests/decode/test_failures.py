"""A failure inside a pass leaves the session empty, and the next request is right."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import DraftError, KernelError, RequestError, TargetError, reason
from lse_mlx.target.model import Pass, Target
from tests.decode.runs import (
    Cold,
    Watched,
    assert_empty,
    known_sequence,
    run,
    speculating,
    with_logit,
)
from tests.tiny_models import VOCAB, RecordingContext, RecordingDrafter, random_prompt

START, COUNT = 7, 20


@pytest.fixture(scope="module")
def cold(target: Target) -> Cold:
    return known_sequence(target, random_prompt(START, 4), COUNT)


@dataclass
class Fuse:
    """Blows once, at the given use of the named thing; harmless afterwards."""

    name: str
    use: int
    error: BaseException
    uses: int = 0

    def __call__(self, name: str, *_: object) -> None:
        if name == self.name:
            self.uses += 1
            if self.uses == self.use:
                raise self.error


@dataclass
class FusedContext(RecordingContext):
    fuse: Callable[..., None] = field(kw_only=True)

    def append(self, features: mx.array, first: int) -> None:
        self.fuse("append")
        super().append(features, first)

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        self.fuse("propose")
        return super().propose(anchor, temperature, uniform)


@dataclass(frozen=True)
class FusedDrafter(RecordingDrafter):
    fuse: Callable[..., None] = field(kw_only=True)

    def new_context(self) -> FusedContext:
        return FusedContext(self.scripted.new_context(), fuse=self.fuse)


def assert_usable(session: Session, cold: Cold) -> None:
    """Empty, and a whole reply is right."""
    assert_empty(session)
    reply = run(session, cold.tokens[:START], max_tokens=COUNT)
    assert reply.timings.prompt_cached_n == 0
    assert reply.tokens == cold.tokens[START:]
    cold.assert_holds(session, START + COUNT - 1)


def failing(target: Target, cold: Cold, name: str, use: int, error: BaseException) -> Session:
    """A session whose target or drafter fails once; three of seven proposals are right."""
    fuse = Fuse(name, use, error)
    scripted = ScriptedDrafter.right_for(cold.tokens, 3, target.vocab_size, taps=(1, 4))
    return Session(Watched(target, fuse), FusedDrafter(scripted, fuse=fuse))


TARGET_FAULTS = [("advance", 1), ("advance", 3), ("verify", 1), ("verify", 3)]
DRAFTER_FAULTS = [("append", 1), ("append", 4), ("propose", 1), ("propose", 3)]


@pytest.mark.parametrize("error", [KernelError("refused"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(("name", "use"), [*TARGET_FAULTS, *DRAFTER_FAULTS])
@pytest.mark.parametrize("strict", [False, True])
def test_some_failures_end_a_reply_wherever_they_come_from(
    target: Target, cold: Cold, name: str, use: int, error: BaseException, strict: bool
) -> None:
    session = failing(target, cold, name, use, error)
    with pytest.raises(type(error)) as raised:
        run(
            session,
            cold.tokens[:START],
            max_tokens=COUNT,
            prefill_rows=3,
            strict_draft=strict,
        )
    assert raised.value is error
    assert_usable(session, cold)


@pytest.mark.parametrize("error", [RuntimeError("no memory left"), MemoryError()], ids=repr)
@pytest.mark.parametrize(("name", "use"), TARGET_FAULTS)
def test_a_failing_target_ends_the_reply_with_a_sentence(
    target: Target, cold: Cold, name: str, use: int, error: Exception
) -> None:
    session = failing(target, cold, name, use, error)
    with pytest.raises(TargetError, match=r"^The target failed after \d+ tokens? \(.*\): try"):
        run(session, cold.tokens[:START], max_tokens=COUNT, prefill_rows=3)
    assert_usable(session, cold)


@pytest.mark.parametrize(
    "error", [DraftError("No scores: mend."), RuntimeError("no memory"), MemoryError()], ids=repr
)
@pytest.mark.parametrize(("name", "use"), DRAFTER_FAULTS)
def test_a_failing_drafter_costs_speed_only(
    target: Target, cold: Cold, name: str, use: int, error: Exception
) -> None:
    session = failing(target, cold, name, use, error)
    options = {"max_tokens": COUNT, "prefill_rows": 3, "strict_draft": False}
    reply = run(session, cold.tokens[:START], **options)
    assert reply.tokens == cold.tokens[START:]
    assert reply.timings.draft_failures == 1
    assert reply.timings.draft_failure == reason(error)
    assert session.context is None
    cold.assert_holds(session, START + COUNT - 1)
    # The next reply starts cold and with the drafter.
    again = run(session, cold.tokens[: START + 9], max_tokens=COUNT - 9, strict_draft=True)
    assert again.tokens == cold.tokens[START + 9 :]
    assert again.timings.prompt_cached_n == 0
    assert again.timings.passes > 0
    assert again.timings.draft_failures == 0
    cold.assert_holds(session, START + COUNT - 1)


@pytest.mark.parametrize("error", [DraftError("No scores: mend."), RuntimeError("gone")], ids=repr)
@pytest.mark.parametrize(("name", "use"), DRAFTER_FAULTS)
def test_a_failing_drafter_ends_a_strict_reply(
    target: Target, cold: Cold, name: str, use: int, error: Exception
) -> None:
    session = failing(target, cold, name, use, error)
    with pytest.raises(DraftError, match=r"gone|No scores"):
        run(session, cold.tokens[:START], max_tokens=COUNT, prefill_rows=3, strict_draft=True)
    assert_usable(session, cold)


@pytest.mark.parametrize("use", [1, 4])
def test_a_drafter_that_cannot_follow_does_not_end_a_plain_reply(
    target: Target, cold: Cold, use: int
) -> None:
    session = failing(target, cold, "append", use, DraftError("gone"))
    reply = run(session, cold.tokens[:START], max_tokens=COUNT, speculate=False, strict_draft=True)
    assert reply.tokens == cold.tokens[START:]
    assert session.context is None


def test_a_callback_that_fails_inside_a_pass_leaves_nothing_behind(
    target: Target, cold: Cold
) -> None:
    for error in (RuntimeError("mine"), RequestError("mine")):
        session = speculating(target, cold.tokens)

        def cancelled(emitted: int, error: Exception = error) -> bool:
            if emitted == 4:
                raise error
            return False

        with pytest.raises(type(error), match="mine") as raised:
            run(session, cold.tokens[:START], max_tokens=COUNT, cancelled=cancelled)
        assert raised.value is error
        assert_usable(session, cold)


def test_a_failure_after_a_finished_turn_forgets_that_turn_too(target: Target, cold: Cold) -> None:
    fuse = Fuse("verify", 3, RuntimeError("gone"))
    session = speculating(Watched(target, fuse), cold.tokens, 7)
    run(session, cold.tokens[:START], max_tokens=9)
    with pytest.raises(TargetError, match="gone"):
        run(session, cold.tokens[: START + 10], max_tokens=10)
    assert_usable(session, cold)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize(
    ("name", "row", "temperature"),
    [
        ("advance", 0, 0.0),
        ("advance", 0, 1.0),
        ("verify", 0, 0.0),
        ("verify", 0, 1.0),
        ("verify", 3, 0.0),
    ],
)
def test_logits_without_a_choice_are_an_error(
    target: Target, cold: Cold, name: str, row: int, temperature: float, value: float
) -> None:
    spoil = True

    def after(passed: str, answer: Pass) -> Pass:
        return with_logit(answer, row, value) if spoil and passed == name else answer

    session = speculating(Watched(target, after=after), cold.tokens)
    sampling = Sampling(temperature)
    with pytest.raises(TargetError, match="at token 5"):
        run(session, cold.tokens[:START], max_tokens=COUNT, sampling=sampling)
    spoil = False
    assert_usable(session, cold)


def test_rows_behind_a_rejection_may_hold_anything(target: Target, cold: Cold) -> None:
    def after(name: str, answer: Pass) -> Pass:
        return with_logit(answer, 7, math.nan) if len(answer.logits) == 8 else answer

    session = speculating(Watched(target, after=after), cold.tokens, 2)
    assert run(session, cold.tokens[:START], max_tokens=COUNT).tokens == cold.tokens[START:]


def test_all_logits_at_minus_infinity_are_an_error(target: Target, cold: Cold) -> None:
    def after(name: str, answer: Pass) -> Pass:
        return Pass(mx.full(answer.logits.shape, -math.inf), answer.features)

    session = Session(Watched(target, after=after), None)
    with pytest.raises(TargetError, match="-inf"):
        run(session, cold.tokens[:START], max_tokens=COUNT)
    assert_empty(session)


@dataclass
class MalformedContext(RecordingContext):
    """Proposes a token that its own distribution does not give."""

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        return Proposal([3], [Distribution(np.array([4, 5]), np.array([0.5, 0.5]))])


class MalformedDrafter(RecordingDrafter):
    def new_context(self) -> MalformedContext:
        return MalformedContext(self.scripted.new_context())


def test_a_malformed_proposal_is_an_error(target: Target, cold: Cold) -> None:
    drafter = MalformedDrafter(ScriptedDrafter.right(cold.tokens))
    session = Session(target, drafter)
    with pytest.raises(DraftError, match="proposed token 3"):
        run(session, cold.tokens[:START], max_tokens=COUNT)
    assert_empty(session)


def test_a_failed_request_does_not_hurt_another_session(target: Target, cold: Cold) -> None:
    sessions = speculating(target, cold.tokens), speculating(target, cold.tokens)
    run(sessions[0], cold.tokens[:START], max_tokens=9)
    sessions[1].drafter = MalformedDrafter(ScriptedDrafter.right(cold.tokens))
    sessions[1].reset()
    with pytest.raises(DraftError):
        run(sessions[1], cold.tokens[:START], max_tokens=9)
    reply = run(sessions[0], cold.tokens[: START + 10], max_tokens=9)
    assert reply.timings.prompt_cached_n == START + 8
    assert reply.tokens == cold.tokens[START + 10 : START + 19]


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
def test_a_drafted_id_outside_the_vocabulary_is_refused_before_the_target_reads_it(
    target: Target, cold: Cold, token: int
) -> None:
    drafts = [[cold.tokens[START + 1], token]]
    session = Session(target, RecordingDrafter(ScriptedDrafter.listed(drafts)))
    with pytest.raises(DraftError, match=f"token {token}, outside the vocabulary of {VOCAB}"):
        run(session, cold.tokens[:START], max_tokens=8)
    assert_empty(session)


def test_more_tokens_than_the_depth_are_refused(target: Target, cold: Cold) -> None:
    drafter = ScriptedDrafter.listed([cold.tokens[START + 1 : START + 5]], depth=4)
    short = RecordingDrafter(replace(drafter, depth=3))
    session = Session(target, short)
    with pytest.raises(DraftError, match="4 tokens and its depth is 3"):
        run(session, cold.tokens[:START], max_tokens=8)
    assert_empty(session)
