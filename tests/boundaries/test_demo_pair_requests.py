"""Many requests to the demo pair: conversations, beside each other, and failures inside a cycle."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import lse_mlx
from lse_mlx.drafters.base import DraftContext, Uniform
from lse_mlx.target.model import Pass, Target
from tests.boundaries.demo_bench import TURN, Bench
from tests.decode.runs import with_logit


def at_question(n: int) -> Callable[[int], bool]:
    """Cancels when asked for the n-th time, counted from 0."""
    asked = iter(range(100))
    return lambda emitted: next(asked) == n


def test_turns_of_a_conversation_are_cold_runs(bench: Bench) -> None:
    """Going on, again, leaving it inside, after each kind of cancel and after a dropped reply."""
    session = bench.engine.session()

    def turn(messages: list[dict[str, str]], **options: Any) -> lse_mlx.Result:
        warm = bench.engine.generate(messages, max_tokens=9, session=session, **options)
        cold = bench.engine.generate(messages, max_tokens=9, **options)
        assert (warm.token_ids, warm.text) == (cold.token_ids, cold.text)
        bench.assert_holds(session, list(session.tokens))
        return warm

    talk = [{"role": "user", "content": TURN}]
    for n, word in enumerate(["More.", "And then?"]):
        said = turn(talk, temperature=0.7 * (n % 2), seed=n, speculate=n != 1)
        turn(talk)
        talk += [
            {"role": "assistant", "content": said.text},
            {"role": "user", "content": word},
        ]
        stopped = bench.engine.generate(talk, session=session, cancelled=at_question(n))
        assert stopped.finish_reason == "cancelled"
        assert len(stopped.token_ids) == min(n, 1)
        pieces = bench.engine.stream(talk, session=session)
        said_then = [next(pieces).token_ids, next(pieces).token_ids]
        assert all(said_then)
    turn(talk[:3])
    assert turn([*talk[:2], {"role": "user", "content": "Why?"}]).token_ids


def test_conversations_beside_each_other(bench: Bench) -> None:
    """Step by step in turn, some left early: each says what it says alone."""
    prompts = [f"Tell me about {word}." for word in ("a fox", "the sea", "snow", "bread", "a king")]
    options: list[dict[str, Any]] = [
        {"temperature": 0.9 * (n % 2), "seed": n, "max_tokens": 14} for n in range(5)
    ]
    lone = [bench.engine.generate(p, **o).token_ids for p, o in zip(prompts, options, strict=True)]
    playing = {
        n: bench.engine.stream(p, session=bench.engine.session(), **o)
        for n, (p, o) in enumerate(zip(prompts, options, strict=True))
    }
    said: list[list[int]] = [[] for _ in prompts]
    while playing:
        for n in list(playing):
            piece = next(playing[n], None)
            if piece is not None:
                said[n] += piece.token_ids
            if piece is None or (n == 2 and len(said[n]) > 3):
                del playing[n]
    for n, ids in enumerate(said):
        assert ids == lone[n][: len(ids)]
        assert n == 2 or ids == lone[n]


@dataclass(frozen=True)
class Spoilt(Target):
    """The target, whose verify pass number `at` fails or answers NaN."""

    at: int = 0
    error: BaseException | None = None
    passes: list[str] = field(default_factory=list)

    def verify(self, tokens: list[int], state: Any, taps: tuple[int, ...]) -> Pass:
        self.passes.append("verify")
        answer = super().verify(tokens, state, taps)
        if len(self.passes) != self.at:
            return answer
        if self.error is not None:
            raise self.error
        return with_logit(answer, 0, float("nan"))


@pytest.mark.parametrize("error", [None, RuntimeError("[metal] fault"), MemoryError()], ids=repr)
def test_a_failing_target_ends_one_request(bench: Bench, error: BaseException | None) -> None:
    facts = {f: getattr(bench.engine.target, f) for f in Target.__dataclass_fields__}
    target = Spoilt(**facts, at=3, error=error)
    engine = lse_mlx.Engine(target, bench.engine.tokenizer, bench.engine.drafter)
    session, other = engine.session(), engine.session()
    engine.generate(bench.prompt, max_tokens=1, session=other)
    said: list[int] = []

    def listen() -> None:
        for piece in engine.stream(bench.prompt, max_tokens=30, session=session):
            said.extend(piece.token_ids)

    with pytest.raises(lse_mlx.TargetError):
        listen()
    assert 1 < len(said) < 30
    assert said == bench.said[: len(said)]
    for kept in (session, other, None):
        assert (
            engine.generate(bench.prompt, max_tokens=12, session=kept).token_ids == bench.said[:12]
        )
    bench.assert_holds(session, [*bench.prompt, *bench.said[:11]])


@dataclass
class Failing:
    """The real drafter's context, whose proposal number `at` fails."""

    inner: DraftContext
    at: int
    proposals: int = 0

    @property
    def position(self) -> int:
        return self.inner.position

    def append(self, features: mx.array, first: int) -> None:
        self.inner.append(features, first)

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Any:
        self.proposals += 1
        if self.proposals == self.at:
            raise lse_mlx.DraftError("The drafter's scores hold NaN: check its weights.")
        return self.inner.propose(anchor, temperature, uniform)


@dataclass(frozen=True)
class FailingDrafter:
    """The real drafter with such contexts."""

    inner: Any
    at: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def new_context(self) -> Any:
        return Failing(self.inner.new_context(), self.at)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_failing_drafter_costs_speed_only(bench: Bench, at: int) -> None:
    drafter: Any = FailingDrafter(bench.engine.drafter, at)
    engine = lse_mlx.Engine(bench.engine.target, bench.engine.tokenizer, drafter)
    result = engine.generate(bench.prompt, max_tokens=24)
    assert result.token_ids == bench.said[:24]
    assert result.timings["spec_failures"] == 1
    assert "NaN" in result.timings["spec_failure"]
    assert result.timings["spec_steps"] == at - 1
    assert engine.stats().draft_failures == 1
    strict = replace(engine, strict_draft=True)
    session = strict.session()
    with pytest.raises(lse_mlx.DraftError, match="NaN"):
        strict.generate(bench.prompt, max_tokens=24, session=session)
    assert session.tokens == []
    again = strict.generate(bench.prompt, max_tokens=5, session=session, speculate=False)
    assert again.token_ids == bench.said[:5]


def test_state_of_one_session_is_not_in_another(bench: Bench) -> None:
    one, other = bench.engine.session(), bench.engine.session()
    for session in (one, other):
        bench.run(bench.asked(max_tokens=9), session=session)
    for a in one.state.arrays():
        for b in other.state.arrays():
            assert a is not b
            if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
                assert not np.may_share_memory(a, b)
