"""The self-test as a whole: everything that can be checked here, in one report to send back."""

import platform
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx

from lse_mlx.checkpoints.progress import Progress, Silent
from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.operations import kernels_of
from lse_mlx.kernels.options import KernelOptions
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.winners import WinnersFile, this_device
from lse_mlx.selftest.checks import STOCK_OPERATIONS, Check, Outcome, without_names
from lse_mlx.selftest.contracts import contract_checks
from lse_mlx.selftest.pair import SUBJECT, pair_outcomes
from lse_mlx.selftest.stock import stock_checks
from lse_mlx.selftest.values import value_checks

FORMAT = 1
PACKAGES = ("lse-mlx", "mlx", "mlx-lm", "numpy", "transformers")


@dataclass(frozen=True)
class SelftestReport:
    """What was checked, where, and what came of it.

    device:       see `this_device`, with memory in bytes
    versions:     of this package, of what it builds on, and of Python
    form:         how kernels ran: "metal", "cuda", or "reference" where none runs
    outcomes:     what came of each check
    compilations: variants that were compiled for the checks, as name, variant, milliseconds
    warmed:       the demo pair's `WarmupReport` as a dict, empty if it did not load
    races:        all results that are kept for this device
    seconds:      that it took in all
    """

    device: dict[str, Any]
    versions: dict[str, str]
    form: str
    outcomes: list[Outcome]
    compilations: list[dict[str, Any]]
    warmed: dict[str, Any]
    races: list[dict[str, Any]]
    seconds: float

    @property
    def failed(self) -> list[Outcome]:
        """The checks that failed."""
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]

    @property
    def kernels(self) -> dict[str, list[str]]:
        """The operations that were checked, each with its kernels."""
        operations = {o.subject for o in self.outcomes} - {STOCK_OPERATIONS, SUBJECT}
        return {name: list(kernels_of(name)) for name in sorted(operations)}

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, ready for JSON, without paths or names of persons."""
        tally = Counter(outcome.status for outcome in self.outcomes)
        shown = {
            "format": FORMAT,
            "device": self.device,
            "versions": self.versions,
            "form": self.form,
            "kernels": self.kernels,
            "passed": tally["passed"],
            "failed": tally["failed"],
            "not_run": tally["not run"],
            "checks": [outcome.as_dict() for outcome in self.outcomes],
            "compilations": self.compilations,
            "warmup": self.warmed,
            "races": self.races,
            "seconds": self.seconds,
        }
        return without_names(shown)


def run_selftest(
    races: Path, progress: Progress | None = None, required: bool = False
) -> SelftestReport:
    """Check everything on MLX's default device. A check that cannot be run has failed.

    races:    the folder where results of races are kept
    progress: hears which check is next, and how the demo pair warms up
    required: nothing of the demo pair may be served by plain MLX or NumPy either, and on a CPU there
              is nothing to check: that raises KernelError
    """
    started, progress = perf_counter(), progress or Silent()
    # With required kernels an error tells why one does not run; else its reference would serve.
    on_device = mx.default_device() != mx.cpu
    registry = Registry.for_device(Choices("own"), required=required or on_device)
    outcomes = outcomes_of(kernel_checks(registry), registry, progress)
    more, warmed = pair_outcomes(KernelOptions(exact=True, required=required), progress)
    kept, _ = WinnersFile(races, this_device()).read()
    return SelftestReport(
        device=this_device() | _memory(),
        versions={name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        form=registry.form,
        outcomes=outcomes + more,
        compilations=[
            {"name": c.name, "variant": c.variant, "compile_ms": c.milliseconds}
            for c in registry.compilations
        ],
        warmed=warmed,
        races=[result.as_dict() for result in kept.values()],
        seconds=perf_counter() - started,
    )


def kernel_checks(registry: Registry, half: mx.Dtype = mx.bfloat16) -> list[Check]:
    """All of kernels and of single operations; `half` is the dtype of 16 bits beside fp32."""
    values, contracts = value_checks(registry, half), contract_checks(registry, half)
    return [*values, *contracts, *stock_checks(half)]


def outcomes_of(
    checks: list[Check], registry: Registry, progress: Progress | None = None
) -> list[Outcome]:
    """What comes of `checks` with `registry`, and then of their references on the same device.

    Those that cannot run here come first; `progress` counts the others alone.
    """
    progress = progress or Silent()
    idle = [check for check in checks if not check.runs_with(registry)]
    outcomes = [outcome for check in idle for outcome in check.run(registry)]
    running = [check for check in checks if check.runs_with(registry)]
    with_references = [check for check in checks if check.reference_limit is not None]
    runs = [
        *((check, check.run(registry)) for check in running),
        *((check, check.run_reference()) for check in with_references),
    ]
    done, total = 0, sum(len(check.forms) for check in running) + len(with_references)
    for check, run in runs:
        progress.advance("checks", done, total, f"{check.subject}, {check.name}")
        found = list(run)
        outcomes += found
        done += len(found)
    progress.advance("checks", done, total)
    return outcomes


def _memory() -> dict[str, Any]:
    memory = mx.device_info().get("memory_size")
    return {} if memory is None else {"memory_bytes": int(memory)}
