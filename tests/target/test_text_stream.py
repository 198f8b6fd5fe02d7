"""Streamed text is the decode of all ids, for every kind of tokenizer, and is never taken back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lse_mlx.target.text_stream import CLEANINGS, TextStream, read_plan
from tests.target.tokenizer_kinds import (
    UNKNOWN,
    Kind,
    all_bytes,
    byte_level,
    every_kind,
    sentence_piece,
    unknown,
)

KINDS = every_kind()
OTHERS = {name: unknown(name) for name in UNKNOWN}
PLANS = {name: read_plan(kind.tokenizer) for name, kind in (KINDS | OTHERS).items()}


def start(name: str) -> TextStream:
    return TextStream((KINDS | OTHERS)[name].tokenizer, PLANS[name])


def stream(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> list[str]:
    """What each of `ids` gave, and last what the end gave."""
    text = TextStream(tokenizer, read_plan(tokenizer))
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
    text = start(name)
    pieces = [*(text.add(token) for token in ids), text.finish()]
    assert "".join(pieces) == kind.decode(ids)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_was_given_stands_whatever_follows(name: str, data: st.DataObject) -> None:
    kind = KINDS[name]
    ids, others = data.draw(ids_of(kind)), data.draw(st.lists(ids_of(kind), max_size=3))
    text = start(name)
    so_far = "".join(text.add(token) for token in ids)
    for more in others:
        assert kind.decode(ids + more).startswith(so_far)


@pytest.mark.parametrize("name", ["all bytes", "demo"])
@settings(max_examples=150, deadline=None)
@given(written=st.text(max_size=12).filter(lambda text: "\ufffd" not in text))
def test_a_character_is_given_with_its_last_byte(name: str, written: str) -> None:
    tokenizer = KINDS[name].tokenizer
    ids = tokenizer.encode(written, add_special_tokens=False)
    text, so_far = start(name), ""
    for n, token in enumerate(ids, start=1):
        so_far += text.add(token)
        assert so_far == KINDS[name].decode(ids[:n]).rstrip("\ufffd")
    assert so_far == written
    assert text.finish() == ""


@pytest.mark.parametrize(
    "name", ["sentence piece", "three spaces", "no strip", "metaspace and bytes"]
)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_only_a_run_of_byte_tokens_is_held(name: str, data: st.DataObject) -> None:
    kind = KINDS[name]
    ids = data.draw(ids_of(kind))
    text, so_far = start(name), ""
    for n, token in enumerate(ids, start=1):
        so_far += text.add(token)
        settled = ids[:n]
        while settled and in_a_run(kind, settled[-1]):
            settled.pop()
        assert so_far == kind.decode(settled)


def in_a_run(kind: Kind, token: int) -> bool:
    """Whether `token` does not end a run of byte tokens; one that nobody knows does not."""
    piece = kind.tokenizer.backend_tokenizer.id_to_token(token)
    return piece is None or piece.startswith("<0x")


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.held is not None])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_of_other_text_little_is_held(name: str, data: st.DataObject) -> None:
    kind = KINDS[name]
    ids = data.draw(ids_of(kind))
    text, so_far = start(name), ""
    for n, token in enumerate(ids, start=1):
        so_far += text.add(token)
        assert len(so_far) >= len(kind.decode(ids[:n])) - (kind.held or 0)


def test_bytes_that_are_pending_meet_a_space_or_the_end() -> None:
    kind = byte_level()
    open_, rest = kind.ids("ĠxðŁ", "ĺĢ")
    assert stream(kind.tokenizer, [open_, rest]) == [" x", "\U0001f600", ""]
    assert stream(kind.tokenizer, [open_, *kind.ids("Ġthe")]) == [" x", "\ufffd the", ""]
    assert stream(kind.tokenizer, [open_]) == [" x", "\ufffd"]
    assert stream(kind.tokenizer, [open_, *kind.ids("<end>")]) == [" x", "\ufffd<end>", ""]


def test_wrong_bytes_are_given_but_for_the_last() -> None:
    kind = byte_level()
    wrong, letter = kind.ids("ÿ", "a")
    pieces = stream(kind.tokenizer, [wrong, wrong, wrong, letter])
    assert pieces == ["", "\ufffd", "\ufffd", "\ufffda", ""]


def test_a_wrong_byte_makes_the_run_before_it_wrong() -> None:
    kind = sentence_piece()
    accented = kind.ids("<0xC3>", "<0xA9>")
    wrong, letter = kind.ids("<0xFF>", "a")
    assert stream(kind.tokenizer, [*accented, letter]) == ["", "", "éa", ""]
    assert stream(kind.tokenizer, [*accented, wrong, letter]) == [
        "",
        "",
        "",
        "\ufffd" * 3 + "a",
        "",
    ]
    assert stream(kind.tokenizer, accented) == ["", "", "é"]
    unknown_id = kind.size - 1  # does not end a run
    assert stream(kind.tokenizer, [accented[0], unknown_id, accented[1]]) == ["", "", "", "é"]


def test_only_the_first_space_of_all_is_dropped() -> None:
    kind = sentence_piece()
    the, space = kind.ids("▁the", "▁")
    assert stream(kind.tokenizer, [the, the]) == ["the", " the", ""]
    assert stream(kind.tokenizer, [space, the]) == ["", " the", ""]


def test_a_token_without_text_still_ends_a_run_of_bytes() -> None:
    """Also where all text so far is dropped."""
    kind = KINDS["three spaces"]
    ids = kind.ids("<0x20>", "", "", "<0xC3>", "a")
    assert stream(kind.tokenizer, ids) == ["", "", "", "", "\ufffda", ""]


def test_a_space_is_held_where_it_may_go() -> None:
    kind = KINDS["cleaned pieces"]
    words = kind.ids("a", " ", ".", " ", "a", " '", "s")
    assert stream(kind.tokenizer, words) == ["a", "", ".", "", " a", "", "'s", ""]


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_assumed_of_another_decoder(name: str) -> None:
    assert PLANS[name] is None
    *pieces, rest = stream(OTHERS[name].tokenizer, [3, 3, 5])
    assert pieces == ["", "", ""]
    assert rest == OTHERS[name].decode([3, 3, 5])


def test_nothing_is_assumed_of_a_class_that_decodes_otherwise() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **options: Any) -> str:
            return super()._decode(*args, **options).upper()

    tokenizer = Shouting(tokenizer_object=all_bytes().tokenizer.backend_tokenizer)
    ids = tokenizer.encode("loud")
    assert stream(tokenizer, ids) == ["", "", "", "", "LOUD"]


def test_the_end_comes_once() -> None:
    text = start("byte level")
    text.add(byte_level().ids("ÿ")[0])
    assert [text.finish(), text.finish()] == ["\ufffd", ""]
    with pytest.raises(ValueError, match="finished"):
        text.add(0)


@settings(max_examples=300, deadline=None)
@given(text=st.text(" .'nmtsrve?a", max_size=20))
def test_what_is_cleaned_up_is_what_the_library_cleans_up(text: str) -> None:
    cleaned = text
    for old, new in CLEANINGS:
        cleaned = cleaned.replace(old, new)
    assert cleaned == KINDS["demo"].tokenizer.clean_up_tokenization(text)


@dataclass
class CountingBackend:
    """A tokenizer that counts the ids it decodes."""

    backend: Any
    decoded: int = 0

    def id_to_token(self, token: int) -> str | None:
        return self.backend.id_to_token(token)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "demo"])
def test_a_long_line_costs_no_more_per_token(name: str) -> None:
    """Of any token many times over, also wrong bytes, spaces and tokens without text."""
    kind, plan = KINDS[name], PLANS[name]
    assert plan is not None
    for token in range(kind.size):
        counting = CountingBackend(plan.backend)
        backend: Any = counting
        text = TextStream(kind.tokenizer, replace(plan, backend=backend))
        pieces = [text.add(token) for _ in range(100)]
        assert "".join([*pieces, text.finish()]) == kind.decode([token] * 100)
        assert counting.decoded <= 8 * 100
