"""A failure inside a cycle, seen from outside: what was said, what is left, and the next request."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import DraftError, KernelError, LseError, TargetError
from lse_mlx.target.model import Pass, Target
from lse_mlx.target.tokenizer import Tokenizer
from tests.boundaries.asked import Asked
from tests.boundaries.drafts import guessing
from tests.boundaries.fast_tables import FastTarget, ReadingContext, ReadingDrafter, features_of
from tests.boundaries.languages import Language
from tests.boundaries.one_token import Answer, one_token, plain, until_the_end
from tests.boundaries.replies import Given, assert_answers, reply, steps_of
from tests.boundaries.slow_walk import Drafted, walked
from tests.boundaries.stepwise import TAPS, Stepwise
from tests.decode.runs import Watched, assert_empty, with_logit
from tests.tiny_models import VOCAB, RecordingContext, RecordingDrafter, random_prompt

START, PIECE, MOST, RIGHT = 9, 4, 18, 3


@dataclass
class Path:
    """A greedy reply, and one-token decoding's word on it."""

    target: Target
    stepwise: Stepwise
    language: Language
    tokenizer: Tokenizer
    tokens: list[int]

    @property
    def asked(self) -> Asked:
        return Asked(self.tokens[:START], MOST, top_logprobs=1)

    @property
    def answer(self) -> Answer:
        return one_token(self.stepwise.logits, self.asked, self.language)

    def scripted(self) -> ScriptedDrafter:
        return ScriptedDrafter.right_for(self.tokens, RIGHT, VOCAB, taps=TAPS)

    def assert_next_is_right(self, session: Session, held: int) -> None:
        """From what the session holds, with the drafter at work again."""
        asked = replace(self.asked, prompt=self.tokens[: max(START, held + 2)], max_tokens=6)
        given = reply(session, asked, self.tokenizer)
        assert_answers(given, one_token(self.stepwise.logits, asked, self.language), asked)
        assert given.timings.passes > 0
        assert given.timings.draft_failures == 0
        self.stepwise.assert_holds(session, self.tokens[: len(asked.prompt) + 5])


@pytest.fixture(scope="module")
def path(target: Target, stepwise: Stepwise, language: Language, tokenizer: Tokenizer) -> Path:
    prompt = random_prompt(START, 33)
    said = [c.token for c in islice(plain(stepwise.logits, Asked(prompt)), 40)]
    return Path(target, stepwise, language, tokenizer, [*prompt, *said])


@dataclass
class Trouble:
    """Strikes once: at the given pass of the kind, by an error or by what it does to the answer."""

    kind: str
    use: int
    error: BaseException | None = None
    spoil: Callable[[Pass], Pass] = lambda answer: answer
    uses: int = 0

    def before(self, name: str, tokens: list[int]) -> None:
        self.uses += name == self.kind
        if self._now(name) and self.error is not None:
            raise self.error

    def after(self, name: str, answer: Pass) -> Pass:
        return self.spoil(answer) if self._now(name) else answer

    def _now(self, name: str) -> bool:
        return name == self.kind and self.uses == self.use


def in_row(row: int, value: float) -> Callable[[Pass], Pass]:
    return lambda answer: with_logit(answer, min(row, len(answer.logits) - 1), value)


TARGET_TROUBLES = {
    "NaN after the prompt": Trouble("advance", 3, spoil=in_row(0, math.nan)),
    "inf after the prompt": Trouble("advance", 3, spoil=in_row(0, math.inf)),
    "NaN in row 0": Trouble("verify", 2, spoil=in_row(0, math.nan)),
    "NaN in row 2": Trouble("verify", 2, spoil=in_row(2, math.nan)),
    "inf in the row that rejects": Trouble("verify", 3, spoil=in_row(RIGHT, math.inf)),
    "an error in the prompt": Trouble("advance", 2, RuntimeError("[matmul] failed. More.")),
    "no memory in the prompt": Trouble("advance", 1, MemoryError()),
    "an error in a cycle": Trouble("verify", 1, RuntimeError("[kernel] launch failed")),
    "no memory in a cycle": Trouble("verify", 3, MemoryError()),
    "a refused kernel": Trouble("verify", 2, KernelError("topk cannot run: load without it.")),
}


@pytest.mark.parametrize("trouble", TARGET_TROUBLES.values(), ids=TARGET_TROUBLES.keys())
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("speculate", [True, False], ids=["drafting", "plain"])
def test_a_failing_target(path: Path, trouble: Trouble, strict: bool, speculate: bool) -> None:
    """The reply ends with an error, nothing that was not verified is said, and the next is right."""
    struck = replace(trouble, uses=0)
    watched: Any = Watched(path.target, struck.before, struck.after)
    session = Session(watched, RecordingDrafter(path.scripted()))
    other = Session(path.target, RecordingDrafter(path.scripted()))
    reply(other, replace(path.asked, max_tokens=5), path.tokenizer)
    given = Given()
    request = path.asked.request(speculate, PIECE, strict)
    with pytest.raises(LseError) as raised:
        list(steps_of(session, request, given, path.tokenizer, path.asked))
    wanted = KernelError if isinstance(trouble.error, KernelError) else TargetError
    assert type(raised.value) is wanted
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)
    assert given.ids == path.answer.ids[: len(given.ids)]
    assert path.answer.text.startswith("".join(given.pieces))
    assert given.reason is None
    if trouble.kind == "verify":
        rows = (trouble.use - 1) * ((RIGHT if speculate else 0) + 1)
        assert len(given.ids) == 1 + rows  # all that earlier passes verified, and no more
    assert_empty(session)
    path.assert_next_is_right(session, 0)
    path.assert_next_is_right(other, START + 4)


@pytest.mark.parametrize("speculate", [True, False], ids=["drafting", "plain"])
def test_rows_that_nobody_looks_at_may_hold_anything(path: Path, speculate: bool) -> None:
    def after(name: str, answer: Pass) -> Pass:
        return with_logit(answer, RIGHT + 1, math.nan) if len(answer.logits) > RIGHT + 1 else answer

    watched: Any = Watched(path.target, after=after)
    session = Session(watched, RecordingDrafter(path.scripted()))
    assert_answers(reply(session, path.asked, path.tokenizer, speculate), path.answer, path.asked)


@dataclass
class Struck(RecordingContext):
    """A context that fails once, in `append` or in `propose`; it may also fail to be made."""

    drafter: "StruckDrafter | None" = None

    def append(self, features: mx.array, first: int) -> None:
        assert self.drafter is not None
        self.drafter.use("append")
        super().append(features, first)

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        assert self.drafter is not None
        malformed = self.drafter.use("propose")
        proposal = super().propose(anchor, temperature, uniform)
        return proposal if malformed is None else malformed(proposal)


Malform = Callable[[Proposal], Proposal]


@dataclass(frozen=True)
class StruckDrafter(RecordingDrafter):
    kind: str = "propose"
    at: int = 1
    trouble: BaseException | Malform = DraftError("no scores")
    uses: tuple[list[str], ...] = ()

    def use(self, kind: str) -> Malform | None:
        self.uses[0].append(kind)
        if kind != self.kind or self.uses[0].count(kind) != self.at:
            return None
        if isinstance(self.trouble, BaseException):
            raise self.trouble
        return self.trouble

    def new_context(self) -> Struck:
        self.use("new_context")
        return Struck(self.scripted.new_context(), drafter=self)


def q_of(probs: list[float], ids: list[int] | None = None) -> Malform:
    """Every token drawn from the same q, which is no distribution or not one of that token."""

    def malformed(p: Proposal) -> Proposal:
        listed = ids or [p.tokens[0], *range(len(probs) - 1)]
        return Proposal(p.tokens, [Distribution(np.array(listed), np.array(probs))] * len(p.tokens))

    return malformed


DRAFTER_TROUBLES: dict[str, BaseException | Malform] = {
    "DraftError": DraftError("The scores are not finite: check the drafter."),
    "RuntimeError": RuntimeError("[matmul] shapes"),
    "MemoryError": MemoryError(),
    "FloatingPointError": FloatingPointError("overflow"),
    "IndexError": IndexError("list index out of range"),
    "too many": lambda p: Proposal.certain([5] * 8),
    "outside": lambda p: Proposal.certain([*p.tokens[:2], VOCAB]),
    "negative": lambda p: Proposal.certain([-1]),
    "fewer q": lambda p: Proposal(p.tokens, p.q[:-1]),
    "q of another token": lambda p: Proposal(p.tokens[:2], [p.q[1], p.q[0]]),
    "q sums to 2": q_of([1.0, 1.0]),
    "negative q": q_of([1.5, -0.5]),
    "q of NaN": q_of([math.nan, 1.0]),
    "q of inf": q_of([math.inf, 0.0]),
    "q names a token twice": q_of([0.5, 0.25, 0.25], [5, 5, 7]),
}
PROPOSALS = [pytest.param("propose", at, id=f"draft {at}") for at in (1, 3)]
CONTEXTS = [pytest.param("new_context", 1, id="context")]
APPENDS = [pytest.param("append", at, id=f"append {at}") for at in (1, 3, 4, 6)]


def struck(path: Path, kind: str, at: int, trouble: BaseException | Malform) -> Session:
    drafter = StruckDrafter(path.scripted(), kind=kind, at=at, trouble=trouble, uses=([],))
    return Session(path.target, drafter)


def assert_falls_back(path: Path, session: Session) -> None:
    given = reply(session, path.asked, path.tokenizer, prefill_rows=PIECE)
    assert_answers(given, path.answer, path.asked)
    told = given.timings.as_dict()
    assert told["spec_failures"] == 1
    assert told["spec_failure"]
    assert "\n" not in told["spec_failure"]
    held = path.tokens[: path.answer.held]
    assert session.tokens == held
    path.stepwise.assert_state(session.state, held)
    path.assert_next_is_right(session, len(held))


@pytest.mark.parametrize("trouble", DRAFTER_TROUBLES.values(), ids=DRAFTER_TROUBLES.keys())
@pytest.mark.parametrize(("kind", "at"), PROPOSALS)
def test_a_failing_draft(path: Path, kind: str, at: int, trouble: BaseException | Malform) -> None:
    """The reply goes on without, to the same end; the failure is counted and told."""
    assert_falls_back(path, struck(path, kind, at, trouble))


ERRORS = {k: v for k, v in DRAFTER_TROUBLES.items() if isinstance(v, BaseException)}


@pytest.mark.parametrize("trouble", ERRORS.values(), ids=ERRORS.keys())
@pytest.mark.parametrize(("kind", "at"), [*CONTEXTS, *APPENDS])
def test_a_drafter_that_cannot_follow(
    path: Path, kind: str, at: int, trouble: BaseException
) -> None:
    assert_falls_back(path, struck(path, kind, at, trouble))


@pytest.mark.parametrize(
    ("kind", "at", "name"),
    [
        *(("propose", 3, name) for name in DRAFTER_TROUBLES),
        *(("append", at, name) for name in ERRORS for at in (1, 6)),
        *(("new_context", 1, name) for name in ERRORS),
    ],
)
def test_a_failing_drafter_where_drafting_is_strict(
    path: Path, kind: str, at: int, name: str
) -> None:
    session, given = struck(path, kind, at, DRAFTER_TROUBLES[name]), Given()
    request = path.asked.request(prefill_rows=PIECE, strict_draft=True)
    with pytest.raises(DraftError) as raised:
        list(steps_of(session, request, given, path.tokenizer, path.asked))
    assert "\n" not in str(raised.value)
    assert given.ids == path.answer.ids[: len(given.ids)]
    assert_empty(session)
    path.assert_next_is_right(session, 0)


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("seed", range(6))
def test_a_sampled_reply_goes_on_by_the_target_alone(table: FastTarget, seed: int, at: int) -> None:
    """After the failure each token is the target's own draw, by the seed's own uniforms."""
    vocab, kind = table.vocab_size, guessing(seed, table.vocab_size)

    def until(tokens: list[int], drafts: int, uniform: Uniform) -> Drafted:
        return [] if drafts >= at else kind(tokens, drafts, uniform)

    def failing(tokens: list[int], drafts: int, uniform: Uniform) -> Drafted:
        if drafts == at:
            raise RuntimeError("gone")
        return kind(tokens, drafts, uniform)

    asked = Asked([seed % vocab, 3], max_tokens=14, sampling=Sampling(0.8), seed=seed)
    asked = replace(asked, presence=0.5, frequency=0.25, repetition=1.2)
    answer = until_the_end(walked(table.logits, asked, until), asked, None)
    session: Any = Session(table, ReadingDrafter(failing))  # pyright: ignore
    given = reply(session, asked)
    assert_answers(given, answer, asked)
    assert given.timings.draft_failures == (given.timings.passes >= at)
    again = replace(asked, prompt=[*asked.prompt, *answer.ids, 7], max_tokens=1)
    assert_answers(reply(session, again), one_token(table.logits, again), again)
    assert isinstance(session.context, ReadingContext)
    assert session.context.rows == features_of(again.prompt).tolist()
