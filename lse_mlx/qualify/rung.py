"""One rung: a statement about a pair, how it is found out, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "not run", "not reached"]


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
