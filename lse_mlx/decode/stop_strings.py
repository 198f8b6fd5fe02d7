"""Stop strings: where in a text the first of them is complete (Aho and Corasick 1975)."""

from collections.abc import Iterable, Mapping
from typing import Any

from lse_mlx.errors import RequestError


def check_stops(stop: Any) -> tuple[str, ...]:
    """The strings of `stop`: one string, several of them, or None for none; each only once.

    Raises RequestError for what is no string, an empty one, and one that is not valid text.
    """
    if stop is None:
        return ()
    if isinstance(stop, bytes | Mapping) or not isinstance(stop, Iterable):
        raise RequestError(f"stop is {stop!r}: give a string or a list of strings.")
    strings = [stop] if isinstance(stop, str) else list(stop)
    for string in strings:
        if not isinstance(string, str):
            raise RequestError(f"stop holds {string!r}: give strings only.")
        if not string:
            raise RequestError(
                "stop holds the empty string '': give strings of a character or more."
            )
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"stop holds {string!r}, which is not valid text at character {error.start}: "
                "give it as UTF-8."
            ) from error
    return tuple(dict.fromkeys(strings))


class StopStrings:
    """Reads a text once, piece by piece, and says where the first stop string is complete.

    It is an automaton whose states are the begins of all stop strings; after any text it is in the
    longest that the text ends with. A piece costs time in proportion to its length, however many
    stop strings there are.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """stops: non-empty strings, as `check_stops` returns them."""
        self._next: list[dict[str, int]] = [{}]
        self._stop: list[str | None] = [None]  # the longest that ends with the state
        self._held = [0]
        self._shorter = [0]  # the longest other state that this one ends with
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._stop.append(None)
                state = self._next[state][character]
            self._stop[state] = stop
        self._shorter *= len(self._next)
        self._held *= len(self._next)
        self._link()
        self._state = 0

    @property
    def held(self) -> int:
        """How many characters at the end of the text may still become part of a stop string."""
        return self._held[self._state]

    def forget(self) -> None:
        """Begin anew: no stop string begins in the text so far."""
        self._state = 0

    def read(self, piece: str, look: bool = True) -> tuple[int, str] | None:
        """Read on; the first end of a stop string in `piece` and the longest that ends there.

        The end counts the characters of `piece` before it. With `look` off, stop strings that are
        complete in this piece are passed by; those that only begin in it are not.
        """
        if len(self._next) == 1:
            return None
        for end, character in enumerate(piece, start=1):
            self._state = self._after(self._state, character)
            stop = self._stop[self._state]
            if look and stop is not None:
                return end, stop
        return None

    def _after(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def _link(self) -> None:
        """Fill in, from short states to long ones, what each knows from the shorter it ends with."""
        level, length = list(self._next[0].values()), 1
        while level:
            for state in level:
                shorter = self._shorter[state]
                self._stop[state] = self._stop[state] or self._stop[shorter]
                self._held[state] = length if self._next[state] else self._held[shorter]
                for character, longer in self._next[state].items():
                    self._shorter[longer] = self._after(shorter, character)
            level = [longer for state in level for longer in self._next[state].values()]
            length += 1
