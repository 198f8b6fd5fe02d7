"""The first stop string of a text is found as by looking at every begin of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lse_mlx.decode.stop_strings import StopStrings, check_stops
from lse_mlx.errors import RequestError

Cuts = list[str]
LETTERS = "ab\U0001f600\n"
stops_of_few_letters = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=5)
pieces_of_few_letters = st.lists(st.text(LETTERS, max_size=6), max_size=8)


def first_end(text: str, stops: list[str], after: int = 0) -> tuple[int, str] | None:
    """By definition: the smallest end above `after`, and the longest stop string that ends there."""
    for end in range(after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def may_go_on(text: str, stops: list[str]) -> int:
    """By definition: how much of the end of `text` begins a stop string that is not complete."""
    begins = {stop[:n] for stop in stops for n in range(len(stop))}
    return max(n for n in range(len(text) + 1) if text[len(text) - n :] in begins or n == 0)


@settings(max_examples=400, deadline=None)
@given(stops=stops_of_few_letters, pieces=pieces_of_few_letters)
def test_the_first_end_is_found_in_the_piece_where_it_is(stops: list[str], pieces: Cuts) -> None:
    reader, text = StopStrings(check_stops(stops)), ""
    for piece in pieces:
        found, start, text = reader.read(piece), len(text), text + piece
        expected = first_end(text, stops)
        assert found == (None if expected is None else (expected[0] - start, expected[1]))
        if found:
            return
        assert reader.held == may_go_on(text, stops)


@settings(max_examples=400, deadline=None)
@given(stops=stops_of_few_letters, passed=pieces_of_few_letters, piece=st.text(LETTERS))
def test_what_is_complete_before_is_passed_by(stops: list[str], passed: Cuts, piece: str) -> None:
    """Also one that is longer than what comes after it was begun."""
    reader, before = StopStrings(check_stops(stops)), "".join(passed)
    for part in passed:
        assert reader.read(part, look=False) is None
    assert reader.held == may_go_on(before, stops)
    expected = first_end(before + piece, stops, after=len(before))
    found = reader.read(piece)
    assert found == (None if expected is None else (expected[0] - len(before), expected[1]))


@settings(max_examples=200, deadline=None)
@given(stops=stops_of_few_letters, before=st.text("ab"), after=st.text("ab"))
def test_nothing_begins_in_what_is_forgotten(stops: list[str], before: str, after: str) -> None:
    reader = StopStrings(check_stops(stops))
    reader.read(before, look=False)
    reader.forget()
    assert reader.held == 0
    assert reader.read(after) == first_end(after, stops)


def test_of_two_that_end_together_the_longer_counts() -> None:
    assert StopStrings(["b", "ab", "cab"]).read("xcab") == (4, "cab")
    assert StopStrings(["abc", "b"]).read("abc") == (2, "b")


@pytest.mark.parametrize(
    ("stop", "strings"),
    [
        (None, ()),
        ([], ()),
        ("END", ("END",)),
        (["5", "\n\n", "\U0001f600"], ("5", "\n\n", "\U0001f600")),
        (("a", "a", "b"), ("a", "b")),
        ([str(n) for n in range(300)], tuple(str(n) for n in range(300))),
    ],
)
def test_one_string_or_several_are_taken(stop: object, strings: tuple[str, ...]) -> None:
    assert check_stops(stop) == strings


@pytest.mark.parametrize(
    ("stop", "named"),
    [
        ("", "''"),
        (["a", ""], "''"),
        (7, "7"),
        (b"end", "b'end'"),
        ({"a": 1}, "{'a': 1}"),
        (["a", 5], "5"),
        ([b"x"], "b'x'"),
        ([None], "None"),
        ("a\ud800", r"'a\ud800'"),
        (["ok", "\udfff"], r"'\udfff'"),
        (10**5000, "an integer of 16610 bits"),
        (["x" * 5000 + "\ud800"], "'xxx"),
    ],
    ids=range(12),
)
def test_what_is_no_text_is_refused_by_name(stop: object, named: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_stops(stop)
    message = str(refused.value)
    assert message.startswith("stop ")
    assert named in message
    assert message.endswith(".")
    assert len(message) < 250
    message.encode()
