"""Where a reply ends: a stop token, a stop string, the caller's word, or no room for another token."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lse_mlx.decode.reply_text import ReplyText
from lse_mlx.decode.values import check_integer
from lse_mlx.errors import RequestError, shown

FinishReason = Literal["stop", "length", "cancelled"]
StopReason = Literal["stop_token", "stop_string", "max_tokens", "context_full", "cancelled"]
FINISH_REASONS: dict[StopReason, FinishReason] = {
    "stop_token": "stop",
    "stop_string": "stop",
    "max_tokens": "length",
    "context_full": "length",
    "cancelled": "cancelled",
}
"""The word of the HTTP API for each stop reason."""

Cancelled = Callable[[int], bool]
"""Asked with the number of tokens emitted so far whether the reply should end there."""


@dataclass(frozen=True)
class Cut:
    """What of a verify pass's tokens is emitted.

    emitted: the tokens before the end, or all of them
    rows:    how many rows of the pass are committed: exactly those that were looked at
    reason:  why the reply ends here; None if it goes on
    """

    emitted: list[int]
    rows: int
    reason: StopReason | None


@dataclass(frozen=True)
class Limits:
    """A request's ends.

    stop_tokens: ids that end the reply and are not part of it
    max_tokens:  the most tokens to emit, at least 1; None for as many as the context holds
    room:        how many tokens the context holds after the prompt
    cancelled:   the caller's word; asked before each piece of the prompt, before a draft, before a
                 verify pass, and after each token. None if the caller has none
    Raises RequestError for another max_tokens, and for a `cancelled` that cannot be asked.
    """

    stop_tokens: frozenset[int]
    max_tokens: int | None
    room: int
    cancelled: Cancelled | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, "a count of at least 1")
        if self.cancelled is not None and not _can_be_asked(self.cancelled):
            raise RequestError(
                f"cancelled is {shown(self.cancelled)}: give a function of the number of tokens so "
                "far, as `lambda emitted: event.is_set()`."
            )

    @property
    def most(self) -> int:
        """The most tokens that the reply can have."""
        return self.room if self.max_tokens is None else min(self.room, self.max_tokens)

    def left(self, emitted: int) -> int:
        """How many more tokens may be emitted after `emitted`."""
        return self.most - emitted

    def cancels(self, emitted: int) -> bool:
        """Whether the caller wants the reply to end after `emitted` tokens."""
        return self.cancelled is not None and bool(self.cancelled(emitted))

    def cut(self, tokens: list[int], emitted: int, text: ReplyText | None = None) -> Cut:
        """Cut a pass's `tokens` (at least one, at most `left(emitted)`) at the first end.

        Token by token, as if each had come alone: a stop token is not emitted; any other is, and
        then the reply ends if a stop string is complete, if the caller says so, or if it was the
        last one allowed. `text` takes in what is emitted.
        """
        for i, token in enumerate(tokens):
            if token in self.stop_tokens:
                return Cut(tokens[:i], i + 1, settled("stop_token", text))
            reason = self._reason_after(token, emitted + i + 1, text)
            if reason is not None:
                return Cut(tokens[: i + 1], i + 1, settled(reason, text))
        return Cut(tokens, len(tokens), None)

    def _reason_after(self, token: int, emitted: int, text: ReplyText | None) -> StopReason | None:
        if text is not None and text.take(token):
            return "stop_string"
        if self.cancels(emitted):
            return "cancelled"
        if self.left(emitted) > 0:
            return None
        asked = self.max_tokens is not None and self.max_tokens <= self.room
        return "max_tokens" if asked else "context_full"


def _can_be_asked(cancelled: Any) -> bool:
    """Whether it can be called with one number, as far as it tells."""
    if not callable(cancelled):
        return False
    try:
        inspect.signature(cancelled).bind(0)
    except TypeError:
        return False
    except ValueError:
        pass  # a function of an extension need not say what it takes
    return True


def settled(reason: StopReason, text: ReplyText | None) -> StopReason:
    """End the text too. What was held back in it may hold a stop string, which then is the reason."""
    return "stop_string" if text is not None and text.finish() else reason
