"""The ladder of a pair, rung by rung: from its files to what it does."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

from lse_mlx.checkpoints.gate.gate import inspect_pair
from lse_mlx.checkpoints.progress import Progress
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.engine import Engine
from lse_mlx.errors import counted
from lse_mlx.qualify import records
from lse_mlx.qualify.distribution import CRITERION as DISTRIBUTION
from lse_mlx.qualify.distribution import sampling_distribution
from lse_mlx.qualify.ladder import CannotRun, Finding, Outcome, Rung, climb
from lse_mlx.qualify.measures import ACCEPTANCE, EQUALITY, Measured
from lse_mlx.qualify.prompts import GENERAL
from lse_mlx.traces.identity import TargetIdentity, identify

REPLAYED = 3
"""Prompts whose replies are recorded and replayed."""
LIKELY_UNCERTAIN = 2
"""Prompts from which the rung about sampling chooses."""

Opened = tuple[Pair, Engine]
"""A loaded pair, and the folders that it was loaded from."""


@dataclass(frozen=True)
class Report:
    """What came of every rung, in order."""

    target: str
    drafter: str
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether a rung failed."""
        return any(outcome.status == "failed" for outcome in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, ready for JSON."""
        return {
            "qualified": not self.failed,
            "target": self.target,
            "drafter": self.drafter,
            "rungs": [outcome.as_dict() for outcome in self.outcomes],
            "seconds": self.seconds,
        }


@dataclass
class Ladder:
    """The rungs of one pair.

    found: the folders as they were found, before any conversion
    open_target: loads the target alone; open_pair: loads both, once the gate let them pass
    held_out: prompts on which the drafter was not trained; None where nobody named any
    allow_revision_mismatch: as at the gate
    """

    found: Pair
    open_target: Callable[[], Opened]
    open_pair: Callable[[], Opened]
    held_out: Sequence[str] | None
    progress: Progress
    allow_revision_mismatch: bool = False
    _identities: dict[Path, TargetIdentity] = field(default_factory=dict, init=False, repr=False)
    _open: ExitStack = field(default_factory=ExitStack, init=False, repr=False)

    def climb(self) -> Report:
        """Every rung in order; models are loaded when a rung needs them, and closed at the end."""
        started = perf_counter()
        with self._open:
            outcomes = climb(self.rungs(), self.progress)
        return Report(
            str(self.found.target),
            str(self.found.drafter),
            tuple(outcomes),
            perf_counter() - started,
        )

    def rungs(self) -> list[Rung]:
        """What is found out, in this order, and then what cannot be found out here."""
        return [
            Rung("schema validation", records.SCHEMA, self._schema),
            Rung("gate", "the drafter's files belong to the target's", self._gate),
            Rung("golden replay", records.REPLAY, self._replay),
            Rung("held-out acceptance", ACCEPTANCE, self._acceptance),
            Rung("greedy equality", EQUALITY, self._equality),
            Rung("sampling distribution", DISTRIBUTION, self._distribution),
            *(Rung(name, criterion, _cannot(why)) for name, criterion, why in NOT_HERE),
        ]

    def _schema(self) -> Finding:
        folders, engine = self.open_target()
        with engine:
            return records.schema(engine, self._identity(folders.target), GENERAL[0])

    def _gate(self) -> Finding:
        assert self.found.drafter is not None
        report = inspect_pair(self.found.target, self.found.drafter)
        figures = {
            "checks": len(report.checks),
            "mismatches": [check.as_dict() for check in report.mismatches],
            "notes": list(report.notes),
        }
        if not report.accepts(self.allow_revision_mismatch):
            return Finding("", figures, report.refusal(self.allow_revision_mismatch))
        return Finding(f"{counted(len(report.checks), 'comparison')} hold", figures)

    def _replay(self) -> Finding:
        engine, identity = self._pair
        return records.golden_replay(engine, identity, self._prompts[:REPLAYED])

    def _acceptance(self) -> Finding:
        return self._measured.acceptance()

    def _equality(self) -> Finding:
        return self._measured.equality()

    def _distribution(self) -> Finding:
        engine, _ = self._pair
        assert engine.drafter is not None
        prompts = [engine.tokenizer.encode(text) for text in self._prompts[:LIKELY_UNCERTAIN]]
        return sampling_distribution(engine.target, engine.drafter, prompts)

    def _identity(self, target: Path) -> TargetIdentity:
        """Of a folder, whose weights are read for it only once."""
        if target not in self._identities:
            self._identities[target] = identify(target, self.progress)
        return self._identities[target]

    @property
    def _prompts(self) -> Sequence[str]:
        return self.held_out or GENERAL

    @cached_property
    def _pair(self) -> tuple[Engine, TargetIdentity]:
        folders, engine = self.open_pair()
        self._open.enter_context(engine)
        return engine, self._identity(folders.target)

    @cached_property
    def _measured(self) -> Measured:
        return Measured(self._pair[0], self.held_out, GENERAL)


NOT_HERE = (
    (
        "target-specific training",
        "the drafter was trained on features of this very target",
        "training is no check; the rungs above look at what came of it",
    ),
    (
        "bytes per accepted token",
        "fewer bytes are read from storage for a token than without the drafter",
        "the whole target is in memory, so none are read; it is measured for targets of experts that "
        "lie on storage",
    ),
    (
        "exposed storage wait",
        "prefetched experts arrive before they are asked for",
        "the whole target is in memory; a simulated store says something of a schedule, not of a disk",
    ),
    (
        "latency on the target hardware",
        "replies come faster with the drafter on the machine that it is for",
        "that is for the machine to say: run `lse-mlx demo --model ... --drafter ...` there",
    ),
)
"""Name, criterion, and why it is not found out here."""


def _cannot(why: str) -> Callable[[], Finding]:
    def refuse() -> NoReturn:
        raise CannotRun(why)

    return refuse
