"""The rungs that decode prompts: they pass for the demo pair, and fail for what is wrong with another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.drafters.base import DraftContext, Drafter, Proposal, Uniform
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.engine import Engine
from lse_mlx.errors import DraftError
from lse_mlx.qualify import decoding
from lse_mlx.qualify.decoding import Decoding
from lse_mlx.qualify.prompts import demo_prompts
from lse_mlx.qualify.rung import CannotRun, Finding
from tests.decode.test_statistics import MUTANTS, judge_with

PROMPTS = demo_prompts()[:2]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "TOKENS", 16)


def with_drafter(engine: Engine, drafter: Drafter | None) -> Engine:
    return Engine(engine.target, engine.tokenizer, drafter, strict_draft=True)


def decoded(engine: Engine, held_out: Sequence[str] | None = PROMPTS) -> Decoding:
    return Decoding(engine, held_out, ["Say something."])


def test_the_demo_pair_is_of_use_and_changes_nothing(engine: Engine) -> None:
    both = decoded(engine)
    acceptance, equality = both.acceptance(), both.equality()
    assert acceptance.failure is None
    greedy = acceptance.figures["greedy"]
    assert greedy["tokens_per_pass"] >= 1.5
    assert len(greedy["acceptance_by_position"]) == 7
    # Greedy drafts overlap wholly or not at all, so the two counts are one.
    assert greedy["accepted"] == greedy["expected"]
    assert equality.failure is None
    assert equality.figures == {"prompts": 2, "tokens": 32, "exact": True, "differences": []}


def test_without_held_out_prompts_acceptance_cannot_be_run(engine: Engine) -> None:
    with pytest.raises(CannotRun, match="--prompts FILE"):
        decoded(engine, None).acceptance()


def test_equality_needs_no_held_out_prompts(engine: Engine) -> None:
    assert decoded(engine, None).equality().figures["prompts"] == 1


def test_a_drafter_that_is_never_right_fails(engine: Engine) -> None:
    wrong = ScriptedDrafter(lambda position, draft: [5] * 7)
    found = decoded(with_drafter(engine, wrong)).acceptance()
    assert found.failure == "A pass takes 1.00 tokens, fewer than 1.5."


def test_a_drafter_that_breaks_is_an_error(engine: Engine) -> None:
    broken = ScriptedDrafter.listed([])
    for rung in ("acceptance", "equality"):  # neither takes a reply of the target alone for one
        with pytest.raises(DraftError, match="not in the script"):
            getattr(decoded(with_drafter(engine, broken)), rung)()


@dataclass
class WorstContext:
    """Proposes the least likely candidates, and says that they were drawn."""

    inner: DraftContext

    @property
    def position(self) -> int:
        return self.inner.position

    def append(self, features: mx.array, first: int) -> None:
        self.inner.append(features, first)

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        drawn = self.inner.propose(anchor, temperature, uniform)
        worst = [int(q.ids[np.argmin(q.probs)]) for q in drawn.q]
        return replace(drawn, tokens=worst)


@dataclass(frozen=True)
class WorstDrafter:
    inner: Drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def new_context(self) -> WorstContext:
        return WorstContext(self.inner.new_context())


def test_a_q_that_drafts_are_not_drawn_from_fails(engine: Engine) -> None:
    assert engine.drafter is not None
    lying = with_drafter(engine, WorstDrafter(engine.drafter))  # type: ignore[arg-type]
    found = decoded(lying).acceptance()
    assert found.failure is not None
    assert "were to be expected" in found.failure


def accepting_always(engine: Engine, monkeypatch: pytest.MonkeyPatch, promised: bool) -> Finding:
    monkeypatch.setattr("lse_mlx.decode.loop.judge", judge_with(*MUTANTS["accepts always"]))
    monkeypatch.setattr(Decoding, "_exact", lambda self: promised)
    return decoded(engine, demo_prompts()[2:4]).equality()


def test_other_tokens_fail_where_equality_is_promised(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "NEAR_TIE", 1e9)
    found = accepting_always(engine, monkeypatch, promised=True)
    assert found.failure is not None
    first = found.figures["differences"][0]
    assert found.failure.startswith("replies to ")
    assert first["gap"] > 0


def test_where_it_is_not_promised_a_near_tie_is_reported_and_passes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "NEAR_TIE", 1e9)
    found = accepting_always(engine, monkeypatch, promised=False)
    assert found.failure is None
    assert "differ" in found.says


def test_where_it_is_not_promised_a_wide_gap_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "NEAR_TIE", 0.0)
    assert accepting_always(engine, monkeypatch, promised=False).failure is not None
