"""However a reply ends, it has the right tokens, and the session is a cold run's."""

import pytest

from lse_mlx.decode.session import Session
from lse_mlx.target.model import Target
from tests.decode.runs import (
    Cold,
    Watched,
    assert_empty,
    known_sequence,
    request,
    run,
    speculating,
    start,
)
from tests.tiny_models import random_prompt

START, COUNT = 7, 19
OFFSETS = range(18)
"""Of a reply: its first token, a whole block of eight, the next one, and one more."""


@pytest.fixture(scope="module")
def cold(target: Target) -> Cold:
    held = known_sequence(target, random_prompt(START, 4), COUNT)
    assert len(set(held.tokens[START:])) == COUNT  # each can be a stop token of its own
    return held


each_draft = pytest.mark.parametrize("right", [0, 2, 7])


def reply_of(cold: Cold) -> list[int]:
    return cold.tokens[START:]


@each_draft
@pytest.mark.parametrize("offset", OFFSETS)
def test_a_stop_token_at_every_offset(target: Target, cold: Cold, right: int, offset: int) -> None:
    session = speculating(target, cold.tokens, right)
    reply = run(session, cold.tokens[:START], stops=[reply_of(cold)[offset]])
    assert reply.tokens == reply_of(cold)[:offset]
    assert reply.reason == "stop_token"
    # The row that answered the stop token is committed: it read the last token emitted.
    cold.assert_holds(session, START + offset)


@each_draft
@pytest.mark.parametrize("limit", ["max_tokens", "context_full"])
@pytest.mark.parametrize("offset", OFFSETS)
def test_a_limit_at_every_offset(
    target: Target, cold: Cold, right: int, limit: str, offset: int
) -> None:
    session = speculating(target, cold.tokens, right)
    most = {"max_tokens" if limit == "max_tokens" else "room": offset + 1}
    reply = run(session, cold.tokens[:START], **most)
    assert reply.tokens == reply_of(cold)[: offset + 1]
    assert reply.reason == limit
    # The last token is emitted, but no pass has read it.
    cold.assert_holds(session, START + offset)


@pytest.mark.parametrize("offset", [0, 3, 8, 17])
@pytest.mark.parametrize("end", ["stop", "limit"])
def test_plain_replies_end_alike(target: Target, cold: Cold, offset: int, end: str) -> None:
    session = Session(target, None)
    options = {"stops": [reply_of(cold)[offset]]} if end == "stop" else {"max_tokens": offset + 1}
    reply = run(session, cold.tokens[:START], **options)
    assert reply.tokens == reply_of(cold)[: offset + (end == "limit")]
    cold.assert_holds(session, START + offset)


def test_the_last_token_allowed_may_be_a_stop_token(target: Target, cold: Cold) -> None:
    for at in (0, 8, 9):
        session = speculating(target, cold.tokens)
        reply = run(
            session, cold.tokens[:START], stops=[reply_of(cold)[at]], max_tokens=at + 1, room=at + 1
        )
        assert (reply.tokens, reply.reason) == (reply_of(cold)[:at], "stop_token")


@each_draft
@pytest.mark.parametrize("room", range(1, 19))
def test_no_pass_reaches_beyond_the_context(
    target: Target, cold: Cold, right: int, room: int
) -> None:
    position = 0

    def seen(name: str, tokens: list[int]) -> None:
        nonlocal position
        position = session.state.position + len(tokens)
        # What is verified can at most be the last token that the context holds.
        assert position <= START + room - 1 or name == "advance"

    session = speculating(Watched(target, seen), cold.tokens, right)
    run(session, cold.tokens[:START], room=room)
    assert session.state.position == START + room - 1


def test_near_the_limit_fewer_rows_are_verified(target: Target, cold: Cold) -> None:
    rows: list[int] = []

    def seen(name: str, tokens: list[int]) -> None:
        if name == "verify":
            rows.append(len(tokens))

    for most in range(1, 19):
        rows.clear()
        session = speculating(Watched(target, seen), cold.tokens)
        run(session, cold.tokens[:START], max_tokens=most)
        # One token comes with the prompt, then blocks of eight, then what is left.
        whole, rest = divmod(most - 1, 8)
        assert rows == [8] * whole + [rest] * (rest > 0)


@each_draft
def test_closing_at_any_step_leaves_a_session_that_goes_on(
    target: Target, cold: Cold, right: int
) -> None:
    asked = request(cold.tokens[:START], COUNT if right else 5)
    whole = len(list(start(speculating(target, cold.tokens, right), asked)[0]))
    for stop_at in range(1, whole + 1):
        session = speculating(target, cold.tokens, right)
        steps, _ = start(session, asked)
        emitted = [t for _ in range(stop_at) for t in next(steps).tokens]
        steps.close()
        held = START + len(emitted) - 1
        cold.assert_holds(session, held)
        if held + 2 >= len(cold.tokens):
            continue
        more = run(session, cold.tokens[: held + 2], max_tokens=len(cold.tokens) - held - 2)
        assert more.timings.prompt_cached_n == held
        assert more.tokens == cold.tokens[held + 2 :]
        cold.assert_holds(session, len(cold.tokens) - 1)


def test_a_consumer_that_fails_between_steps_leaves_the_session_whole(
    target: Target, cold: Cold
) -> None:
    session = speculating(target, cold.tokens)

    def consume() -> None:
        for _ in start(session, request(cold.tokens[:START], COUNT))[0]:
            if len(session.tokens) > START:
                raise LookupError("the reader is gone")

    with pytest.raises(LookupError):
        consume()
    cold.assert_holds(session, START + 8)


def test_a_reply_never_asked_for_does_nothing(target: Target, cold: Cold) -> None:
    session = speculating(target, cold.tokens)
    steps, _ = start(session, request(cold.tokens[:START], COUNT))
    steps.close()
    assert_empty(session)
