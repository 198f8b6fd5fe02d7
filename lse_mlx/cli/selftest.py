"""`lse-mlx selftest`: every kernel and the demo pair checked on this device."""

import json
import os
import shlex
from collections import Counter
from math import inf
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.cli.common import notes, one_sentence_errors
from lse_mlx.cli.kernels import RequireDeviceKernels, kernel_registry
from lse_mlx.cli.progress import shown_progress
from lse_mlx.errors import RequestError, printable, reason
from lse_mlx.loading import with_kernels
from lse_mlx.selftest.checks import Outcome
from lse_mlx.selftest.report import SelftestReport, run_selftest

FAILED = 1
"""Exit status where a check failed."""

ERRORS = (
    "An error is the largest difference from a definition in float64, relative to its largest value; "
    "where the limit is 0, nothing may differ."
)


def selftest(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object in place of the table.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the JSON object to this file, to send back from a new device.",
            metavar="FILE",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every check, not only each operation.")
    ] = False,
    require_device_kernels: RequireDeviceKernels = False,
) -> None:
    """Check every kernel and the demo pair on this device; exit status 1 if anything failed.

    What cannot run here is named. The report holds no path and no name. Where device kernels are
    required and none can run, nothing is checked and the exit status is 1.
    """
    with one_sentence_errors():
        required = kernel_registry("auto", False, require_device_kernels).required
        file = None if output is None else writable_file(output)
        races = CacheSettings.from_environment(os.environ).user_cache / "kernels"
        with shown_progress(notes) as progress:
            report = run_selftest(races, progress, required)
        status = deliver(report, as_json, file, verbose)
    raise typer.Exit(status)


def deliver(report: SelftestReport, as_json: bool, file: Path | None, verbose: bool = False) -> int:
    """Write and print the report; the exit status that belongs to it."""
    text = json.dumps(report.as_dict(), allow_nan=False)
    try:
        if file is not None:
            write_whole(file, text + "\n")
    finally:  # what was found is shown in any case
        if as_json:
            print(text)
        else:
            show(report, verbose)
    return FAILED if report.failed else 0


def writable_file(output: Path) -> Path:
    """The file behind `output`; RequestError if a report cannot be put there."""
    named = printable(str(output))
    try:
        return _writable_file(Path(os.path.realpath(output)), named)
    except (OSError, ValueError) as error:  # a name too long, a folder that cannot be looked into
        raise RequestError(
            f"{named} cannot be looked for ({reason(error)}): give --output another name."
        ) from error


def _writable_file(file: Path, named: str) -> Path:
    if file.is_dir():
        raise RequestError(f"{named} is a directory: give --output the name of a file.")
    if file.exists() and not file.is_file():
        raise RequestError(f"{named} is no regular file: give --output another name.")
    there = next(folder for folder in file.parents if folder.exists())
    if not there.is_dir():
        raise RequestError(
            f"{named} lies below {printable(str(there))}, which is a file: give --output another name."
        )
    if there != file.parent:
        parent = printable(shlex.quote(str(file.parent)))
        raise RequestError(
            f"{named} lies in a directory that does not exist: make it first with `mkdir -p {parent}`."
        )
    if not os.access(file.parent, os.W_OK):
        raise RequestError(f"{named} lies in a directory without write access: give another name.")
    return file


def write_whole(file: Path, text: str) -> None:
    """Put `text` into `file` in one step; OSError leaves what was there."""
    fresh = file.with_name(f".{file.name[:100]}.{os.getpid()}")
    try:
        fresh.write_text(text, "utf-8")
        fresh.replace(file)
    finally:
        fresh.unlink(missing_ok=True)


def show(report: SelftestReport, verbose: bool = False) -> None:
    """Print the report: a table with a line for each operation, or each check, and some sentences."""
    device, versions = report.device, report.versions
    shown = Console(highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        shown.print(text, markup=False)

    say(
        f"{device['chip']}, {device['system']}, MLX {versions['mlx']}, lse-mlx "
        f"{versions['lse-mlx']}: kernels run by {report.form}"
    )
    ran = [outcome for outcome in report.outcomes if outcome.status != "not run"]
    if verbose:
        for outcome in ran:
            say(_line(outcome))
    else:
        shown.print(_table(ran))
    say(ERRORS if verbose else f"{ERRORS} The one shown is the nearest to its limit.")
    several = [with_kernels(name) for name, kernels in report.kernels.items() if kernels != [name]]
    if several:
        say(f"operations and their kernels: {', '.join(several)}")
    for why, subjects in _not_run(report).items():
        checks = ", ".join(f"{count} of {name}" for name, count in sorted(subjects.items()))
        say(f"not run: {checks}, because {why}")
    for outcome in report.failed:
        say(f"failed: {with_kernels(outcome.subject)}, {outcome.name}: {outcome.why}")
    tally = Counter(outcome.status for outcome in report.outcomes)
    say(
        f"{tally['passed']} passed, {tally['failed']} failed, {tally['not run']} not run, "
        f"in {report.seconds:.1f} s"
    )


def _table(ran: list[Outcome]) -> Table:
    """A line for each operation and form that served it."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in ran:
        groups.setdefault((outcome.subject, outcome.served or "-"), []).append(outcome)
    table = Table()
    for title in ("operation", "served by", "checks", "failed", "worst error", "limit"):
        table.add_column(title)
    for (subject, served), outcomes in groups.items():
        failed = sum(outcome.status == "failed" for outcome in outcomes)
        worst = max(outcomes, key=_nearness)
        cells = [subject, served, str(len(outcomes)), str(failed)]
        cells += [_figure(worst.error), _figure(worst.limit)]
        table.add_row(*cells, style="bold" if failed else None)
    return table


def _nearness(outcome: Outcome) -> float:
    """How much of its limit an error is; a check without an error was not measured."""
    if outcome.error is None or outcome.limit is None:
        return -1.0
    if not outcome.error <= outcome.limit:  # written so that NaN is the worst
        return inf
    return outcome.error / outcome.limit if outcome.limit else 0.0


def _line(outcome: Outcome) -> str:
    what = f"{outcome.status}: {outcome.subject}, {outcome.name}"
    figures = f"error {_figure(outcome.error)}, limit {_figure(outcome.limit)}"
    return f"{what}: {figures}{f', by {outcome.served}' if outcome.served else ''}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _not_run(report: SelftestReport) -> dict[str, Counter[str]]:
    """By the reason, how many checks of what."""
    out: dict[str, Counter[str]] = {}
    for outcome in report.outcomes:
        if outcome.status == "not run":
            out.setdefault(outcome.why, Counter())[outcome.subject] += 1
    return out
