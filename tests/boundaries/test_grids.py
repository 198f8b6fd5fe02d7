"""Every end at every offset inside an accepted block is what one-token decoding gives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path as Folder
from typing import Any, Literal

import pytest

from lse_mlx.decode.session import Session
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.target.model import Target
from lse_mlx.target.tokenizer import Tokenizer
from tests.boundaries.asked import Asked
from tests.boundaries.drafts import knowing
from tests.boundaries.fast_tables import FastTarget, ReadingDrafter, assert_table_holds
from tests.boundaries.languages import Language, crossing, load_language
from tests.boundaries.one_token import Answer, LogitsOf, one_token, plain
from tests.boundaries.replies import Given, assert_answers, reply
from tests.boundaries.stepwise import TAPS, Stepwise
from tests.tiny_models import VOCAB, RecordingDrafter, random_prompt

START, TABLE_SEED = 7, 0
OFFSETS = range(1, 21)
"""The first token, which no draft can hold, two blocks of eight, and the beginning of a third."""
NEXT = 3
COUNT = OFFSETS[-1] + 8 + 1 + NEXT

Event = Literal["stop token", "max_tokens", "room", "short stop", "long stop", "cancel"]
EVENTS: tuple[Event, ...] = (
    "stop token",
    "max_tokens",
    "room",
    "short stop",
    "long stop",
    "cancel",
)
REASONS = {
    "stop token": "stop_token",
    "max_tokens": "max_tokens",
    "room": "context_full",
    "short stop": "stop_string",
    "long stop": "stop_string",
    "cancel": "cancelled",
}


@dataclass(frozen=True)
class Path:
    """A greedy reply long enough for every offset, and all that is needed to end it anywhere."""

    tokens: list[int]
    target: Any
    logits: LogitsOf
    assert_holds: Callable[[Session, list[int]], None]
    drafter: Callable[[list[int], int], Any]
    language: Language
    tokenizer: Tokenizer

    @property
    def prompt(self) -> list[int]:
        return self.tokens[:START]

    @property
    def said(self) -> list[int]:
        return self.tokens[START:]

    def ending(self, event: Event, offset: int) -> Asked:
        """A request that `event` ends at the reply's token number `offset`, counted from 1."""
        asked = Asked(self.prompt, top_logprobs=2)
        match event:
            case "stop token":
                return replace(asked, stop_tokens=frozenset([self.said[offset - 1]]))
            case "max_tokens":
                return replace(asked, max_tokens=offset)
            case "room":
                return replace(asked, room=offset)
            case "cancel":
                return replace(asked, cancel_at=offset)
            case "short stop":
                return replace(asked, stops=("never said", self._last_said(offset, 1)))
            case "long stop":
                return replace(asked, stops=(self._last_said(offset, 4), "never said"))

    def _last_said(self, offset: int, tokens: int) -> str:
        """The text of the last `tokens` tokens up to `offset`, as far as it is settled there."""
        before = self.language.settled(self.said[: max(0, offset - tokens)])
        return self.language.settled(self.said[:offset])[len(before) :]

    def session(self, right: int | None) -> Session:
        """With a drafter that is right for so many tokens, or with none."""
        return Session(self.target, None if right is None else self.drafter(self.tokens, right))


def path_of(folder: Folder, prompt: list[int], logits: LogitsOf, **rest: Any) -> Path:
    """What the target says after `prompt`, in a language in which each token ends a character."""
    said = [c.token for c in islice(plain(logits, Asked(prompt)), COUNT)]
    ended = said[: OFFSETS[-1]]
    assert len(set(ended)) == len(ended)  # each a stop token of its own
    language = crossing(ended, VOCAB)
    tokenizer = load_language(folder, language)
    return Path([*prompt, *said], logits=logits, language=language, tokenizer=tokenizer, **rest)


@pytest.fixture(scope="module")
def path(target: Target, stepwise: Stepwise, root: Folder) -> Path:
    """On the tiny hybrid."""

    def drafter(tokens: list[int], right: int) -> RecordingDrafter:
        return RecordingDrafter(ScriptedDrafter.right_for(tokens, right, VOCAB, taps=TAPS))

    return path_of(
        root / "hybrid path",
        random_prompt(START, 4),
        stepwise.logits,
        target=target,
        assert_holds=stepwise.assert_holds,
        drafter=drafter,
    )


@pytest.fixture(scope="module")
def table_path(root: Folder) -> Path:
    """On a table, whose states say the tokens."""
    table = FastTarget.random(0, VOCAB)
    return path_of(
        root / "table path",
        random_prompt(START, TABLE_SEED),
        table.logits,
        target=table,
        assert_holds=assert_table_holds,
        drafter=lambda tokens, right: ReadingDrafter(knowing(tokens, [right], VOCAB)),
    )


def answer_to(path: Path, event: Event, offset: int) -> tuple[Asked, Answer]:
    """The request and what one-token decoding gives, which ends where the test wants it to."""
    asked = path.ending(event, offset)
    answer = one_token(path.logits, asked, path.language)
    assert answer.reason == REASONS[event]
    assert len(answer.ids) == (offset - 1 if event == "stop token" else offset)
    assert answer.ids == path.said[: len(answer.ids)]
    return asked, answer


def assert_next_turn(path: Path, session: Session, held: int, speculate: bool) -> None:
    """The session goes on from what it holds, and says what a cold run says."""
    again = Asked(path.tokens[: held + 2], max_tokens=NEXT)
    given = reply(session, again, path.tokenizer, speculate)
    assert given.timings.prompt_cached_n == held
    assert_answers(given, one_token(path.logits, again, path.language), again)
    path.assert_holds(session, path.tokens[: held + 2 + NEXT - 1])


def accepted_by(offset_rows: int, right: int) -> int:
    """How many proposals were looked at and right, where `offset_rows` rows behind the prompt's were.

    Each pass looks at `right` accepted rows and one more, until the rows run out.
    """
    whole, rest = divmod(offset_rows, right + 1)
    return whole * right + min(rest, right)


def check_end(path: Path, event: Event, offset: int, right: int) -> None:
    asked, answer = answer_to(path, event, offset)
    session = path.session(right)
    given = reply(session, asked, path.tokenizer)
    assert_answers(given, answer, asked)
    assert sum(given.timings.accepted) == accepted_by(offset - 1, right)
    path.assert_holds(session, path.tokens[: answer.held])
    assert_next_turn(path, session, answer.held, speculate=True)


@pytest.mark.parametrize("right", range(8))
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("event", EVENTS)
def test_an_end_inside_a_block(table_path: Path, event: Event, offset: int, right: int) -> None:
    check_end(table_path, event, offset, right)


@pytest.mark.parametrize("right", range(8))
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(
    "events",
    [("stop token",), ("cancel",), ("max_tokens", "room"), ("short stop", "long stop")],
    ids=" or ".join,
)
def test_an_end_inside_a_block_of_the_hybrid(
    path: Path, events: tuple[Event, ...], offset: int, right: int
) -> None:
    """To the bit; of two ends of a kind one or the other, in turn."""
    check_end(path, events[(offset + right) % len(events)], offset, right)


@pytest.mark.parametrize("drafter", [False, True], ids=["alone", "beside a drafter"])
@pytest.mark.parametrize("offset", [1, 2, 3, 8, 9, 10, 20])
@pytest.mark.parametrize("event", EVENTS)
def test_an_end_of_a_plain_reply(path: Path, event: Event, offset: int, drafter: bool) -> None:
    asked, answer = answer_to(path, event, offset)
    session = path.session(7 if drafter else None)
    given = reply(session, asked, path.tokenizer, speculate=False)
    assert_answers(given, answer, asked)
    path.assert_holds(session, path.tokens[: answer.held])
    assert_next_turn(path, session, answer.held, speculate=drafter)


@pytest.mark.parametrize("right", [0, 3, 7])
@pytest.mark.parametrize("offset", [1, 2, 5, 9, 10, 20])
def test_log_probabilities_are_the_same_bits_as_in_plain_decoding(
    path: Path, offset: int, right: int
) -> None:
    asked = replace(path.ending("max_tokens", offset), top_logprobs=5)
    fast = reply(path.session(right), asked)
    alone = reply(path.session(None), asked)
    assert fast.logprobs == alone.logprobs


@pytest.mark.parametrize("right", [2, 7])
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5, 8, 9, 10, 17])
def test_of_two_ends_at_one_token_the_first_in_order_counts(
    path: Path, offset: int, right: int
) -> None:
    """Stop token, stop string, cancel, limit: each wins over those behind it."""
    every = [path.ending(event, offset) for event in EVENTS]
    stop, limit, room, string, _, cancel = every
    for asked, reason in (
        (replace(stop, stops=string.stops, cancel_at=offset, max_tokens=offset), "stop_token"),
        (replace(string, cancel_at=offset, max_tokens=offset, room=offset), "stop_string"),
        (replace(cancel, max_tokens=offset, room=offset), "cancelled"),
        (replace(limit, room=offset), "max_tokens"),
        (replace(room, max_tokens=offset + 1), "context_full"),
    ):
        session = path.session(right)
        given: Given = reply(session, asked, path.tokenizer)
        assert given.reason == reason
        answer = one_token(path.logits, asked, path.language)
        assert_answers(given, answer, asked)
        path.assert_holds(session, path.tokens[: answer.held])
