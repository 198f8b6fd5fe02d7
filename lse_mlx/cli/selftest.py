"""`lse-mlx selftest`: every kernel and the demo pair checked on this device."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.progress import Lines, Progress
from lse_mlx.cli.common import notes, one_sentence_errors
from lse_mlx.errors import RequestError, printable
from lse_mlx.selftest.report import SelftestReport, run_selftest

FAILED = 1
"""Exit status where a check failed."""


def selftest(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object in place of the table.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the JSON object to this file, to send back from a new device."),
    ] = None,
) -> None:
    """Check every kernel and the demo pair on this device; exit status 1 if anything failed.

    What cannot run here is named. The report holds no path and no name.
    """
    with one_sentence_errors():
        file = None if output is None else writable_file(output)
        races = CacheSettings.from_environment(os.environ).user_cache / "kernels"
        with shown_progress(notes) as progress:
            report = run_selftest(races, progress)
        status = deliver(report, as_json, file)
    raise typer.Exit(status)


def deliver(report: SelftestReport, as_json: bool, file: Path | None) -> int:
    """Write and print the report; the exit status that belongs to it."""
    text = json.dumps(report.as_dict())
    try:
        if file is not None:
            write_whole(file, text + "\n")
    finally:  # what was found is shown in any case
        if as_json:
            print(text)
        else:
            show(report)
    return FAILED if report.failed else 0


class Line:
    """Progress as one line of a terminal that changes: what is being done, and how far it is."""

    def __init__(self, status: Status):
        self._status = status

    def note(self, text: str) -> None:
        pass

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        what = f": {printable(tensor)}" if tensor else ""
        self._status.update(escape(f"{phase}, {done} of {total}{what}"))


@contextmanager
def shown_progress(console: Console) -> Iterator[Progress]:
    """A line that changes on a terminal, else lines."""
    if not console.is_terminal:
        yield Lines()
        return
    with console.status("checking") as status:
        yield Line(status)


def writable_file(output: Path) -> Path:
    """The file behind `output`; RequestError if a report cannot be put there."""
    file, named = Path(os.path.realpath(output)), printable(str(output))
    if file.is_dir():
        raise RequestError(f"{named} is a directory: give --output the name of a file.")
    if file.exists() and not file.is_file():
        raise RequestError(f"{named} is no regular file: give --output another name.")
    if not file.parent.is_dir():
        raise RequestError(f"{named} lies in no directory that exists: make the directory first.")
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


def show(report: SelftestReport) -> None:
    """Print the report as a table and some sentences."""
    device, versions = report.device, report.versions
    shown = Console(highlight=False, soft_wrap=True)
    shown.print(
        f"{device['chip']}, {device['system']}, MLX {versions['mlx']}, lse-mlx "
        f"{versions['lse-mlx']}: kernels run by {report.form}",
        markup=False,
    )
    shown.print(_table(report))
    for reason, subjects in _not_run(report).items():
        counted = ", ".join(f"{name} ({count})" for name, count in sorted(subjects.items()))
        shown.print(f"not run: {counted}, because {reason}", markup=False)
    for outcome in report.failed:
        shown.print(f"failed: {outcome.subject}, {outcome.name}: {outcome.why}", markup=False)
    tally = Counter(outcome.status for outcome in report.outcomes)
    shown.print(
        f"{tally['passed']} passed, {tally['failed']} failed, {tally['not run']} not run, "
        f"in {report.seconds:.1f} s"
    )


def _table(report: SelftestReport) -> Table:
    table = Table()
    for title in ("", "kernel", "check", "served by", "error", "limit"):
        table.add_column(title)
    for outcome in report.outcomes:
        if outcome.status == "not run":
            continue
        error = "-" if outcome.error is None else f"{outcome.error:.2g}"
        limit = "-" if outcome.limit is None else f"{outcome.limit:.2g}"
        cells = [outcome.status, outcome.subject, outcome.name, outcome.served or "-", error, limit]
        table.add_row(*cells, style="bold" if outcome.status == "failed" else None)
    return table


def _not_run(report: SelftestReport) -> dict[str, Counter[str]]:
    """By the reason, how many checks of what."""
    out: dict[str, Counter[str]] = {}
    for outcome in report.outcomes:
        if outcome.status == "not run":
            out.setdefault(outcome.why, Counter())[outcome.subject] += 1
    return out
