"""`lse-mlx warmup`: load a pair, run every shape once, and show what was compiled and chosen."""

import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.cli.progress import progress
from lse_mlx.loading import Registry, load_pair, with_kernels

shown = Console(highlight=False, soft_wrap=True)


def run_warmup(model: str, pair: Pair, registry: Registry, as_json: bool) -> None:
    """Load the pair with a warm-up, and print its report as JSON or as tables."""
    with progress() as told, load_pair(pair, registry=registry, progress=told) as engine:
        assert engine.warmed is not None
        report = {"model": model, **engine.warmed.as_dict()}
    if as_json:
        print(json.dumps(report, allow_nan=False))
        return
    if report["kernels"]:
        shown.print(_kernels(report))
    if report["forms"]:
        shown.print(_forms(report))
    if report["races"]:
        shown.print(_races(report))
    for line in _sentences(report):
        shown.print(line)


def _kernels(report: dict[str, Any]) -> Table:
    """Where nothing was compiled, without the columns about that."""
    table = Table(title="kernels")
    table.add_column("kernel")
    table.add_column("served by")
    if report["jit_compiles"]:
        table.add_column("variant")
        table.add_column("compile ms", justify="right")
    for kernel in report["kernels"]:
        calls = kernel["calls"]
        # A reference serves an operation, and so all of its kernels.
        name = with_kernels(kernel["name"]) if "reference" in calls else kernel["name"]
        first = [name, ", ".join(f"{form} ({count})" for form, count in calls.items())]
        variants = [[row["variant"], f"{row['compile_ms']:.1f}"] for row in kernel["variants"]]
        for at, cells in enumerate(variants or [["-", "-"]]):
            row = [*(first if at == 0 else ["", ""]), *cells]
            table.add_row(*row[: len(table.columns)])
    return table


def _forms(report: dict[str, Any]) -> Table:
    table = Table(title="forms of operations that MLX has too")
    for title in ("operation and shape", "form"):
        table.add_column(title)
    for shape, form in report["forms"].items():
        table.add_row(shape, form)
    return table


def _races(report: dict[str, Any]) -> Table:
    table = Table(title="races, microseconds a call")
    forms = sorted({form for race in report["races"] for form in race["microseconds"]})
    forms = ["stock", *(form for form in forms if form != "stock")]
    for title in ("operation and shape", *forms, "winner"):
        table.add_column(title)
    for race in report["races"]:
        times = race["microseconds"]
        cells = [f"{times[form]:.1f}" if form in times else "-" for form in forms]
        table.add_row(f"{race['operation']} {race['shape']}", *cells, race["winner"])
    return table


def _sentences(report: dict[str, Any]) -> list[str]:
    device = report["device"]
    lines = [
        f"{device['chip']}, {device['system']}, MLX {device['mlx']}: kernels run by "
        f"{report['form']}, choice {report['mode']}{', exact' if report['exact'] else ''}",
        f"{report['jit_compiles']} compilations in {report['jit_compile_ms']:.0f} ms; "
        f"warm-up {report['seconds']:.2f} s",
    ]
    if report["races"]:
        wins = Counter("stock" if r["winner"] == "stock" else "own" for r in report["races"])
        lines.append(
            f"races won by kernels of lse-mlx: {wins['own']}, by stock MLX: {wins['stock']}; "
            f"run now: {report['raced']}"
        )
    if report["spec_tested"]:
        lines.append(
            f"drafted tokens accepted: {report['spec_accepted']} of {report['spec_tested']}"
        )
    return lines
