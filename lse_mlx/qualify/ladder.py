"""The ladder of a pair, from its files to what it does: a failed rung ends the climb."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any, NoReturn

from lse_mlx.checkpoints.gate.gate import GateReport
from lse_mlx.checkpoints.progress import Progress
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.engine import Engine
from lse_mlx.errors import LseError, counted
from lse_mlx.qualify import replay
from lse_mlx.qualify.decoding import ACCEPTANCE, EQUALITY, Decoding
from lse_mlx.qualify.distribution import CRITERION as DISTRIBUTION
from lse_mlx.qualify.distribution import sampling_distribution
from lse_mlx.qualify.prompts import GENERAL
from lse_mlx.qualify.rung import CannotRun, Finding, Outcome, Rung
from lse_mlx.traces.identity import TargetIdentity

PHASE = "qualify"

GATE = "the drafter's files belong to the target's, and both load and answer a request"

REPLAYED = 3
"""Prompts whose replies are recorded and replayed."""
LIKELY_UNCERTAIN = 2
"""Prompts from which the rung about sampling chooses."""


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

    pair: the folders as they were found, before any conversion
    gate: what the gate says of them
    load: loads both, if the gate lets them pass, so that a failure of the drafter is an error;
          gives the engine and the identity of its target
    held_out: prompts on which the drafter was not trained; None where nobody named any
    allow_revision_mismatch: as at the gate
    """

    pair: Pair
    gate: GateReport
    load: Callable[[], tuple[Engine, TargetIdentity]]
    held_out: Sequence[str] | None
    progress: Progress
    allow_revision_mismatch: bool = False
    _loaded: tuple[Engine, TargetIdentity] | None = field(default=None, init=False, repr=False)

    def climb(self) -> Report:
        """Every rung in order; what was loaded for them is closed at the end."""
        started = perf_counter()
        try:
            outcomes = climb(self.rungs(), self.progress)
        finally:
            if self._loaded is not None:
                self._loaded[0].close()
        seconds = perf_counter() - started
        return Report(str(self.pair.target), str(self.pair.drafter), tuple(outcomes), seconds)

    def rungs(self) -> list[Rung]:
        """What is found out, in this order, and then what cannot be found out here."""
        return [
            Rung("gate", GATE, self._gate),
            Rung("schema validation", replay.SCHEMA, self._schema),
            Rung("golden replay", replay.REPLAY, self._replay),
            Rung("held-out acceptance", ACCEPTANCE, self._acceptance),
            Rung("greedy equality", EQUALITY, self._equality),
            Rung("sampling distribution", DISTRIBUTION, self._distribution),
            *(Rung(name, criterion, _cannot(why)) for name, criterion, why in NOT_HERE),
        ]

    def _gate(self) -> Finding:
        figures = {
            "checks": len(self.gate.checks),
            "mismatches": [check.as_dict() for check in self.gate.mismatches],
            "notes": list(self.gate.notes),
        }
        if not self.gate.accepts(self.allow_revision_mismatch):
            return Finding("", figures, self.gate.refusal(self.allow_revision_mismatch))
        self._loaded = self.load()
        return Finding(f"{counted(len(self.gate.checks), 'comparison')} hold", figures)

    def _schema(self) -> Finding:
        return replay.schema(*self._both, GENERAL[0])

    def _replay(self) -> Finding:
        return replay.golden_replay(*self._both, self._prompts[:REPLAYED])

    def _acceptance(self) -> Finding:
        return self._decoding.acceptance()

    def _equality(self) -> Finding:
        return self._decoding.equality()

    def _distribution(self) -> Finding:
        engine, _ = self._both
        assert engine.drafter is not None
        prompts = [engine.tokenizer.encode(text) for text in self._prompts[:LIKELY_UNCERTAIN]]
        return sampling_distribution(engine.target, engine.drafter, prompts)

    @property
    def _both(self) -> tuple[Engine, TargetIdentity]:
        assert self._loaded is not None  # no rung behind a gate that failed is reached
        return self._loaded

    @property
    def _prompts(self) -> Sequence[str]:
        return self.held_out or GENERAL

    @cached_property
    def _decoding(self) -> Decoding:
        return Decoding(self._both[0], self.held_out, GENERAL)


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
