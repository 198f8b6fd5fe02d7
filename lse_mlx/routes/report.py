"""What predicted routes were worth: how often they were right, and what a store made of them."""

from dataclasses import dataclass
from typing import Any

from lse_mlx.protocol.tickets import TicketState


@dataclass(frozen=True)
class Recall:
    """Of `native` experts that committed rows chose, how many were `predicted`."""

    native: int = 0
    predicted: int = 0

    @property
    def share(self) -> float | None:
        """None before the first row."""
        return self.predicted / self.native if self.native else None

    def __add__(self, other: "Recall") -> "Recall":
        return Recall(self.native + other.native, self.predicted + other.predicted)


@dataclass(frozen=True)
class RouteReport:
    """What predictions were worth on the simulated store, over all requests of a sidecar.

    recall: by layer, over committed rows
    passes, committed_rows: verify passes, and rows of them that became part of a sequence
    bytes_early:  fetched for tickets before any pass had to wait for them
    bytes_used:   of those, what a pass demanded while it was there or on its way; the others are
                  bytes_wasted
    bytes_on_demand: fetched while a pass stood still
    bytes_demanded:  of all experts that passes asked for, each once a pass
    exposed_wait_ms: that passes stood still, by the simulated clock
    tickets: how many are in each state
    """

    recall: dict[int, Recall]
    passes: int
    committed_rows: int
    bytes_early: int
    bytes_used: int
    bytes_on_demand: int
    bytes_demanded: int
    exposed_wait_ms: float
    tickets: dict[TicketState, int]

    @property
    def bytes_wasted(self) -> int:
        """Of what was fetched early, what no pass asked for before it left the cache."""
        return self.bytes_early - self.bytes_used

    @property
    def total_recall(self) -> Recall:
        """Over all layers."""
        return sum(self.recall.values(), Recall())

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, ready for JSON."""
        return {
            "recall": self.total_recall.share,
            "recall_by_layer": {str(layer): held.share for layer, held in self.recall.items()},
            "passes": self.passes,
            "committed_rows": self.committed_rows,
            "bytes_early": self.bytes_early,
            "bytes_used": self.bytes_used,
            "bytes_wasted": self.bytes_wasted,
            "bytes_on_demand": self.bytes_on_demand,
            "bytes_demanded": self.bytes_demanded,
            "exposed_wait_ms": self.exposed_wait_ms,
            "tickets": dict(self.tickets),
        }
