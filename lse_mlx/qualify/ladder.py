"""Rungs one after the other: each is a statement about a pair, and a failed one ends the climb."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from lse_mlx.checkpoints.progress import Progress
from lse_mlx.errors import LseError

Status = Literal["passed", "failed", "not run", "not reached"]

PHASE = "qualify"


@dataclass(frozen=True)
class Finding:
    """What one rung found.

    failure: why it fails, in a sentence; None where it holds
    says:    what was looked at, in a sentence
    figures: the numbers behind it, ready for JSON
    """

    says: str
    figures: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


class CannotRun(Exception):
    """A rung has nothing to work with here; the message says what would change that."""


@dataclass(frozen=True)
class Rung:
    """A statement and how it is found out.

    criterion: when it passes, in a sentence
    climb: finds it out. Raises CannotRun where it cannot be found out here; an LseError is a failure
    """

    name: str
    criterion: str
    climb: Callable[[], Finding]


@dataclass(frozen=True)
class Outcome:
    """What came of a rung.

    says: what was found, why it failed, or why it was not run
    """

    name: str
    criterion: str
    status: Status
    says: str
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, ready for JSON."""
        return {
            "name": self.name,
            "status": self.status,
            "criterion": self.criterion,
            "says": self.says,
            "figures": self.figures,
            "seconds": self.seconds,
        }


def climb(rungs: Sequence[Rung], progress: Progress) -> list[Outcome]:
    """Every rung in order; those behind a failed one are not reached.

    progress: told how many rungs are done, and which one is next.
    """
    outcomes: list[Outcome] = []
    for done, rung in enumerate(rungs):
        progress.advance(PHASE, done, len(rungs), rung.name)
        outcomes.append(_outcome(rung, outcomes))
    progress.advance(PHASE, len(rungs), len(rungs))
    return outcomes


def _outcome(rung: Rung, before: list[Outcome]) -> Outcome:
    for earlier in before:
        if earlier.status == "failed":
            says = f"{earlier.name} failed"
            return Outcome(rung.name, rung.criterion, "not reached", says)
    started = perf_counter()
    try:
        found = rung.climb()
    except CannotRun as why:
        return Outcome(rung.name, rung.criterion, "not run", str(why))
    except LseError as error:
        found = Finding("", failure=str(error))
    return Outcome(
        rung.name,
        rung.criterion,
        "passed" if found.failure is None else "failed",
        found.failure or found.says,
        found.figures,
        perf_counter() - started,
    )
