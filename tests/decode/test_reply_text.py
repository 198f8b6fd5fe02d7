"""A reply's text ends where a slow reading of the definition says, and comes in whole characters."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lse_mlx.decode.reply_text import ReplyText
from lse_mlx.errors import RequestError
from lse_mlx.target.text_stream import TextStream
from lse_mlx.target.tokenizer import Thinking
from tests.target.tokenizer_kinds import Kind, all_bytes, fused, sentence_piece

WORDS = ["a", "b", "ab", "ba", "bab", "", " ", "<think>", "</think>", "é"]
OPEN, CLOSE = WORDS.index("<think>"), WORDS.index("</think>")

FROM_WORDS, FROM_BYTES = fused(WORDS), all_bytes()

stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def written(text: str) -> list[int]:
    """The bytes of `text`, a token each."""
    return FROM_BYTES.tokenizer.encode(text, add_special_tokens=False)


def definition(
    settled: Sequence[str], whole: str, stops: Sequence[str], min_tokens: int
) -> tuple[int, str, str] | None:
    """At which token the reply ends, its text, and the stop string; None if none ends it.

    settled: the text that is settled after each token; whole: all text, the rest of which comes
    with the end, counted as a token more that is looked at like the last one
    """
    seen = 0
    for number, text in enumerate([*settled, whole], start=1):
        if min(number, len(settled)) >= min_tokens:
            ended = end_of(text, seen, stops)
            if ended is not None:
                return number, *ended
        seen = len(text)
    return None


def end_of(text: str, after: int, stops: Sequence[str]) -> tuple[str, str] | None:
    """`text` before its first stop string that ends later than `after` characters, and that one."""
    for end in range(after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return None


def check(
    kind: Kind,
    ids: Sequence[int],
    settled: Sequence[str],
    stops: Sequence[str],
    min_tokens: int = 0,
) -> None:
    """`ReplyText` does with `ids` what the definition says, token by token."""
    whole = kind.decode(ids)
    expected = definition(settled, whole, stops, min_tokens)
    reply = ReplyText(kind.stream(), stops, min_tokens)
    given = ""
    for number, token in enumerate(ids, start=1):
        ended = reply.take(token)
        given += reply.piece()
        assert given == reply.text
        assert ended == (expected is not None and expected[0] == number)
        if ended:
            break
        begins = {stop[:n] for stop in stops for n in range(1, len(stop))}
        now = settled[number - 1]
        held = max((n for n in range(1, len(now) + 1) if now[-n:] in begins), default=0)
        assert given == now[: len(now) - held]
    late = reply.finish()
    assert late == (expected is not None and expected[0] > len(settled))
    given += reply.piece()
    assert (given, reply.stop_string) == (whole, None) if expected is None else expected[1:]
    assert (reply.text, reply.finish(), reply.piece()) == (given, late, "")


@settings(max_examples=500, deadline=None)
@given(
    ids=st.lists(st.integers(0, 6), max_size=12),
    stops=stop_lists,
    min_tokens=st.integers(0, 8),
)
def test_the_text_ends_where_the_definition_says(
    ids: list[int], stops: list[str], min_tokens: int
) -> None:
    settled = list(accumulate(WORDS[token] for token in ids))
    check(FROM_WORDS, ids, settled, stops, min_tokens)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("aé\U0001f600", max_size=8),
    cut=st.integers(0, 3),
    stops=st.lists(st.text("aé\U0001f600\ufffd", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_stop_strings_are_found_inside_characters_of_many_tokens(
    text: str, cut: int, stops: list[str], min_tokens: int
) -> None:
    """Also one of U+FFFD, complete with the end of a reply that a limit cut inside a character."""
    ids = written(text)
    ids = ids[: len(ids) - cut]
    settled = [FROM_BYTES.decode(ids[:n]).rstrip("\ufffd") for n in range(1, len(ids) + 1)]
    check(FROM_BYTES, ids, settled, stops, min_tokens)


@pytest.mark.parametrize("min_tokens", range(5))
def test_a_stop_string_may_be_complete_from_token_min_tokens_on(min_tokens: int) -> None:
    reply = ReplyText(FROM_BYTES.stream(), "ab", min_tokens)
    ended = [reply.take(token) for token in written("abcab")[:2]]
    assert ended == [False, min_tokens <= 2]


def test_what_was_passed_by_is_not_found_afterwards_but_may_have_begun_something() -> None:
    reply = ReplyText(FROM_BYTES.stream(), ["ab", "abcd"], 4)
    assert [reply.take(token) for token in written("abcd")] == [False, False, False, True]
    assert (reply.text, reply.stop_string) == ("", "abcd")
    reply = ReplyText(FROM_BYTES.stream(), "ab", 4)
    assert not any(reply.take(token) for token in written("abcd"))
    assert (reply.finish(), reply.piece()) == (False, "abcd")


def test_after_a_stop_string_nothing_is_taken() -> None:
    reply = ReplyText(FROM_BYTES.stream(), "b")
    assert [reply.take(token) for token in written("ab")] == [False, True]
    assert (reply.finish(), reply.text, reply.stop_string) == (False, "a", "b")
    with pytest.raises(ValueError, match="ended"):
        reply.take(0)


def test_a_stop_string_is_found_in_what_a_decoder_held() -> None:
    kind = sentence_piece()
    reply = ReplyText(kind.stream(), "é")
    assert [reply.take(token) for token in kind.ids("a", "<0xC3>", "<0xA9>")] == [
        False,
        False,
        False,
    ]
    assert reply.piece() == "a"
    assert reply.finish()
    assert (reply.piece(), reply.text, reply.stop_string) == ("", "a", "é")


def test_a_text_of_an_unknown_decoder_is_searched_at_the_end() -> None:
    reply = ReplyText(TextStream(FROM_WORDS.tokenizer, None), "b")
    assert [reply.take(token) for token in [0, 1, 0]] == [False, False, False]
    assert reply.finish()
    assert (reply.text, reply.stop_string) == ("a", "b")


@pytest.mark.parametrize("stop", ["", ["a", 5], "\ud800"])
def test_stop_strings_are_checked(stop: object) -> None:
    with pytest.raises(RequestError, match="stop holds"):
        ReplyText(FROM_BYTES.stream(), stop)  # pyright: ignore[reportArgumentType]


# Whole characters


def pieces_of(text: str, stops: str | None = None) -> list[str]:
    """What a reply gives of the bytes of `text`, without what is empty."""
    reply = ReplyText(FROM_BYTES.stream(), stops)
    pieces = []
    for token in written(text):
        reply.take(token)
        pieces.append(reply.piece())
    reply.finish()
    return [piece for piece in [*pieces, reply.piece()] if piece]


WOMAN, LAPTOP, DARK, HEART = "\U0001f469", "\U0001f4bb", "\U0001f3ff", "❤\ufe0f"
JOIN = "\u200d"
FLAG, HALF = "\U0001f1eb\U0001f1f7", "\U0001f1eb"


def test_what_a_joiner_joins_comes_with_it() -> None:
    assert pieces_of(f"a{WOMAN}{JOIN}{LAPTOP}b") == ["a", WOMAN, JOIN + LAPTOP, "b"]
    whole = _one_token_each(f"a{WOMAN}{JOIN}", LAPTOP, "b")
    assert whole == ["a", f"{WOMAN}{JOIN}{LAPTOP}", "b"]
    coloured = _one_token_each(f"{WOMAN}{DARK}{JOIN}", LAPTOP)
    assert coloured == [f"{WOMAN}{DARK}{JOIN}{LAPTOP}"]
    both = _one_token_each(f"x{WOMAN}{JOIN}{HEART}{JOIN}", WOMAN)
    assert both == ["x", f"{WOMAN}{JOIN}{HEART}{JOIN}{WOMAN}"]
    assert _one_token_each(f"a{WOMAN}{JOIN}") == ["a", WOMAN + JOIN]
    assert _one_token_each(JOIN, "a") == [JOIN + "a"]


def test_a_flag_comes_whole() -> None:
    assert pieces_of(f"a{FLAG}{FLAG}b") == ["a", FLAG, FLAG, "b"]
    assert pieces_of(HALF + "b") == [HALF + "b"]
    assert pieces_of(HALF) == [HALF]


def test_a_chain_of_joiners_without_end_is_given() -> None:
    pieces = pieces_of(f"{WOMAN}{JOIN}" * 200)
    assert "".join(pieces) == f"{WOMAN}{JOIN}" * 200
    assert max(map(len, pieces)) <= 32
    pieces = _one_token_each(*[f"{WOMAN}{JOIN}"] * 200)
    assert "".join(pieces) == f"{WOMAN}{JOIN}" * 200
    assert max(map(len, pieces)) <= 33


def test_an_open_character_hides_no_stop_string() -> None:
    reply = ReplyText(FROM_BYTES.stream(), WOMAN + JOIN)
    ended = [reply.take(token) for token in written(f"a{WOMAN}{JOIN}{LAPTOP}")[:8]]
    assert ended == [False] * 7 + [True]
    assert (reply.piece(), reply.stop_string) == ("a", WOMAN + JOIN)


@settings(max_examples=300, deadline=None)
@given(text=st.text(f"a{WOMAN}{JOIN}{HALF}{DARK}\u0301", max_size=16))
def test_the_pieces_join_to_the_text(text: str) -> None:
    pieces = pieces_of(text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert not any(piece.endswith(JOIN) for piece in pieces[:-1])


def _one_token_each(*words: str) -> list[str]:
    kind = fused(words)
    reply = ReplyText(kind.stream())
    pieces = []
    for word in words:
        reply.take(*kind.ids(word))
        pieces.append(reply.piece())
    reply.finish()
    return [piece for piece in [*pieces, reply.piece()] if piece]


# Thinking


def thinking(inside: bool = False) -> Thinking:
    return Thinking(OPEN, CLOSE, "<think>", "</think>", inside)


@settings(max_examples=500, deadline=None)
@given(
    ids=st.lists(st.sampled_from([0, 1, 2, 3, OPEN, CLOSE]), max_size=14),
    stops=st.lists(st.text("ab<>hk", min_size=1, max_size=3) | st.just("k>ab"), max_size=4),
    min_tokens=st.integers(0, 4),
    inside=st.booleans(),
)
def test_a_thinking_part_is_not_searched(
    ids: list[int], stops: list[str], min_tokens: int, inside: bool
) -> None:
    reply = ReplyText(FROM_WORDS.stream(), stops, min_tokens, thinking(inside))
    done, part, given = "", "", ""  # part: what is outside since the last marker
    for number, token in enumerate(ids, start=1):
        ended = None
        if inside or token == OPEN:
            inside, done, part = token != CLOSE, done + part + WORDS[token], ""
        else:
            part += WORDS[token]
            if number >= min_tokens:
                ended = end_of(part, len(part) - len(WORDS[token]), stops)
        assert reply.take(token) == (ended is not None)
        given += reply.piece()
        if ended is not None:
            assert (given, reply.stop_string) == (done + ended[0], ended[1])
            return
    assert not reply.finish()
    assert given + reply.piece() == FROM_WORDS.decode(ids)


def test_text_that_settles_with_a_marker_is_still_outside() -> None:
    kind = sentence_piece()
    kind.tokenizer.add_tokens(["<think>", "</think>"])
    *run, opens, closes = kind.ids("<0xC3>", "<0xA9>", "<think>", "</think>")
    marks = Thinking(opens, closes, "<think>", "</think>", False)
    reply = ReplyText(kind.stream(), "é", 0, marks)
    assert [reply.take(token) for token in [*run, opens]] == [False, False, True]
    assert (reply.text, reply.stop_string) == ("", "é")


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([OPEN, 1, CLOSE, 0, 1], "<think>b</think>a"),
        ([OPEN, 1, CLOSE, 0], "<think>b</think>a"),
        ([OPEN, CLOSE, OPEN, 1, CLOSE, 0], "<think></think><think>b</think>a"),
        ([OPEN, 1, 0], "<think>ba"),
        ([0, 1, 0], "a"),
    ],
)
def test_thinking_of_an_unknown_decoder_is_not_searched(ids: list[int], text: str) -> None:
    reply = ReplyText(TextStream(FROM_WORDS.tokenizer, None), "b", 0, thinking())
    assert not any(reply.take(token) for token in ids)
    assert reply.finish() == (reply.stop_string is not None)
    assert (reply.text, reply.piece()) == (text, text)
