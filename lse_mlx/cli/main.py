"""The `lse-mlx` command. It holds no decoding logic: each command calls the engine and shows."""

import json
from typing import Annotated

import typer

from lse_mlx import __version__
from lse_mlx.checkpoints.resolve import AUTO, DEMO
from lse_mlx.cli.check import check
from lse_mlx.cli.common import choose_model, notes, one_sentence_errors
from lse_mlx.cli.convert import convert
from lse_mlx.cli.demo import run_demo
from lse_mlx.cli.generate import generate
from lse_mlx.cli.kernels import Exact, Kernels, RequireDeviceKernels, kernel_registry
from lse_mlx.cli.models import models
from lse_mlx.cli.options import AsJson, Drafter, MaxTokens, Model, NoDrafter, Yes, check_drafter
from lse_mlx.cli.pair import AllowRevisionMismatch, Offline, open_pair
from lse_mlx.cli.pull import pull
from lse_mlx.cli.qualify import qualify
from lse_mlx.cli.replay import replay
from lse_mlx.cli.reply_options import named_as_options
from lse_mlx.cli.selftest import selftest
from lse_mlx.cli.trace import trace
from lse_mlx.cli.warmup import run_warmup
from lse_mlx.decode.stopping import Limits

app = typer.Typer(
    help="Local language models, several tokens per pass, exactly the target's output.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"lse-mlx {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Local language models, several tokens per pass, exactly the target's output."""


app.command()(generate)


@app.command()
def demo(
    prompt: Annotated[
        str | None, typer.Option(help="One prompt of your own instead of the built-in ones.")
    ] = None,
    max_tokens: MaxTokens = 128,
    model: Model = None,
    drafter: Drafter = AUTO,
    offline: Offline = False,
    allow_revision_mismatch: AllowRevisionMismatch = False,
    yes: Yes = False,
    kernels: Kernels = "auto",
    exact: Exact = False,
    require_device_kernels: RequireDeviceKernels = False,
    as_json: AsJson = False,
) -> None:
    """Decode the same prompts plain and speculatively, and show texts, speeds and their ratio."""
    with one_sentence_errors():
        with named_as_options():
            Limits(frozenset(), max_tokens, room=1)
        registry = kernel_registry(kernels, exact, require_device_kernels)
        if model is None:
            notes.print("Using the small demo pair; --model names another.", style="dim")
        chosen = model or DEMO
        pair = open_pair(chosen, drafter, offline, allow_revision_mismatch, yes)
        report = run_demo(chosen, pair, prompt, max_tokens, registry, quiet=as_json)
        if as_json:
            print(json.dumps(report, ensure_ascii=False))


@app.command()
def warmup(
    model: Model = None,
    drafter: Drafter = AUTO,
    no_drafter: NoDrafter = False,
    offline: Offline = False,
    allow_revision_mismatch: AllowRevisionMismatch = False,
    yes: Yes = False,
    kernels: Kernels = "auto",
    exact: Exact = False,
    require_device_kernels: RequireDeviceKernels = False,
    as_json: AsJson = False,
) -> None:
    """Load a pair and run every shape once; show what was compiled, and which kernels are used.

    Which of two kernels is faster is found by a race and kept for later starts.
    """
    with one_sentence_errors():
        check_drafter(drafter, no_drafter)
        registry = kernel_registry(kernels, exact, require_device_kernels)
        chosen = choose_model(model)
        proposer = None if no_drafter else drafter
        pair = open_pair(chosen, proposer, offline, allow_revision_mismatch, yes)
        run_warmup(chosen, pair, registry, as_json)


app.command()(selftest)
app.command()(models)
app.command()(pull)
app.command()(convert)
app.command()(check)
app.command()(trace)
app.command()(replay)
app.command()(qualify)
