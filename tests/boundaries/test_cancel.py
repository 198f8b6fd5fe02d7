"""The caller's word at every moment it is asked for: inside the prompt, before a draft, before a
verify pass, and after each token."""

from dataclasses import dataclass, field
from itertools import islice

import pytest

from lse_mlx.decode.session import Session
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.target.model import Target
from lse_mlx.target.tokenizer import Tokenizer
from tests.boundaries.asked import Asked
from tests.boundaries.languages import Language
from tests.boundaries.one_token import one_token, plain
from tests.boundaries.replies import Given, assert_answers, reply
from tests.boundaries.stepwise import TAPS, Stepwise
from tests.decode.runs import Watched
from tests.tiny_models import VOCAB, RecordingDrafter, random_prompt

START, PIECE, COUNT = 11, 4, 30
MOST = 12


@dataclass
class Word:
    """Says yes at its `at`-th question, counted from 0, and to every later one; writes all down."""

    at: int | None
    asked: list[int] = field(default_factory=list)
    seen: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, emitted: int) -> bool:
        self.asked.append(emitted)
        self.seen.append(("asked", emitted))
        return self.at is not None and len(self.asked) > self.at

    def before(self, name: str, tokens: list[int]) -> None:
        self.seen.append((name, len(tokens)))


@pytest.fixture(scope="module")
def known(stepwise: Stepwise) -> list[int]:
    prompt = random_prompt(START, 9)
    return [*prompt, *(c.token for c in islice(plain(stepwise.logits, Asked(prompt)), COUNT))]


def session_of(target: Target, known: list[int], right: int | None, word: Word) -> Session:
    """With a drafter that is right for `right` tokens, or with none."""
    drafter = None
    if right is not None:
        drafter = RecordingDrafter(ScriptedDrafter.right_for(known, right, VOCAB, taps=TAPS))
    return Session(Watched(target, word.before), drafter)  # pyright: ignore[reportArgumentType]


def run(session: Session, asked: Asked, tokenizer: Tokenizer, word: Word | None = None) -> Given:
    return reply(session, asked, tokenizer, prefill_rows=PIECE, cancelled=word)


each_drafter = pytest.mark.parametrize("right", [None, 0, 1, 3, 7])


@each_drafter
def test_when_the_caller_is_asked(
    target: Target, known: list[int], tokenizer: Tokenizer, right: int | None
) -> None:
    """Before each piece of the prompt; after each token; before each draft; before each verify."""
    word = Word(None)
    session = session_of(target, known, right, word)
    given = run(session, Asked(known[:START], max_tokens=MOST), tokenizer, word)
    assert given.ids == known[START : START + MOST]
    expected: list[tuple[str, int]] = []
    for at in range(0, START, PIECE):
        expected += [("asked", 0), ("advance", min(PIECE, START - at))]
    expected.append(("asked", 1))
    emitted = 1
    while emitted < MOST:
        rows = 1 if right is None else min(8, MOST - emitted)
        expected += [("asked", emitted), ("asked", emitted), ("verify", rows)]
        new = min((right or 0) + 1, MOST - emitted)
        expected += [("asked", emitted + n) for n in range(1, new + 1)]
        emitted += new
    assert word.seen == expected


@each_drafter
def test_a_yes_at_every_question(
    target: Target,
    stepwise: Stepwise,
    known: list[int],
    language: Language,
    tokenizer: Tokenizer,
    right: int | None,
) -> None:
    """The reply is what was emitted by then, the session a cold run's, and the next turn right."""
    asked = Asked(known[:START], max_tokens=MOST)
    every = Word(None)
    run(session_of(target, known, right, every), asked, tokenizer, every)
    for at, emitted in enumerate(every.asked):
        word = Word(at)
        session = session_of(target, known, right, word)
        given = run(session, asked, tokenizer, word)
        assert len(word.asked) == at + 1
        assert given.ids == known[START : START + emitted]
        assert (given.reason, given.finish) == ("cancelled", "cancelled")
        assert given.text == "".join(given.pieces) == language.whole(given.ids)
        held = min(at * PIECE, START) if not emitted else START + emitted - 1
        stepwise.assert_holds(session, known[:held])
        again = Asked(known[: START + emitted], max_tokens=3)
        more = run(session, again, tokenizer)
        assert_answers(more, one_token(stepwise.logits, again, language), again)
        assert more.timings.prompt_cached_n == held
        stepwise.assert_holds(session, known[: START + emitted + 2])


@pytest.mark.parametrize("emitted", [0, 1, 5])
@pytest.mark.parametrize("speculate", [False, True])
def test_a_callers_own_failure_is_the_callers(
    target: Target,
    stepwise: Stepwise,
    known: list[int],
    tokenizer: Tokenizer,
    emitted: int,
    speculate: bool,
) -> None:
    """It is not taken for one of the target, and the session can be used."""

    class Mine(RuntimeError):
        pass

    def cancelled(count: int) -> bool:
        if count == emitted:
            raise Mine
        return False

    session = session_of(target, known, 3, Word(None))
    asked = Asked(known[:START], max_tokens=MOST)
    with pytest.raises(Mine):
        reply(session, asked, tokenizer, speculate, cancelled=cancelled)
    assert reply(session, asked, tokenizer).ids == known[START : START + MOST]
    stepwise.assert_holds(session, known[: START + MOST - 1])
