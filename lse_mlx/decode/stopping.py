"""Where a reply ends: a stop token, or no room for another token."""

from dataclasses import dataclass
from typing import Literal

from lse_mlx.decode.values import check_integer

FinishReason = Literal["stop", "length"]
StopReason = Literal["stop_token", "max_tokens", "context_full"]


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
    Raises RequestError for another max_tokens.
    """

    stop_tokens: frozenset[int]
    max_tokens: int | None
    room: int

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, "a count of at least 1, or None")

    def left(self, emitted: int) -> int:
        """How many more tokens may be emitted after `emitted`."""
        most = self.room if self.max_tokens is None else min(self.room, self.max_tokens)
        return most - emitted

    def cut(self, tokens: list[int], emitted: int) -> Cut:
        """Cut a pass's `tokens` (at least one, at most `left(emitted)`) at the first end."""
        for i, token in enumerate(tokens):
            if token in self.stop_tokens:
                return Cut(tokens[:i], i + 1, "stop_token")
        if self.left(emitted) > len(tokens):
            return Cut(tokens, len(tokens), None)
        asked = self.max_tokens is not None and self.max_tokens <= self.room
        return Cut(tokens, len(tokens), "max_tokens" if asked else "context_full")


def finish_reason(reason: StopReason) -> FinishReason:
    """The OpenAI word for a stop reason."""
    return "stop" if reason == "stop_token" else "length"
