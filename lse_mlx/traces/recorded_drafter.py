"""A drafter that proposes what was recorded, so that a replay's proposals are those of the trace."""

from dataclasses import dataclass, field

import mlx.core as mx

from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.drafters.live_rows import LiveRows
from lse_mlx.errors import DraftError


@dataclass
class RecordedDrafter:
    """Proposes `upcoming`, which whoever replays sets before each pass. Serves one session.

    taps: the layers that the trace captured; depth: the longest recorded path
    """

    taps: tuple[int, ...]
    depth: int
    name: str = "recorded"
    upcoming: Proposal | None = None

    def new_context(self) -> "RecordedContext":
        """An empty context, at position 0."""
        return RecordedContext(self)


@dataclass
class RecordedContext:
    """Keeps the position by the rules of a real drafter; reads no features."""

    drafter: RecordedDrafter
    rows: LiveRows = field(init=False)

    def __post_init__(self) -> None:
        self.rows = LiveRows(1 << 40, self.drafter.depth + 1)

    @property
    def position(self) -> int:
        """Absolute position after the last appended row."""
        return self.rows.position

    def append(self, features: mx.array, first: int) -> None:
        """Count the rows."""
        self.rows.append(first, features.shape[0])

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        """The recorded proposal, once; draws no uniform, which leaves the others' streams alone.

        Raises DraftError where none was set.
        """
        proposal, self.drafter.upcoming = self.drafter.upcoming, None
        if proposal is None:
            raise DraftError("The trace has no step for this pass: replay it from its beginning.")
        return proposal
