"""A session that goes on equals a cold run; one that cannot starts cold."""

from collections.abc import Callable

import pytest

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.errors import RequestError
from lse_mlx.target.model import Target
from tests.decode.runs import (
    Cold,
    known_sequence,
    request,
    run,
    speculating,
    start,
)
from tests.tiny_models import random_prompt

START, COUNT = 7, 30
SAMPLED = Sampling(temperature=0.9, top_k=20)


@pytest.fixture(scope="module")
def cold(target: Target) -> Cold:
    return known_sequence(target, random_prompt(START, 4), COUNT)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("extra", [1, 2, 9])
def test_a_longer_prompt_goes_on_and_equals_a_cold_run(
    target: Target, cold: Cold, sampling: Sampling, speculate: bool, extra: int
) -> None:
    options = {"sampling": sampling, "speculate": speculate, "max_tokens": 12}
    session = speculating(target, cold.tokens, 5)
    first = run(session, cold.tokens[:START], seed=1, **options)
    longer = [*cold.tokens[:START], *first.tokens, *random_prompt(extra)]
    held = len(session.tokens)
    assert held == START + len(first.tokens) - 1

    fresh = speculating(target, cold.tokens, 5)
    going_on = run(session, longer, seed=2, **options)
    from_cold = run(fresh, longer, seed=2, **options)
    assert going_on.timings.prompt_cached_n == held
    assert going_on.timings.prompt_n == len(longer) - held
    assert from_cold.timings.prompt_cached_n == 0
    assert going_on.tokens == from_cold.tokens
    assert going_on.timings.accepted == from_cold.timings.accepted
    assert session.tokens == fresh.tokens
    Cold(target, session.tokens).assert_holds(session, len(session.tokens))


def test_many_turns_are_one_long_run(target: Target, cold: Cold) -> None:
    session, at = speculating(target, cold.tokens, 4), START
    while at + 6 <= len(cold.tokens):
        reply = run(session, cold.tokens[:at], max_tokens=5)
        assert reply.tokens == cold.tokens[at : at + 5]
        assert reply.timings.prompt_cached_n == (0 if at == START else at - 2)
        at += 6
    cold.assert_holds(session, at - 2)


@pytest.mark.parametrize("speculate", [False, True])
def test_a_stop_token_may_be_part_of_the_next_prompt(
    target: Target, cold: Cold, speculate: bool
) -> None:
    stop = cold.tokens[START + 4]
    session = speculating(target, cold.tokens)
    run(session, cold.tokens[:START], stops=[stop], speculate=speculate)
    reply = run(session, cold.tokens[: START + 5], max_tokens=6, speculate=speculate)
    assert reply.timings.prompt_cached_n == START + 4
    assert reply.tokens == cold.tokens[START + 5 : START + 11]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda held: held, id="exactly what it holds"),
        pytest.param(lambda held: held[:-1], id="less"),
        pytest.param(lambda held: held[:1], id="the first token"),
        pytest.param(lambda held: [*held[:-1], 1, 2], id="another last token"),
        pytest.param(lambda held: [1, *held[1:], 2], id="another first token"),
    ],
)
@pytest.mark.parametrize("speculate", [False, True])
def test_any_other_prompt_starts_cold(
    target: Target, cold: Cold, change: Callable[[list[int]], list[int]], speculate: bool
) -> None:
    session, fresh = speculating(target, cold.tokens), speculating(target, cold.tokens)
    run(session, cold.tokens[:START], max_tokens=9, speculate=speculate)
    prompt = change(list(session.tokens))
    again = run(session, prompt, max_tokens=4, speculate=speculate)
    assert again.timings.prompt_cached_n == 0
    assert again.timings.prompt_n == len(prompt)
    assert again.tokens == run(fresh, prompt, max_tokens=4, speculate=speculate).tokens
    Cold(target, session.tokens).assert_holds(session, len(session.tokens))


def test_the_same_request_twice_gives_the_same_reply(target: Target, cold: Cold) -> None:
    session = speculating(target, cold.tokens, 3)
    replies = [
        run(session, cold.tokens[:START], max_tokens=12, sampling=SAMPLED, seed=5) for _ in range(2)
    ]
    assert replies[0].tokens == replies[1].tokens
    assert replies[1].timings.prompt_cached_n == 0


def test_a_plain_reply_in_between_costs_nothing(target: Target, cold: Cold) -> None:
    """The drafter's context takes in what a plain reply reads, so the next one goes on with it."""
    session = speculating(target, cold.tokens)
    at = START
    for speculate in (True, False, True, False):
        reply = run(session, cold.tokens[:at], max_tokens=5, speculate=speculate)
        assert reply.timings.prompt_cached_n == (0 if at == START else at - 2)
        assert reply.tokens == cold.tokens[at : at + 5]
        assert (reply.timings.passes > 0) is speculate
        cold.assert_holds(session, at + 4)
        at += 6


def test_without_a_drafter_a_speculative_request_is_plain(target: Target, cold: Cold) -> None:
    session = Session(target, None)
    reply = run(session, cold.tokens[:START], max_tokens=8)
    assert reply.tokens == cold.tokens[START : START + 8]
    more = run(session, cold.tokens[: START + 9], max_tokens=4)
    assert more.timings.prompt_cached_n == START + 7
    assert more.tokens == cold.tokens[START + 9 : START + 13]


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("at", [START, START + 9], ids=["cold", "going on"])
def test_a_reply_left_unfinished_cannot_go_on_after_another_one(
    target: Target, cold: Cold, speculate: bool, at: int
) -> None:
    session = speculating(target, cold.tokens)
    asked = request(cold.tokens[:START], COUNT, speculate=speculate)
    steps, _ = start(session, asked)
    for _ in range(2):
        next(steps)
    run(session, cold.tokens[:at], max_tokens=5, speculate=speculate)
    held = list(session.tokens)
    with pytest.raises(RequestError, match="another one began in it"):
        next(steps)
    assert session.tokens == held
    assert session.state.position == len(held)


def test_a_reply_that_is_refused_leaves_the_newer_one_alone(target: Target, cold: Cold) -> None:
    session = speculating(target, cold.tokens)
    one, _ = start(session, request(cold.tokens[:START], COUNT))
    next(one)
    other, _ = start(session, request(cold.tokens[:START], 9))
    tokens = list(next(other).tokens)
    with pytest.raises(RequestError, match="another one began"):
        next(one)
    tokens += [token for step in other for token in step.tokens]
    assert tokens == cold.tokens[START : START + 9]
    cold.assert_holds(session, START + 8)


def test_a_reply_dropped_late_leaves_the_next_one_alone(target: Target, cold: Cold) -> None:
    session = speculating(target, cold.tokens)
    dropped, _ = start(session, request(cold.tokens[:START], COUNT))
    next(dropped)
    steps, _ = start(session, request(cold.tokens[:START], 9))
    tokens = list(next(steps).tokens)
    dropped.close()
    tokens += [token for step in steps for token in step.tokens]
    assert tokens == cold.tokens[START : START + 9]
    cold.assert_holds(session, START + 8)


def test_two_sessions_on_one_target_do_not_touch_each_other(target: Target, cold: Cold) -> None:
    sessions = speculating(target, cold.tokens), speculating(target, cold.tokens, 1)
    for at in (START, START + 9):
        for session in sessions:
            reply = run(session, cold.tokens[:at], max_tokens=8)
            assert reply.tokens == cold.tokens[at : at + 8]
    for session in sessions:
        cold.assert_holds(session, START + 16)
