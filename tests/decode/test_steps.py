"""One step of a session runs at a time, and what a step gives is the caller's to change."""

from collections.abc import Callable
from threading import Event, Thread

import pytest

from lse_mlx.decode.session import Session
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import RequestError
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

START, COUNT = 7, 24
AT_WORK = "at work on another reply"


@pytest.fixture(scope="module")
def cold(target: Target) -> Cold:
    return known_sequence(target, random_prompt(START, 4), COUNT)


def asks_of(target: Target, cold: Cold) -> int:
    """How often the caller is asked in a reply of three pieces of a prompt and 20 tokens."""
    asked: list[int] = []
    run(
        speculating(target, cold.tokens, 3),
        cold.tokens[:START],
        max_tokens=20,
        prefill_rows=3,
        cancelled=lambda emitted: bool(asked.append(emitted)),
    )
    return len(asked)


def at_ask(number: int, act: Callable[[], object]) -> Callable[[int], bool]:
    """A caller that does something when it is asked for the given time, and never cancels."""
    asked = 0

    def cancelled(emitted: int) -> bool:
        nonlocal asked
        asked += 1
        if asked == number:
            act()
        return False

    return cancelled


def assert_right_after(session: Session, cold: Cold) -> None:
    again = run(session, cold.tokens[: START + 3], max_tokens=COUNT - 3)
    assert again.tokens == cold.tokens[START + 3 :]
    cold.assert_holds(session, START + COUNT - 1)


def test_a_reply_cannot_begin_in_the_middle_of_anothers_step(target: Target, cold: Cold) -> None:
    for number in range(1, asks_of(target, cold) + 1):
        session = speculating(target, cold.tokens, 3)
        refused: list[bool] = []

        def begin(session: Session = session, refused: list[bool] = refused) -> None:
            with pytest.raises(RequestError, match=AT_WORK):
                run(session, cold.tokens[: START + 5], max_tokens=5)
            refused.append(True)

        reply = run(
            session,
            cold.tokens[:START],
            max_tokens=20,
            prefill_rows=3,
            cancelled=at_ask(number, begin),
        )
        assert refused == [True]
        assert reply.tokens == cold.tokens[START : START + 20]
        cold.assert_holds(session, START + 19)


@pytest.mark.parametrize("error", [GeneratorExit(), RequestError("of another one")], ids=repr)
def test_whatever_a_caller_raises_inside_a_step_leaves_nothing_behind(
    target: Target, cold: Cold, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    for number in range(1, asks_of(target, cold) + 1):
        session = speculating(target, cold.tokens, 3)
        with pytest.raises(type(error)):
            run(
                session,
                cold.tokens[:START],
                max_tokens=20,
                prefill_rows=3,
                cancelled=at_ask(number, fail),
            )
        assert_empty(session)
        assert_right_after(session, cold)


def test_a_reply_of_another_thread_is_refused_while_a_step_runs(target: Target, cold: Cold) -> None:
    inside, go_on = Event(), Event()

    def hold(name: str, tokens: list[int]) -> None:
        if name == "verify" and not inside.is_set():
            inside.set()
            assert go_on.wait(60)

    drafter = ScriptedDrafter.right(cold.tokens)
    session = Session(Watched(target, hold), drafter)
    tokens: list[int] = []
    first = Thread(
        target=lambda: tokens.extend(run(session, cold.tokens[:START], max_tokens=20).tokens)
    )
    first.start()
    assert inside.wait(60)
    with pytest.raises(RequestError, match=AT_WORK):
        run(session, cold.tokens[:START], max_tokens=20)
    go_on.set()
    first.join()
    assert tokens == cold.tokens[START : START + 20]
    cold.assert_holds(session, START + 19)


@pytest.mark.parametrize("speculate", [False, True])
def test_what_a_step_gives_may_be_changed(target: Target, cold: Cold, speculate: bool) -> None:
    session = speculating(target, cold.tokens, 3)
    steps, _ = start(session, request(cold.tokens[:START], 20, speculate=speculate))
    said: list[int] = []
    for step in steps:
        while step.tokens:
            said.append(step.tokens.pop(0))
    assert said == cold.tokens[START : START + 20]
    cold.assert_holds(session, START + 19)


@pytest.mark.parametrize("speculate", [False, True])
def test_a_whole_reply_stays_so_when_the_next_one_begins_at_its_last_step(
    target: Target, cold: Cold, speculate: bool
) -> None:
    session = speculating(target, cold.tokens, 3)
    steps, _ = start(session, request(cold.tokens[:START], 6, speculate=speculate))
    said: list[int] = []
    for step in steps:
        said += step.tokens
        if step.reason is not None:
            longer = run(session, cold.tokens[: START + 8], max_tokens=6)
            assert longer.tokens == cold.tokens[START + 8 : START + 14]
    assert said == cold.tokens[START : START + 6]
    cold.assert_holds(session, START + 13)


def test_a_reset_between_two_steps_ends_the_reply(target: Target, cold: Cold) -> None:
    session = speculating(target, cold.tokens, 3)
    steps, _ = start(session, request(cold.tokens[:START], 20))
    next(steps)
    session.reset()
    with pytest.raises(RequestError, match="after 1 token, because its session was reset or"):
        next(steps)
    assert_empty(session)
    assert_right_after(session, cold)
