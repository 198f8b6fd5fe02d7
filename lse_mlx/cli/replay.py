"""`lse-mlx replay`: let the target decide a recorded generation again."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from lse_mlx.checkpoints.drafter_config import DFlash2Config
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.progress import Silent
from lse_mlx.checkpoints.resolve import AUTO, resolve_pair
from lse_mlx.cli.common import choose_model, one_sentence_errors
from lse_mlx.cli.kernels import Exact, Kernels, RequireDeviceKernels, kernel_registry
from lse_mlx.cli.options import MODELS, AsJson, ModelOrApple
from lse_mlx.cli.pair import Offline, open_pair
from lse_mlx.cli.progress import progress
from lse_mlx.errors import CheckpointError, ProtocolError, printable
from lse_mlx.loading import load_pair
from lse_mlx.protocol.replay import ReplayReport
from lse_mlx.protocol.trace import Trace
from lse_mlx.protocol.trace_files import read_trace
from lse_mlx.traces.identity import identify
from lse_mlx.traces.native import replay_on

DIFFERENT = 1
"""Exit status where the target does not confirm what was recorded."""
REFUSED = 2
"""Exit status where the trace is broken, or belongs to another target or request."""


def replay(
    folder: Annotated[Path, typer.Argument(help="A folder that `trace` made.", metavar="DIR")],
    as_json: AsJson = False,
    model: ModelOrApple = None,
    drafter: Annotated[
        str,
        typer.Option(
            help="Refuse a trace that captured other layers than this drafter reads. It is not "
            'loaded; "auto" is the one registered for the target, if it is on this machine.',
            metavar="DRAFTER",
            rich_help_panel=MODELS,
        ),
    ] = AUTO,
    owner: Annotated[
        str | None,
        typer.Option(help="Refuse a trace of another request_owner.", metavar="NAME"),
    ] = None,
    generation: Annotated[
        int | None,
        typer.Option(help="Refuse a trace of another request_generation.", metavar="N"),
    ] = None,
    offline: Offline = False,
    kernels: Kernels = "auto",
    exact: Exact = False,
    require_device_kernels: RequireDeviceKernels = False,
) -> None:
    """Replay the trace in DIR on the target, step by step, and show the first difference.

    Exit status 0: there is none. 1: there is one. 2: the trace is refused, and which field of it.
    """
    with one_sentence_errors():
        registry = kernel_registry(kernels, exact, require_device_kernels)
        try:
            trace = read_trace(folder)
            chosen = choose_model(model)
            layers = _layers(trace, chosen, drafter)
            pair = open_pair(chosen, None, offline, False, yes=False)
            with progress() as told:
                identity = identify(pair.target, told)
                engine = load_pair(pair, registry=registry, progress=told)
            with engine:
                report = replay_on(
                    engine.target,
                    identity,
                    trace,
                    layers=layers,
                    owner=owner,
                    generation=generation,
                )
        except ProtocolError as refused:
            if as_json:
                print(json.dumps({"refused": refused.field, "error": str(refused)}))
            print(f"error: {printable(str(refused))}", file=sys.stderr)
            raise typer.Exit(REFUSED) from refused
        _show(report, as_json)
        if report.differences:
            raise typer.Exit(DIFFERENT)


def _layers(trace: Trace, model: str, drafter: str) -> tuple[int, ...] | None:
    """The layers that a trace for this pair has captured; None where nobody knows."""
    if trace.header.drafter is None and drafter == AUTO:
        return None
    try:
        found = resolve_pair(model, drafter, Hub(offline=True), Silent()).drafter
    except CheckpointError:
        if drafter != AUTO:
            raise
        return None
    return None if found is None else DFlash2Config.read(found).target_layer_ids


def _show(report: ReplayReport, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.as_dict()))
        return
    print(printable(str(report)))
    for difference in report.differences[1:]:
        print(printable(str(difference)))
