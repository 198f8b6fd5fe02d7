"""A reply's text: given in whole characters, and ended before the first stop string."""

import unicodedata
from collections.abc import Iterable

from lse_mlx.decode.stop_strings import StopStrings, check_stops
from lse_mlx.target.text_stream import TextStream
from lse_mlx.target.tokenizer import Thinking

JOINER = "\u200d"
FLAG_LETTERS = "".join(map(chr, range(0x1F1E6, 0x1F200)))
MOST_JOINED = 32  # the longest emoji sequence of Unicode's data has 10 characters


class ReplyText:
    """The text of one reply, from its emitted tokens.

    It ends at the smallest end of a stop string in it, before the longest stop string that ends
    there; how the text falls into tokens plays no part. Text is searched once it is settled, so the
    end is found at the same token whether tokens come one by one or in blocks. A stop string that
    is complete with a token before number `min_tokens`, counted from 1, is passed by for good. A
    thinking part is not searched: its markers, what is between them, and across it.

    stream:   a fresh one
    stops:    what `check_stops` takes; RequestError otherwise
    thinking: the markers of a thinking part, and whether the reply begins inside one; None where
              the tokenizer knows of none
    """

    def __init__(
        self,
        stream: TextStream,
        stops: str | Iterable[str] | None = (),
        min_tokens: int = 0,
        thinking: Thinking | None = None,
    ) -> None:
        self.stop_string: str | None = None
        self._stream = stream
        self._stops = StopStrings(check_stops(stops))
        self._min_tokens = min_tokens
        self._thinking = thinking
        self._inside = thinking is not None and thinking.inside
        self._taken = 0
        self._held = ""  # searched, and not final yet
        self._final: list[str] = []
        self._given = 0
        self._late: bool | None = None  # once ended: whether `finish` completed a stop string

    @property
    def text(self) -> str:
        """All the text that is final, given or not."""
        return "".join(self._final)

    def piece(self) -> str:
        """The text that became final since the last call, in whole characters.

        Held back is what may become part of a stop string, an emoji that ends in a joiner, and half
        a flag. A mark that a later token puts on a character cannot be foreseen.
        """
        new = "".join(self._final[self._given :])
        self._given = len(self._final)
        return new

    def take(self, token: int) -> bool:
        """Take in an emitted token; whether a stop string is complete by it, which ends the text."""
        if self._late is not None:
            raise ValueError("this reply has ended: no token can follow")
        self._taken += 1
        found = self._place(token, self._stream.add(token))
        if found:
            self._late = False
        return found

    def finish(self) -> bool:
        """End the text, because no token follows; whether that completes a stop string.

        It then counts as complete with the last token. Another call changes nothing and returns the
        same.
        """
        if self._late is None:
            self._late = self._search_rest(self._stream.finish())
            if not self._late:
                self._final.append(self._held)
            self._held = ""
        return self._late

    def _place(self, token: int, new: str) -> bool:
        """Search `new`, which settled with `token`, as far as it is outside of a thinking part."""
        thinking = self._thinking
        if thinking is None:
            return self._search(new)
        if self._inside:
            self._inside = token != thinking.closes
            self._pass_by(new)
            return False
        if token != thinking.opens:
            return self._search(new)
        self._inside = True
        # Text that was held back before the marker may have settled with it.
        outside = new.removesuffix(thinking.opening)
        if self._search(outside):
            return True
        self._pass_by(new[len(outside) :])
        return False

    def _search_rest(self, rest: str) -> bool:
        if self._inside:
            self._pass_by(rest)
            return False
        if self._thinking is not None and self._thinking.closing in rest:
            # Of a decoder that settles all its text at the end, the thinking part with it.
            cut = rest.rindex(self._thinking.closing) + len(self._thinking.closing)
            self._pass_by(rest[:cut])
            rest = rest[cut:]
        return self._search(rest)

    def _search(self, text: str) -> bool:
        found = self._stops.read(text, look=self._taken >= self._min_tokens)
        both = self._held + text
        if found is None:
            self._keep(both, self._stops.held)
            return False
        end, self.stop_string = found
        self._final.append(both[: len(self._held) + end - len(self.stop_string)])
        self._held = ""
        return True

    def _pass_by(self, text: str) -> None:
        """Take `text` as it is; no stop string begins in it or before it."""
        self._stops.forget()
        self._keep(self._held + text, 0)

    def _keep(self, text: str, held: int) -> None:
        """Make `text` final but for the last `held` characters and what they leave open."""
        cut = len(text) - held
        cut -= _left_open(text[:cut])
        self._final.append(text[:cut])
        self._held = text[cut:]


def _left_open(text: str) -> int:
    """How many characters at the end join with the next: an emoji and its joiner, half a flag.

    0 where as many as MOST_JOINED do: no end of them is near.
    """
    start = len(text) - (len(text) - len(text.rstrip(FLAG_LETTERS))) % 2
    while start and text[start - 1] == JOINER and len(text) - start < MOST_JOINED:
        start -= 1
        while start and _modifies(text[start - 1]):
            start -= 1
        start -= start > 0  # what is joined
    joined = len(text) - start
    return joined if joined < MOST_JOINED else 0


def _modifies(character: str) -> bool:
    """Whether it changes the one before it: a mark, a variation selector, a colour of skin."""
    return (
        unicodedata.category(character).startswith("M") or "\U0001f3fb" <= character <= "\U0001f3ff"
    )
