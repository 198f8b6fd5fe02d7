"""Which committed rows a draft context holds: the rules of append and rewind, without the rows."""

from dataclasses import dataclass

from lse_mlx.errors import DraftError


@dataclass
class LiveRows:
    """The span [position - live, position) of absolute positions that a context can still see.

    capacity: the most rows kept; older ones are overwritten.
    longest_rewind: the most rows that may be taken back at once, the drafter's block.
    """

    capacity: int
    longest_rewind: int
    position: int = 0
    live: int = 0

    def append(self, first: int, rows: int) -> None:
        """Take in rows first..first+rows-1; those already held from `first` on are replaced.

        Raises DraftError, and changes nothing, for no rows, a negative `first`, a gap, or a
        replacement that reaches further back than `rewind` may.
        """
        if rows < 1:
            raise DraftError(
                f"An append of {rows} rows at position {first} has nothing to keep: "
                "pass the features of at least one committed row."
            )
        if first < 0:
            raise DraftError(
                f"An append at position {first} is before the start of the sequence: "
                "positions count from 0."
            )
        if first < self.position:
            self.rewind(first)
        elif first > self.position and self.live:
            raise DraftError(
                f"An append at position {first} leaves a gap after position {self.position}: "
                "append every committed row in order, or reset the context first."
            )
        self.position = first + rows
        self.live = min(self.capacity, self.live + rows)

    def rewind(self, to: int) -> None:
        """Forget the rows from position `to` on.

        Raises DraftError, and changes nothing, for a `to` ahead of the position or below 0, for
        more than `longest_rewind` rows, and for more rows than are live.
        """
        drop = self.position - to
        if drop < 0 or to < 0:
            raise DraftError(
                f"A rewind to position {to} is outside 0..{self.position}: "
                "rewind to a position that the context has passed."
            )
        if drop > self.longest_rewind:
            raise DraftError(
                f"A rewind from position {self.position} to {to} drops {drop} rows, more than the "
                f"{self.longest_rewind} of one block: reset the context and append again."
            )
        if drop > self.live:
            raise DraftError(
                f"A rewind from position {self.position} to {to} drops {drop} rows, but only "
                f"{self.live} are held: reset the context and append again."
            )
        self.position = to
        self.live -= drop

    def reset(self) -> None:
        """Forget everything: position 0, no live row."""
        self.position = 0
        self.live = 0
