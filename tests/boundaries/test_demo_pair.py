"""Every boundary on the pair that ships with the package, through its public interface: with the real
drafter, without it, and one token at a time."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import mlx.core as mx
import pytest

import lse_mlx
from lse_mlx.decode.sampling import Sampling
from lse_mlx.drafters.base import DraftContext, Uniform
from tests.boundaries.asked import Asked
from tests.boundaries.demo_bench import Bench
from tests.boundaries.one_token import Answer, one_token, plain, until_the_end
from tests.boundaries.slow_walk import Drafted, walked

OFFSETS = (1, 2, 3, 4, 5, 8, 9, 10, 14, 17, 20)


def stop_string_at(bench: Bench, offset: int, least: int) -> str:
    """Text of the last tokens up to `offset`, at least `least` of them, that was not said before."""
    whole = bench.text_of(bench.said[:offset])
    for n in range(least, offset + 1):
        part = whole[len(bench.text_of(bench.said[: offset - n])) :]
        if whole.find(part) == len(whole) - len(part):
            return part
    return whole


EVENTS: dict[str, tuple[str, Callable[[Bench, int], Asked]]] = {
    "stop token": (
        "stop_token",
        lambda b, n: b.asked(stop_tokens=frozenset([b.said[n - 1]])),
    ),
    "max_tokens": ("max_tokens", lambda b, n: b.asked(max_tokens=n)),
    "short stop": ("stop_string", lambda b, n: b.asked(stops=(stop_string_at(b, n, 1), "zzz"))),
    "long stop": ("stop_string", lambda b, n: b.asked(stops=("zzz", stop_string_at(b, n, 4)))),
    "cancel": ("cancelled", lambda b, n: b.asked(cancel_at=n)),
}


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("event", EVENTS)
def test_an_end_at_every_offset(bench: Bench, event: str, offset: int) -> None:
    reason, ending = EVENTS[event]
    asked = ending(bench, offset)
    if event == "stop token" and bench.said.index(bench.said[offset - 1]) != offset - 1:
        offset = bench.said.index(bench.said[offset - 1]) + 1  # the token comes earlier too
    count = offset - (event == "stop token")
    chosen = list(islice(plain(bench.stepwise.logits, bench.asked()), count))
    stop = None if reason != "stop_string" else next(s for s in asked.stops if s != "zzz")
    held = len(bench.prompt) + offset - 1
    session = bench.engine.session()
    answer = Answer(chosen, "", reason, stop, held)
    bench.check(asked, answer, session, alone=offset in (1, 9, 20))
    every = [*bench.prompt, *bench.said]
    bench.assert_holds(session, every[:held])
    # The next turn goes on from there, and is a cold run's.
    again = replace(bench.asked(max_tokens=6), prompt=every[: held + 2])
    more = bench.run(again, session=session)
    assert more.timings["prompt_cached_n"] == held
    assert more.token_ids == every[held + 2 : held + 8]
    bench.assert_holds(session, every[: held + 7])


@pytest.mark.parametrize("room", [1, 2, 7, 9, 16])
def test_a_full_context(bench: Bench, room: int) -> None:
    short = replace(bench.engine.target, context_length=len(bench.prompt) + room)
    engine = lse_mlx.Engine(short, bench.engine.tokenizer, bench.engine.drafter)
    for speculate in (True, False):
        session = engine.session()
        result = engine.generate(
            bench.prompt, max_tokens=None, speculate=speculate, session=session
        )
        assert result.token_ids == bench.said[:room]
        assert (result.finish_reason, result.stop_reason) == ("length", "context_full")
        held = [*bench.prompt, *bench.said[: room - 1]]
        bench.assert_holds(session, held)


RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition": 1.3, "repetition_window": 12},
    "presence": {"presence": 1.9, "presence_window": 7},
    "frequency": {"frequency": 1.5, "frequency_window": 64},
    "all penalties": {
        "repetition": 1.15,
        "repetition_window": 5,
        "presence": 0.7,
        "presence_window": 30,
        "frequency": -0.2,
        "frequency_window": 3,
    },
    "bias": {"logit_bias": {17: 4.0, 1735: -30.0, 15: 2.5}},
    "a banned end": {"logit_bias": {2: 9.0}, "end_tokens": "banned"},
    "a required end": {"end_tokens": "required", "stop_tokens": frozenset([17])},
    "a least count": {"logit_bias": {2: 9.0, 17: 6.0}, "min_tokens": 9},
    "no rule": {},
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_rules_and_log_probabilities(bench: Bench, rules: dict[str, Any]) -> None:
    asked = bench.asked(max_tokens=18, top_logprobs=4, **rules)
    bench.check(asked, one_token(bench.stepwise.logits, asked))


def sampled_draft(bench: Bench) -> Callable[[list[int], int, Uniform], Drafted]:
    """What the real drafter proposes at temperature 0.8, from a context of one row at a time."""
    assert bench.engine.drafter is not None
    context: DraftContext = bench.engine.drafter.new_context()

    def draft(tokens: list[int], drafts: int, uniform: Uniform) -> Drafted:
        while context.position < len(tokens) - 1:
            row = bench.stepwise.features(tokens[: context.position + 1])
            context.append(mx.array(row[None]), first=context.position)
        proposal = context.propose(tokens[-1], 0.8, uniform)
        listed = [list(zip(q.ids.tolist(), q.probs.tolist(), strict=True)) for q in proposal.q]
        return list(zip(proposal.tokens, listed, strict=True))

    return draft


SAMPLED: dict[str, dict[str, Any]] = {
    "top-k": {"sampling": Sampling(0.8, top_k=300)},
    "top-k and top-p": {"sampling": Sampling(0.8, top_k=20, top_p=0.9)},
    "min-p and penalties": {
        "sampling": Sampling(0.8, top_k=200, min_p=0.05),
        "presence": 0.8,
        "repetition": 1.1,
        "logit_bias": {17: 2.0},
        "min_tokens": 4,
    },
}


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED.keys())
def test_sampled_replies_are_the_definitions(bench: Bench, options: dict[str, Any]) -> None:
    """Plain: each token the target's own draw. Drafted: the walk that this seed leads to."""
    options = {"seed": 1, "max_tokens": 12, **options}
    asked = bench.asked(**options)
    alone = bench.run(asked, speculate=False)
    assert alone.token_ids == one_token(bench.stepwise.logits, asked).ids
    walk = walked(bench.stepwise.logits, asked, sampled_draft(bench))
    fast = bench.run(asked)
    assert fast.token_ids == until_the_end(walk, asked, None).ids
    # A shorter limit gives the beginning, and another request in between changes nothing.
    for most in (5, 11):
        assert bench.run(replace(asked, max_tokens=most)).token_ids == fast.token_ids[:most]
    assert bench.run(asked).token_ids == fast.token_ids


SAID = "👩\u200d日e\u0301 ñ🇪"
"""An emoji, a joiner, a character, a letter with its mark, and half a flag; no byte comes twice."""


def saying(bench: Bench, ids: list[int]) -> dict[str, Any]:
    """Options that make the model say `ids`, which are all different: each once, in this order."""
    assert len(set(ids)) == len(ids)
    assert not set(ids) & set(bench.prompt)
    return {
        "logit_bias": {token: 5000.0 - 60 * n for n, token in enumerate(ids)},
        "repetition": 1000.0,
        "repetition_window": 64,
    }


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 6, 8, 11, 13, 15, 17])
def test_text_of_bytes_is_whole_characters(bench: Bench, cut: int) -> None:
    """Cut after any byte: the pieces add up to the decode of all ids, broken characters included."""
    ids = [t for c in SAID for t in bench.engine.tokenizer.wrapper.encode(c)]
    ids = list(dict.fromkeys(ids))[:17]
    asked = bench.asked(max_tokens=min(cut, len(ids)), **saying(bench, ids))
    for speculate in (True, False):
        result = bench.run(asked, speculate)
        assert result.token_ids == ids[:cut]
        assert result.text == bench.text_of(ids[:cut])


@pytest.mark.parametrize("stop", ["\u200d", "日", "\u0301", "e\u0301", "\u200d日e", "👩\u200d日"])
def test_a_stop_string_inside_bytes(bench: Bench, stop: str) -> None:
    ids = list(dict.fromkeys(t for c in SAID for t in bench.engine.tokenizer.wrapper.encode(c)))
    whole = bench.text_of(ids)
    at = whole.index(stop)
    count = next(n for n in range(len(ids)) if stop in bench.text_of(ids[:n]))
    asked = bench.asked(max_tokens=len(ids), stops=(stop,), **saying(bench, ids))
    for speculate in (True, False):
        session = bench.engine.session()
        result = bench.run(asked, speculate, session)
        assert (result.text, result.stop_string) == (whole[:at], stop)
        assert result.token_ids == ids[:count]
        bench.assert_holds(session, [*bench.prompt, *ids[: count - 1]])
