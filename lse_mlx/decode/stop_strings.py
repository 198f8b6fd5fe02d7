"""Stop strings: where in a text the first of them is complete."""

from bisect import bisect
from collections.abc import Iterable, Mapping
from typing import Any

from lse_mlx.errors import RequestError, shown


def check_stops(stop: Any) -> tuple[str, ...]:
    """The strings of `stop`: one string, several of them, or None for none; each only once.

    Raises RequestError for what is no string, an empty one, and one that is not valid text.
    """
    if stop is None:
        return ()
    if isinstance(stop, bytes | Mapping) or not isinstance(stop, Iterable):
        raise RequestError(f"stop is {shown(stop)}: give a string or a list of strings.")
    strings = [stop] if isinstance(stop, str) else list(stop)
    for string in strings:
        if not isinstance(string, str):
            raise RequestError(f"stop holds {shown(string)}: give strings only.")
        if not string:
            raise RequestError(
                "stop holds the empty string '': give strings of a character or more."
            )
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"stop holds {shown(string)}, which is not valid text at character {error.start}: "
                "give it as UTF-8."
            ) from error
    return tuple(dict.fromkeys(strings))


class StopStrings:
    """Reads a text once, piece by piece, and says where the first stop string is complete.

    Only the end of the text that begins a stop string is kept, so a piece costs time by its own
    length and those of the stop strings, however long the text is.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """stops: non-empty strings, as `check_stops` returns them."""
        self._stops = sorted(stops)
        self._longest = max(map(len, self._stops), default=1) - 1  # that is still incomplete
        self._begun = ""

    @property
    def held(self) -> int:
        """How many characters at the end of the text may still become part of a stop string."""
        return len(self._begun)

    def forget(self) -> None:
        """Begin anew: no stop string begins in the text so far."""
        self._begun = ""

    def read(self, piece: str, look: bool = True) -> tuple[int, str] | None:
        """Read on; the first end of a stop string in `piece` and the longest that ends there.

        The end counts the characters of `piece` before it. With `look` off, stop strings that are
        complete in this piece are passed by; those that only begin in it are not.
        """
        text, before = self._begun + piece, len(self._begun)
        if look:
            starts = ((text.find(s, max(0, before + 1 - len(s))), s) for s in self._stops)
            ends = ((start + len(s), -len(s), s) for start, s in starts if start >= 0)
            end, _, stop = min(ends, default=(0, 0, ""))
            if stop:
                return end - before, stop
        start = max(0, len(text) - self._longest)
        while start < len(text) and not self._begins(text[start:]):
            start += 1
        self._begun = text[start:]
        return None

    def _begins(self, text: str) -> bool:
        """Whether a stop string begins with `text` and is longer."""
        at = bisect(self._stops, text)  # those that begin with it come next
        return at < len(self._stops) and self._stops[at].startswith(text)
