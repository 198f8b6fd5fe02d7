"""`lse-mlx qualify`: the promotion ladder of a pair, rung by rung."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lse_mlx import demo_pair
from lse_mlx.checkpoints.gate.gate import inspect_pair
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.resolve import AUTO, resolve_pair
from lse_mlx.cli.common import notes, one_sentence_errors
from lse_mlx.cli.kernels import Exact, Kernels, RequireDeviceKernels, kernel_registry
from lse_mlx.cli.options import MODELS, AsJson, Yes
from lse_mlx.cli.pair import AllowRevisionMismatch, Offline, open_pair
from lse_mlx.cli.progress import progress, shown_progress
from lse_mlx.engine import Engine
from lse_mlx.errors import RequestError, printable
from lse_mlx.loading import load_pair
from lse_mlx.qualify.ladder import Ladder, Report
from lse_mlx.qualify.prompts import demo_prompts, read_prompts
from lse_mlx.traces.identity import TargetIdentity, identify

FAILED = 1
"""Exit status where a rung failed."""


def qualify(
    model: Annotated[
        str,
        typer.Option(
            help='Target: "demo", a pair, a folder or a repository.',
            metavar="MODEL",
            rich_help_panel=MODELS,
        ),
    ],
    drafter: Annotated[
        str,
        typer.Option(
            help='Drafter: the same; "auto" is the one registered for the target.',
            metavar="DRAFTER",
            rich_help_panel=MODELS,
        ),
    ] = AUTO,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts that the drafter was not trained on: a JSON list, or text with one a line; "
            "the first twelve count. The demo pair has its own.",
            metavar="FILE",
        ),
    ] = None,
    as_json: AsJson = False,
    offline: Offline = False,
    allow_revision_mismatch: AllowRevisionMismatch = False,
    yes: Yes = False,
    kernels: Kernels = "auto",
    exact: Exact = False,
    require_device_kernels: RequireDeviceKernels = False,
) -> None:
    """Find out whether a drafter may be used with a target: from its files to sampling.

    Rungs are climbed in order; behind one that failed none is reached. What cannot be found out here
    is named. Exit status 0: nothing failed. 1: a rung failed. 2: there is nothing to qualify.
    """
    with one_sentence_errors():
        registry = kernel_registry(kernels, exact, require_device_kernels)
        held_out = None if prompts is None else read_prompts(prompts)
        with progress() as told:
            found = resolve_pair(model, drafter, Hub(offline=offline), told)
        if found.drafter is None:
            raise RequestError(f"No drafter is registered for {model!r}: give one with --drafter.")
        if held_out is None and found.drafter.resolve() == demo_pair.DRAFTER.resolve():
            held_out = demo_prompts()
        gate, pair = inspect_pair(found.target, found.drafter), found
        if gate.accepts(allow_revision_mismatch):
            # Whatever has to be asked is asked now, before a line of progress is on the screen.
            folders = str(found.target), str(found.drafter)
            pair = open_pair(*folders, offline, allow_revision_mismatch, yes)
        with shown_progress(notes) as told:

            def load() -> tuple[Engine, TargetIdentity]:
                identity = identify(pair.target, told)
                engine = load_pair(pair, registry=registry, strict_draft=True, progress=told)
                return engine, identity

            ladder = Ladder(found, gate, load, held_out, told, allow_revision_mismatch)
            report = ladder.climb()
        if as_json:
            print(json.dumps(report.as_dict(), allow_nan=False))
        else:
            show(report)
    raise typer.Exit(FAILED if report.failed else 0)


def show(report: Report) -> None:
    """Print a table with a line for each rung, and in how long it was climbed."""
    table = Table()
    for title in ("rung", "result", "what was found"):
        table.add_column(title, overflow="fold")
    for outcome in report.outcomes:
        failed = outcome.status == "failed"
        found = "see below" if failed else printable(outcome.says)
        table.add_row(outcome.name, outcome.status, found, style="bold" if failed else None)
    console = Console(highlight=False, markup=False)
    console.print(table)
    tally = Counter(outcome.status for outcome in report.outcomes)
    counts = ", ".join(f"{count} {status}" for status, count in tally.items())
    console.print(f"{counts}, in {report.seconds:.1f} s; --json has each criterion and all figures")
    for outcome in report.outcomes:
        if outcome.status == "failed":
            console.print(f"{outcome.name} failed: {printable(outcome.says)}", soft_wrap=True)
            console.print(f"It holds where {outcome.criterion}.", soft_wrap=True)
