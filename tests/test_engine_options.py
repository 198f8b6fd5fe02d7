"""Every option of a request, end to end with the demo pair, with the drafter and without."""

import inspect
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import mlx.core as mx
import pytest

import lse_mlx
from lse_mlx.drafters.base import DraftContext, Drafter, Proposal, Uniform

TURN = "Write a story about a shy fox."
COUNT = 32


@pytest.fixture(scope="module")
def engine() -> Iterator[lse_mlx.Engine]:
    with lse_mlx.load(warm_up=False) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def whole(engine: lse_mlx.Engine) -> lse_mlx.Result:
    """The reply that nothing ends but its length."""
    return engine.generate(TURN, max_tokens=COUNT)


def test_every_public_name_is_there():
    for name in lse_mlx.__all__:
        assert getattr(lse_mlx, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        lse_mlx.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def both_ways(engine: lse_mlx.Engine, **options) -> lse_mlx.Result:
    """The reply with the drafter, which the target alone gives too, and its pieces add up to."""
    pieces = list(engine.stream(TURN, **options))
    fast = pieces[-1].result
    assert fast is not None
    assert "".join(map(str, pieces)) == fast.text
    assert [t for piece in pieces for t in piece.token_ids] == fast.token_ids
    assert all(piece.result is None for piece in pieces[:-1])
    alone = engine.generate(TURN, speculate=False, **options)
    assert replace(fast, timings={}) == replace(alone, timings={})
    assert fast.timings["generated_n"] == len(fast.token_ids)
    return fast


def test_generate_shows_the_options_of_stream():
    stream, generate = (
        inspect.signature(getattr(lse_mlx.Engine, name)) for name in ("stream", "generate")
    )
    assert list(generate.parameters.values()) == list(stream.parameters.values())
    assert generate.return_annotation is lse_mlx.Result
    kinds = {p.kind for name, p in stream.parameters.items() if name not in ("self", "prompt")}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("start", range(5, 85, 13))
def test_a_stop_string_ends_the_text_before_it(engine: lse_mlx.Engine, whole, start: int):
    stop = whole.text[start : start + 9]  # most begin and end inside a token
    first = whole.text.index(stop)
    ended = both_ways(engine, max_tokens=COUNT, stop=["no such text", stop])
    assert ended.text == whole.text[:first]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", "stop_string")
    assert ended.stop_string == stop
    decode = engine.tokenizer.decode
    used = next(n for n in range(COUNT + 1) if stop in decode(whole.token_ids[:n]))
    assert ended.token_ids == whole.token_ids[:used]


def test_one_stop_string_needs_no_list(engine: lse_mlx.Engine, whole):
    ended = both_ways(engine, max_tokens=COUNT, stop=whole.text[20:24])
    assert whole.text.startswith(ended.text) and len(ended.text) <= 20


def test_a_stop_string_that_never_comes_changes_nothing(engine: lse_mlx.Engine, whole):
    ended = both_ways(engine, max_tokens=COUNT, stop=[whole.text[-6:] + "#"])
    assert (ended.text, ended.token_ids) == (whole.text, whole.token_ids)
    assert (ended.stop_reason, ended.stop_string) == ("max_tokens", None)


@pytest.mark.parametrize("at", [0, 1, 6, 17, 30])
def test_a_stop_token_of_the_request_is_not_emitted(engine: lse_mlx.Engine, whole, at: int):
    token = whole.token_ids[at]
    ended = both_ways(engine, max_tokens=COUNT, stop_token_ids=[token])
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(token)]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", "stop_token")


def test_min_tokens_holds_off_end_tokens_and_stop_strings(engine: lse_mlx.Engine, whole):
    options = {"max_tokens": COUNT, "min_tokens": 20}
    token = whole.token_ids[3]
    by_token = both_ways(engine, stop_token_ids=[token], **options)
    assert len(by_token.token_ids) >= 20
    assert token not in by_token.token_ids
    by_text = both_ways(engine, stop=[" ", "a"], **options)
    assert len(by_text.token_ids) >= 20


def test_banned_end_tokens_are_never_chosen(engine: lse_mlx.Engine, whole):
    token = whole.token_ids[3]
    found = both_ways(engine, max_tokens=COUNT, stop_token_ids=[token], end_tokens="banned")
    assert len(found.token_ids) == COUNT
    assert token not in found.token_ids
    assert found.token_ids[:3] == whole.token_ids[:3]


def test_required_end_tokens_end_the_reply(engine: lse_mlx.Engine, whole):
    found = both_ways(engine, max_tokens=9, end_tokens="required")
    assert found.token_ids == whole.token_ids[:8]
    assert (found.finish_reason, found.stop_reason) == ("stop", "stop_token")


@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.7, "top_p": 0.95, "seed": 3}])
@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 3.0, "presence_window": 200},
        {"frequency_penalty": 2.0, "frequency_window": 100},
        {"logit_bias": {260: -1000.0, 15: 0.5}},  # " a" and the comma
    ],
    ids=lambda options: next(iter(options)),
)
def test_penalties_change_the_reply(engine: lse_mlx.Engine, penalty: dict, sampled: dict):
    options = {"max_tokens": COUNT, **sampled}
    plain = engine.generate(TURN, **options)
    if not sampled:  # where a draw decides, the drafter may change the luck but not the chances
        assert both_ways(engine, **options, **penalty).token_ids != plain.token_ids
    else:
        found = [engine.generate(TURN, **options, **penalty).token_ids for _ in range(2)]
        assert found[0] == found[1] != plain.token_ids


def test_logprobs_are_the_targets_with_and_without_the_drafter(engine: lse_mlx.Engine, whole):
    found = both_ways(engine, max_tokens=COUNT, top_logprobs=5)
    assert found.token_ids == whole.token_ids
    assert whole.logprobs is None
    assert found.logprobs is not None
    assert [entry.token for entry in found.logprobs] == found.token_ids
    for entry in found.logprobs:  # greedy: the token is the likeliest
        assert entry.top[0] == (entry.token, entry.logprob)
        assert len(entry.top) == 5
        assert sorted(entry.top, key=lambda pair: -pair[1]) == entry.top
        assert all(logprob <= 0 for _, logprob in entry.top)


def test_pieces_carry_the_logprobs_of_their_tokens(engine: lse_mlx.Engine):
    pieces = list(engine.stream(TURN, max_tokens=12, top_logprobs=0))
    assert all(piece.logprobs is not None for piece in pieces)
    for piece in pieces:
        assert [entry.token for entry in piece.logprobs or []] == piece.token_ids
        assert all(entry.top == [] for entry in piece.logprobs or [])
    assert pieces[-1].result is not None
    assert pieces[-1].result.logprobs == [x for piece in pieces for x in piece.logprobs or []]


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_a_caller_ends_a_reply_after_any_token(engine: lse_mlx.Engine, whole, count: int):
    ended = both_ways(engine, max_tokens=COUNT, cancelled=lambda emitted: emitted >= count)
    assert ended.token_ids == whole.token_ids[:count]
    assert ended.text == engine.tokenizer.decode(ended.token_ids)
    assert (ended.finish_reason, ended.stop_reason) == ("cancelled", "cancelled")


def test_a_reply_cancelled_in_the_prompt_is_an_empty_result(engine: lse_mlx.Engine):
    ended = both_ways(engine, cancelled=lambda emitted: True, top_logprobs=2)
    assert (ended.text, ended.token_ids, ended.logprobs) == ("", [], [])
    assert (ended.finish_reason, ended.prompt_tokens > 0) == ("cancelled", True)


def test_another_thread_cancels_by_an_event(engine: lse_mlx.Engine, whole):
    begun, asked = threading.Event(), threading.Event()

    def wait_and_cancel() -> None:
        begun.wait()
        asked.set()

    other = threading.Thread(target=wait_and_cancel)
    other.start()
    pieces = []
    for piece in engine.stream(TURN, max_tokens=COUNT, cancelled=lambda emitted: asked.is_set()):
        pieces.append(piece)
        begun.set()
        asked.wait()
    other.join()
    first, last = pieces
    assert last.result is not None
    assert last.result.token_ids == first.token_ids == whole.token_ids[: len(first.token_ids)]
    assert last.result.finish_reason == "cancelled"


def test_a_conversation_goes_on_after_a_stream_closed_early(engine: lse_mlx.Engine):
    session = engine.session()
    pieces = engine.stream(TURN, max_tokens=COUNT, session=session)
    ids = [token for _ in range(3) for token in next(pieces).token_ids]
    pieces.close()  # type: ignore[attr-defined]
    longer = [*engine.tokenizer.encode(TURN), *ids, *engine.tokenizer.encode("Then", raw=True)]
    warm = engine.generate(longer, max_tokens=12, session=session)
    cold = engine.generate(longer, max_tokens=12)
    assert warm.token_ids == cold.token_ids
    assert warm.timings["prompt_cached_n"] == len(engine.tokenizer.encode(TURN)) + len(ids) - 1


def test_a_shorter_limit_gives_the_first_tokens_of_the_same_reply(engine: lse_mlx.Engine):
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    long = engine.generate(TURN, max_tokens=30, **options)
    for count in (1, 2, 9, 10, 23):
        short = engine.generate(TURN, max_tokens=count, **options)
        assert short.token_ids == long.token_ids[:count]


@dataclass
class BrokenContext:
    """A drafter's context that fails at its proposal number `left` + 1."""

    context: DraftContext
    left: int

    @property
    def position(self) -> int:
        return self.context.position

    def append(self, features: mx.array, first: int) -> None:
        self.context.append(features, first)

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        if self.left == 0:
            raise lse_mlx.DraftError("The drafter is broken: mend it.")
        self.left -= 1
        return self.context.propose(anchor, temperature, uniform)


@dataclass(frozen=True)
class BrokenDrafter:
    drafter: Drafter
    name: str = "broken"
    contexts: list[BrokenContext] = field(default_factory=list)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def depth(self) -> int:
        return self.drafter.depth

    def new_context(self) -> BrokenContext:
        self.contexts.append(BrokenContext(self.drafter.new_context(), left=2))
        return self.contexts[-1]


def broken(engine: lse_mlx.Engine, strict: bool) -> lse_mlx.Engine:
    assert engine.drafter is not None
    drafter = BrokenDrafter(engine.drafter)
    return lse_mlx.Engine(engine.target, engine.tokenizer, drafter, strict_draft=strict)


def test_a_broken_drafter_costs_speed_and_is_counted(engine: lse_mlx.Engine, whole):
    found = broken(engine, strict=False)
    for count in (1, 2):
        reply = found.generate(TURN, max_tokens=COUNT)
        assert reply.token_ids == whole.token_ids
        assert reply.timings["spec_failures"] == 1
        assert "drafter is broken" in reply.timings["spec_failure"]
        assert reply.timings["spec_accepted"] > 0
        assert found.stats().draft_failures == count
    alone = found.generate(TURN, max_tokens=COUNT, speculate=False)
    assert alone.token_ids == whole.token_ids
    assert found.stats().draft_failures == 2


def test_a_plain_reply_without_a_session_leaves_the_drafter_alone(engine: lse_mlx.Engine, whole):
    assert engine.drafter is not None
    untouched = BrokenDrafter(engine.drafter)
    found = lse_mlx.Engine(engine.target, engine.tokenizer, untouched, strict_draft=True)
    session = found.session()
    in_session = found.generate(TURN, max_tokens=8, speculate=False, session=session)
    alone = found.generate(TURN, max_tokens=8, speculate=False)
    assert in_session.token_ids == alone.token_ids == whole.token_ids[:8]
    [context] = untouched.contexts  # the session's, which follows for the sake of the next reply
    assert context.position == in_session.prompt_tokens + 7


def test_a_strict_engine_fails_with_its_drafter_and_serves_on(engine: lse_mlx.Engine, whole):
    found = broken(engine, strict=True)
    session = found.session()
    pieces = found.stream(TURN, max_tokens=COUNT, session=session)
    emitted: list[int] = []
    with pytest.raises(lse_mlx.DraftError, match="broken"):
        emitted += [token for piece in pieces for token in piece.token_ids]
    assert found.stats().draft_failures == 1
    again = found.generate(TURN, max_tokens=COUNT, session=session, speculate=False)
    assert again.token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop": 3}, "stop is 3"),
        ({"stop": [""]}, "stop holds the empty"),
        ({"stop": ["a", 3]}, "stop holds 3"),
        ({"stop": [b"a"]}, "stop holds b'a'"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3"),
        ({"stop_token_ids": "3"}, "stop_token_ids is '3'"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids is 1.5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
        ({"stop_token_ids": [True]}, "stop_token_ids is True"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids names token 1000000000, outside"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": None}, "min_tokens is None"),
        ({"min_tokens": 9}, "min_tokens is 9, and at most 8"),
        ({"end_tokens": "maybe"}, "end_tokens is 'maybe'"),
        ({"end_tokens": None}, "end_tokens is None"),
        ({"end_tokens": "required", "min_tokens": 8}, "min_tokens is 8"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty is '1.1'"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"repetition_window": 0}, "repetition_window is 0"),
        ({"presence_penalty": None}, "presence_penalty is None"),
        ({"presence_penalty": 1e9}, "presence_penalty is 1000000000"),
        ({"presence_window": 2.5}, "presence_window is 2.5"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ({"frequency_window": -1}, "frequency_window is -1"),
        ({"logit_bias": [1]}, "logit_bias is [1]"),
        ({"logit_bias": {-1: 1}}, "logit_bias id is -1"),
        ({"logit_bias": {1: "x"}}, "logit_bias of token 1 is 'x'"),
        ({"logit_bias": {10**9: 1}}, "logit_bias names token 1000000000, outside"),
        ({"top_logprobs": -1}, "top_logprobs is -1"),
        ({"top_logprobs": 21}, "top_logprobs is 21: give a count from 0 to 20"),
        ({"top_logprobs": True}, "top_logprobs is True"),
        ({"cancelled": True}, "cancelled is True"),
        ({"speculate": 1}, "speculate is 1"),
        ({"raw": None}, "raw is None"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_at_once(
    engine: lse_mlx.Engine, options: dict, words: str
):
    session = engine.session()
    with pytest.raises(lse_mlx.RequestError) as refused:
        engine.stream(TURN, max_tokens=8, session=session, **options)
    sentence = str(refused.value)
    assert words in sentence
    assert sentence.endswith(".") and "\n" not in sentence
    assert session.turn == engine.session().turn  # not begun


def test_a_required_end_needs_a_limit_that_leaves_room_for_a_token(engine: lse_mlx.Engine):
    ended = engine.generate(TURN, max_tokens=1, end_tokens="required")
    assert (ended.token_ids, ended.stop_reason) == ([], "stop_token")
