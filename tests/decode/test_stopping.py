"""Where a pass's tokens are cut, by table."""

import pytest

from lse_mlx.decode.stopping import Cut, Limits, finish_reason

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


def test_the_word_for_the_api() -> None:
    reasons = ("stop_token", "max_tokens", "context_full")
    assert [finish_reason(r) for r in reasons] == ["stop", "length", "length"]
