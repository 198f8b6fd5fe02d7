"""`lse-mlx check`: the gate alone, on configs, tokenizer files and headers."""

import json
import sys
from collections import Counter
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from lse_mlx.checkpoints.checks import Check, Words, shown
from lse_mlx.checkpoints.drafter_config import NEEDS
from lse_mlx.checkpoints.gate.gate import GateReport, inspect_pair
from lse_mlx.checkpoints.gate.known_pair import THE_RECORD
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.resolve import AUTO, resolve_pair
from lse_mlx.cli.common import one_sentence_errors
from lse_mlx.cli.pair import AllowRevisionMismatch
from lse_mlx.cli.progress import progress
from lse_mlx.errors import CheckpointError, printable

REFUSED = 2
"""Exit status where the drafter may not load, whatever the reason."""


def check(
    model: Annotated[
        str,
        typer.Option(help='Target: "demo", a pair, a folder or a repository.', metavar="MODEL"),
    ],
    drafter: Annotated[
        str,
        typer.Option(
            help='Drafter: the same; "auto" is the one registered for the target.',
            metavar="DRAFTER",
        ),
    ] = AUTO,
    allow_revision_mismatch: AllowRevisionMismatch = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Say whether a drafter belongs to a target, field by field, without loading either.

    Nothing is downloaded: what is not on this machine, `lse-mlx pull` brings.
    Exit status 0: it does. 2: it does not, or there is nothing that can be compared.
    """
    with one_sentence_errors():
        try:
            report = _inspect(model, drafter)
        except CheckpointError as error:
            if as_json:
                print(json.dumps({"accepted": False, "error": str(error)}))
            _refuse(str(error))
        if as_json:
            print(json.dumps(report.as_dict(allow_revision_mismatch)))
        else:
            _show(report, allow_revision_mismatch)
        if not report.accepts(allow_revision_mismatch):
            _refuse(report.refusal(allow_revision_mismatch))


def _inspect(model: str, drafter: str) -> GateReport:
    # Headers are read, so weights are not worth a download of gigabytes.
    with progress() as shown_progress:
        pair = resolve_pair(model, drafter, Hub(offline=True), shown_progress)
    if pair.drafter is None:
        raise CheckpointError(f"No drafter is registered for {model!r}: give one with --drafter.")
    return inspect_pair(pair.target, pair.drafter)


def _refuse(sentence: str) -> NoReturn:
    print(f"error: {printable(sentence)}", file=sys.stderr)
    raise typer.Exit(REFUSED)


def _show(report: GateReport, allow_revision_mismatch: bool) -> None:
    table = Table()
    for title in ("field", "drafter", "target", "verdict"):
        table.add_column(title, overflow="fold")
    for row in _rows(report, allow_revision_mismatch):
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for note in report.notes:
        console.print(printable(note))
    if report.accepts(allow_revision_mismatch):
        console.print("The drafter belongs to this target.")


def _rows(report: GateReport, allow_revision_mismatch: bool) -> list[tuple[str, str, str, str]]:
    """Rows of the table: comparisons by the dozen that all hold are one row."""
    rows, alike = [], Counter(group for c in report.checks if c.holds and (group := _group(c)))
    for one in report.checks:
        group = _group(one) if one.holds else ""
        if not group:
            drafter, target = _cell(one.drafter), _cell(one.target)
            rows.append(
                (printable(one.field), drafter, target, _verdict(one, allow_revision_mismatch))
            )
        elif count := alike.pop(group, 0):
            rows.append((f"{count} {group}", "all", "as asked for", "holds"))
    return rows


def _group(check: Check) -> str:
    if check.field.startswith("tensor "):
        return "tensors"
    if check.says == NEEDS:
        return "rules of config.json"
    return "fields in the record" if check.says.startswith(THE_RECORD) else ""


def _cell(value: object) -> str:
    if not isinstance(value, str) or isinstance(value, Words):
        return shown(value)
    is_hash = len(value) == 64 and set(value) <= set("0123456789abcdef")
    return f"{value[:12]}..." if is_hash else shown(Words(value))


def _verdict(check: Check, allow_revision_mismatch: bool) -> str:
    if check.holds:
        return "holds"
    if check.kind == "revision":
        return "another revision" + (", allowed" if allow_revision_mismatch else "")
    return "MISMATCH"
