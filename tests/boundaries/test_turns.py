"""Whatever happened in a session, its next reply, state and drafter are those of a cold run."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import pytest

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import TargetError
from lse_mlx.target.model import Target
from lse_mlx.target.tokenizer import Tokenizer
from tests.boundaries.asked import Asked
from tests.boundaries.languages import Language
from tests.boundaries.one_token import one_token, plain
from tests.boundaries.replies import Given, assert_answers, reply, steps_of
from tests.boundaries.stepwise import TAPS, Stepwise
from tests.decode.runs import Watched
from tests.tiny_models import VOCAB, RecordingDrafter, random_prompt

START, PIECE, MOST = 11, 4, 10
QUESTIONS_OF_THE_PROMPT = 3
"""How often the caller is asked whether to cancel before the pieces of the prompt."""

GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.5, top_p=0.95)


@dataclass
class Bench:
    """A session on the tiny hybrid with a drafter that knows the greedy reply, 3 tokens at a time."""

    target: Target
    stepwise: Stepwise
    tokenizer: Tokenizer
    language: Language
    known: list[int]
    fault: Exception | None = None
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.session = self.cold()

    def cold(self) -> Session:
        scripted = ScriptedDrafter.right_for(self.known, 3, VOCAB, taps=TAPS)
        watched: Any = Watched(self.target, self._before)
        return Session(watched, RecordingDrafter(scripted))

    def _before(self, name: str, tokens: list[int]) -> None:
        if name == "verify" and self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault

    def asked(self, sampling: Sampling, seed: int = 1) -> Asked:
        return Asked(self.known[:START], MOST, sampling=sampling, seed=seed)

    def run(self, asked: Asked, session: Session | None = None, **how: Any) -> Given:
        how.setdefault("prefill_rows", PIECE)
        return reply(session or self.session, asked, self.tokenizer, **how)

    def assert_cold(self, asked: Asked, speculate: bool) -> Given:
        """The next reply of the session is that of a new one, and so is all that it leaves."""
        fresh = self.cold()
        warm, cold = (self.run(asked, s, speculate=speculate) for s in (self.session, fresh))
        assert (warm.ids, warm.text, warm.reason) == (cold.ids, cold.text, cold.reason)
        assert warm.logprobs == cold.logprobs
        assert warm.timings.accepted == cold.timings.accepted
        assert warm.timings.draft_failures == 0
        assert self.session.tokens == fresh.tokens
        self.stepwise.assert_holds(self.session, fresh.tokens)
        if asked.sampling.temperature == 0 or not speculate:
            assert_answers(warm, one_token(self.stepwise.logits, asked, self.language), asked)
        return warm


@pytest.fixture(scope="module")
def known(stepwise: Stepwise) -> list[int]:
    prompt = random_prompt(START, 21)
    return [*prompt, *(c.token for c in islice(plain(stepwise.logits, Asked(prompt)), 40))]


@pytest.fixture
def bench(
    target: Target,
    stepwise: Stepwise,
    tokenizer: Tokenizer,
    language: Language,
    known: list[int],
) -> Bench:
    return Bench(target, stepwise, tokenizer, language, known)


def finished(bench: Bench, asked: Asked) -> None:
    bench.run(asked)


def finished_plain(bench: Bench, asked: Asked) -> None:
    bench.run(asked, speculate=False)


def cancelled_at(question: int) -> Callable[[Bench, Asked], None]:
    def before(bench: Bench, asked: Asked) -> None:
        questions = iter(range(100))
        given = bench.run(asked, cancelled=lambda emitted: next(questions) == question)
        assert given.reason == "cancelled"

    return before


def dropped(bench: Bench, asked: Asked) -> None:
    """The reader went away after two steps."""
    steps = steps_of(bench.session, asked.request(prefill_rows=PIECE), Given())
    next(steps)
    next(steps)
    steps.close()


def failed(bench: Bench, asked: Asked) -> None:
    bench.fault = RuntimeError("no more memory")
    with pytest.raises(TargetError):
        bench.run(asked)


def many(bench: Bench, asked: Asked) -> None:
    """Turns of every kind, one after the other."""
    for before in (finished, finished_plain, dropped, failed, cancelled_at(4), finished):
        before(bench, asked)
        grown = [*bench.session.tokens, 5]
        bench.run(replace(asked, prompt=grown, max_tokens=3, seed=9))


BEFORE: dict[str, Callable[[Bench, Asked], None]] = {
    "a reply": finished,
    "a plain reply": finished_plain,
    "a cancel in the prompt": cancelled_at(1),
    "a cancel before a draft": cancelled_at(QUESTIONS_OF_THE_PROMPT + 1),
    "a cancel before a verify pass": cancelled_at(QUESTIONS_OF_THE_PROMPT + 2),
    "a cancel inside a block": cancelled_at(QUESTIONS_OF_THE_PROMPT + 3),
    "a dropped reply": dropped,
    "a failure": failed,
    "many turns": many,
}
each_before = pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE.keys())
each_mode = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
each_draft = pytest.mark.parametrize("speculate", [True, False], ids=["drafting", "plain"])


@each_before
@each_mode
@each_draft
def test_a_prompt_that_goes_on(
    bench: Bench, before: Callable[[Bench, Asked], None], sampling: Sampling, speculate: bool
) -> None:
    before(bench, bench.asked(sampling))
    held = list(bench.session.tokens)
    # As far as the greedy reply went, the drafter knows how it goes on.
    on_path = held == bench.known[: len(held)]
    more = bench.known[len(held) : len(held) + 2] if on_path else [8, 9]
    asked = replace(bench.asked(sampling, seed=2), prompt=[*held, *more], top_logprobs=2)
    again = bench.assert_cold(asked, speculate)
    assert again.timings.prompt_cached_n == len(held)
    # And the turn after that, with the drafter, whose context has to be whole.
    longer = [*bench.session.tokens, *again.ids[-1:], 17]
    third = bench.assert_cold(replace(asked, prompt=longer, seed=3), True)
    assert third.timings.prompt_cached_n == len(longer) - 2


@each_before
@each_mode
@each_draft
def test_a_prompt_that_leaves_it_inside(
    bench: Bench, before: Callable[[Bench, Asked], None], sampling: Sampling, speculate: bool
) -> None:
    before(bench, bench.asked(sampling))
    held = list(bench.session.tokens)
    at = len(held) - 1 if sampling is SAMPLED else len(held) // 2
    other = (held[at] + 1) % VOCAB if held else 3
    prompt = [*held[: max(at, 0)], other, *held[at + 1 :], 8, 9]
    again = bench.assert_cold(replace(bench.asked(sampling, seed=4), prompt=prompt), speculate)
    assert again.timings.prompt_cached_n == 0


@each_before
@each_mode
@each_draft
def test_the_same_again(
    bench: Bench, before: Callable[[Bench, Asked], None], sampling: Sampling, speculate: bool
) -> None:
    """Also where the session holds the whole prompt, so that nothing seems left to read."""
    asked = bench.asked(sampling)
    before(bench, asked)
    held = len(bench.session.tokens)
    replies = [bench.assert_cold(asked, speculate) for _ in range(2)]
    assert all(r.ids == replies[0].ids for r in replies)
    assert [r.timings.prompt_n for r in replies[1:]] == [START]
    assert replies[0].timings.prompt_cached_n == (held if held < START else 0)
