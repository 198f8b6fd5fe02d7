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
from lse_mlx.cli.generate import read_input, show_reply
from lse_mlx.cli.kernels import Exact, Kernels, RequireDeviceKernels, kernel_registry
from lse_mlx.cli.models import models
from lse_mlx.cli.pair import AllowRevisionMismatch, Offline, open_pair
from lse_mlx.cli.progress import progress
from lse_mlx.cli.pull import pull
from lse_mlx.cli.selftest import selftest
from lse_mlx.cli.warmup import run_warmup
from lse_mlx.decode.randomness import Streams
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.stopping import Limits
from lse_mlx.engine import MAX_TOKENS, load_pair
from lse_mlx.errors import RequestError

app = typer.Typer(
    help="Local language models, several tokens per pass, exactly the target's output.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TARGET = (
    "Target: a pair's name (`lse-mlx models` lists them), a folder, or a Hugging Face repository."
)
Model = Annotated[
    str | None, typer.Option(help=f"{_TARGET} Without it the demo pair is used.", metavar="MODEL")
]
ModelOrApple = Annotated[
    str | None,
    typer.Option(
        help=f"{_TARGET} Without it the demo pair is used, but on an Apple GPU it must be named.",
        metavar="MODEL",
    ),
]
Drafter = Annotated[
    str,
    typer.Option(
        help='Drafter: a folder, a repository, or a pair\'s name; "auto" is the one registered for '
        "the target, and none where there is none.",
        metavar="DRAFTER",
    ),
]
NoDrafter = Annotated[bool, typer.Option("--no-drafter", help="Use the target alone.")]
MaxTokens = Annotated[int, typer.Option(help="The most tokens of a reply.", metavar="N")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Yes = Annotated[
    bool, typer.Option("--yes", "-y", help="Convert a target in bf16 to 4 bits without asking.")
]


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


@app.command()
def generate(
    prompt: Annotated[
        str,
        typer.Argument(
            help='What to answer; "-" reads standard input. Put "--" before a prompt that begins '
            "with a dash.",
            metavar="PROMPT",
        ),
    ],
    model: ModelOrApple = None,
    drafter: Drafter = AUTO,
    no_drafter: NoDrafter = False,
    max_tokens: MaxTokens = MAX_TOKENS,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the K likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep this much probability; 1 keeps all.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest; 0 keeps all.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Fixes a sampled reply; a fresh one if not given.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it stands, without a chat template.")
    ] = False,
    offline: Offline = False,
    allow_revision_mismatch: AllowRevisionMismatch = False,
    yes: Yes = False,
    kernels: Kernels = "auto",
    exact: Exact = False,
    require_device_kernels: RequireDeviceKernels = False,
    as_json: AsJson = False,
) -> None:
    """Answer PROMPT."""
    with one_sentence_errors():
        # Bad settings are refused here, before a long load.
        Sampling(temperature, top_k, top_p, min_p)
        Limits(frozenset(), max_tokens, room=1)
        Streams.from_seed(seed or 0)
        _check_drafter(drafter, no_drafter)
        registry = kernel_registry(kernels, exact, require_device_kernels)
        chosen = choose_model(model)
        proposer = None if no_drafter else drafter
        pair = open_pair(chosen, proposer, offline, allow_revision_mismatch, yes)
        with progress() as told:
            engine = load_pair(pair, registry=registry, progress=told)
        with engine:
            pieces = engine.stream(
                read_input() if prompt == "-" else prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                raw=raw,
            )
            show_reply(pieces, as_json)


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
        _check_drafter(drafter, no_drafter)
        registry = kernel_registry(kernels, exact, require_device_kernels)
        chosen = choose_model(model)
        proposer = None if no_drafter else drafter
        pair = open_pair(chosen, proposer, offline, allow_revision_mismatch, yes)
        run_warmup(chosen, pair, registry, as_json)


def _check_drafter(drafter: str, no_drafter: bool) -> None:
    if no_drafter and drafter != AUTO:
        raise RequestError("--drafter and --no-drafter contradict each other: give one.")


app.command()(selftest)
app.command()(models)
app.command()(pull)
app.command()(convert)
app.command()(check)
