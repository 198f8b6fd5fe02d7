"""Where a pass's tokens are cut, by table."""

from threading import Event
from typing import Any, get_args

import pytest

from lse_mlx.decode.stopping import FINISH_REASONS, Cut, FinishReason, Limits, StopReason
from lse_mlx.errors import RequestError

STOPS = frozenset({1, 2})


@pytest.mark.parametrize(
    ("max_tokens", "room", "emitted", "tokens", "expected"),
    [
        # Nothing ends.
        (None, 9, 0, [5, 6], Cut([5, 6], 2, None)),
        (9, 20, 3, [5, 6, 7], Cut([5, 6, 7], 3, None)),
        # A stop token is not emitted, its row is committed, what comes behind is dropped.
        (None, 9, 0, [1], Cut([], 1, "stop_token")),
        (None, 9, 0, [5, 2, 6], Cut([5], 2, "stop_token")),
        (None, 9, 0, [5, 6, 1], Cut([5, 6], 3, "stop_token")),
        (None, 9, 0, [5, 1, 2], Cut([5], 2, "stop_token")),
        # The stop token comes before a limit reached by the same pass.
        (3, 9, 0, [5, 6, 1], Cut([5, 6], 3, "stop_token")),
        (None, 3, 0, [5, 1, 6], Cut([5], 2, "stop_token")),
        # Limits.
        (1, 9, 0, [5], Cut([5], 1, "max_tokens")),
        (4, 9, 2, [5, 6], Cut([5, 6], 2, "max_tokens")),
        (None, 4, 2, [5, 6], Cut([5, 6], 2, "context_full")),
        (8, 4, 2, [5, 6], Cut([5, 6], 2, "context_full")),
        (4, 4, 2, [5, 6], Cut([5, 6], 2, "max_tokens")),
        (4, 9, 2, [5], Cut([5], 1, None)),
    ],
)
def test_a_pass_is_cut_at_the_first_end(
    max_tokens: int | None, room: int, emitted: int, tokens: list[int], expected: Cut
) -> None:
    assert Limits(STOPS, max_tokens, room).cut(tokens, emitted) == expected


@pytest.mark.parametrize(
    ("max_tokens", "room", "emitted", "left"),
    [(None, 9, 0, 9), (None, 9, 9, 0), (4, 9, 1, 3), (9, 4, 1, 3), (4, 4, 4, 0)],
)
def test_what_is_left_is_the_nearer_limit(
    max_tokens: int | None, room: int, emitted: int, left: int
) -> None:
    assert Limits(STOPS, max_tokens, room).left(emitted) == left


@pytest.mark.parametrize(
    ("ends_at", "emitted", "tokens", "expected"),
    [
        (3, 0, [5, 6, 7, 8], Cut([5, 6, 7], 3, "cancelled")),
        (3, 2, [5, 6], Cut([5], 1, "cancelled")),
        (3, 0, [5, 6], Cut([5, 6], 2, None)),
        # After a stop token, which is not emitted, it is not asked; before a limit it is.
        (2, 0, [5, 1], Cut([5], 2, "stop_token")),
        (4, 2, [5, 6], Cut([5, 6], 2, "cancelled")),
    ],
)
def test_the_caller_is_asked_after_each_token(
    ends_at: int, emitted: int, tokens: list[int], expected: Cut
) -> None:
    limits = Limits(STOPS, 4, 9, lambda n: n == ends_at)
    assert limits.cut(tokens, emitted) == expected
    assert limits.cancels(ends_at)
    assert not limits.cancels(ends_at + 1)


@pytest.mark.parametrize(
    "cancelled", [True, 3, "now", Event().is_set, lambda: True, lambda emitted, why: True]
)
def test_what_cannot_be_asked_is_refused(cancelled: Any) -> None:
    with pytest.raises(RequestError, match=r"cancelled is .*: give a function of the number"):
        Limits(STOPS, None, 9, cancelled)


@pytest.mark.parametrize("cancelled", [bool, {3}.__contains__, lambda *emitted: True, print])
def test_whatever_takes_a_number_can_be_asked(cancelled: Any) -> None:
    Limits(STOPS, None, 9, cancelled)


def test_every_reason_has_its_word_for_the_api() -> None:
    assert set(FINISH_REASONS) == set(get_args(StopReason))
    assert set(FINISH_REASONS.values()) == set(get_args(FinishReason))
    words = [FINISH_REASONS[r] for r in ("stop_token", "stop_string", "max_tokens", "context_full")]
    assert words == ["stop", "stop", "length", "length"]
