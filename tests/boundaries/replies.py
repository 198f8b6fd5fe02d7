"""Running the code under test: one reply with everything that it says, and the session after it."""

import re
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from lse_mlx.decode.loop import Request, Step, decode
from lse_mlx.decode.reply_text import ReplyText
from lse_mlx.decode.sampling import TokenLogprob
from lse_mlx.decode.session import Session
from lse_mlx.decode.stopping import FINISH_REASONS
from lse_mlx.decode.timings import Timings
from lse_mlx.target.tokenizer import Tokenizer
from tests.boundaries.asked import Asked
from tests.boundaries.languages import Language
from tests.boundaries.one_token import Answer

ROUNDING = 1e-12
"""How far the reference's log-probability may lie from the product's: both sum in float64, each in its
own order. Between two runs of the product there is no such allowance."""
UNJOINED = re.compile("[\U0001f1e6-\U0001f1ff]?|\u200d*(.[\u0301\U0001f3fd]*\u200d+)*", re.DOTALL)
"""Half a flag, or what a joiner joins to the next character, as far as the languages here go."""


@dataclass
class Given:
    """What a reply gave.

    pieces, counts: the text that each step gave to a reader, and the tokens emitted by then
    """

    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    reason: str | None = None
    stop_string: str | None = None
    logprobs: list[TokenLogprob] | None = None
    text: str = ""
    timings: Timings = field(default_factory=Timings)

    @property
    def finish(self) -> str:
        assert self.reason is not None
        return FINISH_REASONS[self.reason]  # pyright: ignore[reportArgumentType]


def steps_of(
    session: Session,
    request: Request,
    given: Given,
    tokenizer: Tokenizer | None = None,
    asked: Asked | None = None,
) -> Generator[Step]:
    """The steps of a reply; what they say is gathered in `given` as they are taken."""
    text = None
    if tokenizer is not None:
        assert asked is not None
        text = ReplyText(tokenizer.streaming(), asked.stops, asked.min_tokens)
    drafter = session.drafter if request.speculate else None
    given.timings = Timings(drafter.name, drafter.depth) if drafter else Timings()
    for step in decode(session, request, given.timings, text):
        assert given.reason is None
        given.ids += step.tokens
        given.counts.append(len(given.ids))
        given.reason = step.reason
        if request.top_logprobs is not None:
            given.logprobs = [*(given.logprobs or []), *(step.logprobs or [])]
            assert len(given.logprobs) == len(given.ids)
        if text is not None:
            given.pieces.append(text.piece())
            given.text, given.stop_string = text.text, text.stop_string
        assert given.timings.generated_n == len(given.ids)
        yield step


def reply(
    session: Session,
    asked: Asked,
    tokenizer: Tokenizer | None = None,
    speculate: bool = True,
    **options: Any,
) -> Given:
    """One whole reply; the options of `Asked.request`."""
    given = Given()
    for _ in steps_of(session, asked.request(speculate, **options), given, tokenizer, asked):
        pass
    return given


def assert_answers(given: Given, answer: Answer, asked: Asked) -> None:
    """The reply is what one-token decoding gives: ids, text, ends, usage and log-probabilities."""
    assert given.ids == answer.ids
    assert given.reason == answer.reason
    assert given.finish == answer.finish
    assert given.timings.generated_n == len(answer.ids)
    assert given.stop_string == answer.stop_string
    if given.pieces:
        assert given.text == answer.text
        assert "".join(given.pieces) == answer.text
    if asked.top_logprobs is not None:
        assert given.logprobs is not None or not answer.ids
        for told, one in zip(given.logprobs or [], answer.chosen, strict=True):
            logprob, top = one.logprob(asked.top_logprobs)
            assert told.token == one.token
            assert abs(told.logprob - logprob) <= ROUNDING
            assert [t for t, _ in told.top] == [t for t, _ in top]
            assert all(abs(a - b) <= ROUNDING for (_, a), (_, b) in zip(told.top, top, strict=True))


def assert_streamed(given: Given, asked: Asked, language: Language) -> None:
    """Each step gave all text that was settled by then, but for what waits for what may follow.

    That is the begin of a stop string, and before it an emoji with a joiner behind it, or half a
    flag.
    """
    shown = ""
    for piece, count in zip(given.pieces[:-1], given.counts[:-1], strict=True):
        shown += piece
        settled = language.settled(given.ids[:count])
        begun = [s[:n] for s in asked.stops for n in range(1, len(s)) if settled.endswith(s[:n])]
        final = settled[: len(settled) - max(map(len, begun), default=0)]
        assert final.startswith(shown)
        assert UNJOINED.fullmatch(final[len(shown) :])
