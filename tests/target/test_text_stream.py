"""Streamed text is the decode of all ids, for every kind of tokenizer, and is never taken back."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lse_mlx.target.text_stream import read_plan
from tests.target.tokenizer_kinds import (
    BYTE_TOKENS,
    Kind,
    all_bytes,
    byte_level,
    known_kinds,
    other_kinds,
    sentence_piece,
)

KINDS, OTHERS = known_kinds(), other_kinds()


def stream(kind: Kind, ids: Sequence[int]) -> list[str]:
    """What each of `ids` gave, and last what the end gave."""
    text = kind.stream()
    return [*(text.add(token) for token in ids), text.finish()]


def ids_of(kind: Kind) -> st.SearchStrategy[list[int]]:
    few = st.lists(st.integers(0, kind.size - 1), min_size=1, max_size=4)
    of_few = few.flatmap(lambda ids: st.lists(st.sampled_from(ids), max_size=24))
    return st.one_of(st.lists(st.integers(0, kind.size - 1), max_size=24), of_few)


@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_pieces_join_to_the_decode_of_all(name: str, data: st.DataObject) -> None:
    kind = (KINDS | OTHERS)[name]
    ids = data.draw(ids_of(kind))
    assert "".join(stream(kind, ids)) == kind.decode(ids)


@pytest.mark.parametrize("name", KINDS)
def test_so_do_those_of_each_token(name: str) -> None:
    kind = KINDS[name]
    for token in range(kind.size):
        assert "".join(stream(kind, [token])) == kind.decode([token])
        assert "".join(stream(kind, [token] * 3)) == kind.decode([token] * 3)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_was_given_stands_whatever_follows(name: str, data: st.DataObject) -> None:
    kind = KINDS[name]
    ids, others = data.draw(ids_of(kind)), data.draw(st.lists(ids_of(kind), max_size=3))
    so_far = "".join(stream(kind, ids)[:-1])
    for more in others:
        assert kind.decode(ids + more).startswith(so_far)


# One of these completes any begun character, or leads on to its completion.
TAILS = [first + b"\x80" * n for first in (b"\x80", b"\xbf") for n in range(3)]
# Without 0xED: Python waits for the last byte of a surrogate, though that is no character.
HARD = b"\x00A\x80\x8f\x90\x9f\xa0\xbf\xc0\xc2\xe0\xe2\xef\xf0\xf1\xf4\xf5\xff"


@settings(max_examples=400, deadline=None)
@given(written=st.lists(st.sampled_from(HARD), max_size=8).map(bytes))
def test_all_text_that_no_byte_can_change_is_given(written: bytes) -> None:
    whole = written.decode(errors="replace")
    stands = all((written + tail).decode(errors="replace").startswith(whole) for tail in TAILS)
    given_ = "".join(stream(KINDS["all bytes"], ids_of_bytes(written))[:-1])
    assert given_ == (whole if stands else whole[:-1])


def ids_of_bytes(written: bytes) -> list[int]:
    spelt = bytes_to_unicode()
    return KINDS["all bytes"].ids(*(spelt[b] for b in written))


@pytest.mark.parametrize("name", ["all bytes", "demo"])
@settings(max_examples=150, deadline=None)
@given(written=st.text(max_size=12))
def test_a_character_is_given_with_its_last_byte(name: str, written: str) -> None:
    ids = KINDS[name].tokenizer.encode(written, add_special_tokens=False)
    text, so_far = KINDS[name].stream(), ""
    for n, token in enumerate(ids, start=1):
        so_far += text.add(token)
        now = KINDS[name].decode(ids[:n])
        assert so_far == now or (so_far == now[:-1] and now[-1] == "\ufffd" != written[len(so_far)])
    assert (so_far, text.finish()) == (written, "")


@pytest.mark.parametrize("name", ["sentence piece", "no strip"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_only_a_run_of_byte_tokens_is_held(name: str, data: st.DataObject) -> None:
    kind = KINDS[name]
    ids = data.draw(ids_of(kind))
    text, so_far = kind.stream(), ""
    for n, token in enumerate(ids, start=1):
        so_far += text.add(token)
        settled = ids[:n]
        while settled and in_a_run(kind, settled[-1]):
            settled.pop()
        assert so_far == kind.decode(settled)


def in_a_run(kind: Kind, token: int) -> bool:
    """Whether `token` does not end a run of byte tokens; one that nobody knows does not."""
    piece = kind.tokenizer.backend_tokenizer.id_to_token(token)
    return piece is None or piece in BYTE_TOKENS


def test_bytes_that_are_pending_meet_a_space_or_the_end() -> None:
    kind = byte_level()
    open_, rest = kind.ids("ĠxðŁ", "ĺĢ")
    assert stream(kind, [open_, rest]) == [" x", "\U0001f600", ""]
    assert stream(kind, [open_, *kind.ids("Ġthe")]) == [" x", "\ufffd the", ""]
    assert stream(kind, [open_]) == [" x", "\ufffd"]
    assert stream(kind, [open_, *kind.ids("<end>")]) == [" x", "\ufffd<end>", ""]


def test_a_wrong_byte_is_given_as_soon_as_it_is_known() -> None:
    kind = byte_level()
    wrong, begun, letter = kind.ids("ÿ", "ð", "a")
    assert stream(kind, [wrong, wrong, letter]) == ["\ufffd", "\ufffd", "a", ""]
    assert stream(kind, [begun, wrong, letter]) == ["", "\ufffd\ufffd", "a", ""]


def test_a_wrong_byte_makes_the_run_before_it_wrong() -> None:
    kind = sentence_piece()
    accented = kind.ids("<0xC3>", "<0xA9>")
    wrong, letter = kind.ids("<0xFF>", "a")
    assert stream(kind, [*accented, letter]) == ["", "", "éa", ""]
    assert stream(kind, [*accented, wrong, letter]) == [
        "",
        "",
        "",
        "\ufffd" * 3 + "a",
        "",
    ]
    assert stream(kind, accented) == ["", "", "é"]
    unknown_id = kind.size - 1  # does not end a run
    assert stream(kind, [accented[0], unknown_id, accented[1]]) == ["", "", "", "é"]


def test_only_the_first_space_of_all_is_dropped() -> None:
    kind = sentence_piece()
    the, space = kind.ids("▁the", "▁")
    assert stream(kind, [the, the]) == ["the", " the", ""]
    assert stream(kind, [space, the]) == ["", " the", ""]


def test_a_token_without_text_still_ends_a_run_of_bytes() -> None:
    """Also where all text so far is dropped."""
    kind = sentence_piece()
    assert stream(kind, kind.ids("<0x20>", "", "<0xC3>", "a")) == ["", "", "", "\ufffda", ""]


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_assumed_of_another_decoder(name: str) -> None:
    kind = OTHERS[name]
    assert read_plan(kind.tokenizer) is None
    assert stream(kind, [3, 3, 5]) == ["", "", "", kind.decode([3, 3, 5])]


def test_nothing_is_assumed_of_a_class_that_decodes_otherwise() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **options: Any) -> str:
            return super()._decode(*args, **options).upper()

    tokenizer = Shouting(tokenizer_object=all_bytes().tokenizer.backend_tokenizer)
    assert stream(Kind(tokenizer, 256), tokenizer.encode("loud")) == ["", "", "", "", "LOUD"]


def test_the_end_comes_once() -> None:
    kind = byte_level()
    text = kind.stream()
    text.add(*kind.ids("ð"))
    assert [text.finish(), text.finish()] == ["\ufffd", ""]
    with pytest.raises(ValueError, match="finished"):
        text.add(0)
