"""The `lse-mlx` command. It holds no decoding logic: each command calls the engine and shows."""

import json
import sys
from typing import Annotated

import typer

app = typer.Typer(
    help="Local language models, several tokens per pass, exactly the target's output.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str | None,
    typer.Option(help='Target: "demo", a folder, or a Hugging Face repository.', metavar="MODEL"),
]
MaxTokens = Annotated[int, typer.Option(help="The most tokens of a reply.", metavar="N")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"lse-mlx {version('lse-mlx')}")
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
    prompt: Annotated[str, typer.Argument(help='What to answer; "-" reads standard input.')],
    model: Model = None,
    drafter: Annotated[
        str | None,
        typer.Option(help='Drafter: "demo", a folder, or a repository.', metavar="DRAFTER"),
    ] = None,
    no_drafter: Annotated[
        bool, typer.Option("--no-drafter", help="Decode with the target alone.")
    ] = False,
    max_tokens: MaxTokens = 256,
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
    as_json: AsJson = False,
) -> None:
    """Answer PROMPT."""
    # Imported here so that --help and --version do not wait for MLX.
    from lse_mlx.checkpoints.resolve import AUTO
    from lse_mlx.cli.common import choose_model, one_sentence_errors
    from lse_mlx.cli.generate import show_reply
    from lse_mlx.decode.sampling import Sampling
    from lse_mlx.engine import load
    from lse_mlx.errors import RequestError

    with one_sentence_errors():
        Sampling(temperature, top_k, top_p, min_p)  # refuses bad settings before a long load
        if no_drafter and drafter is not None:
            raise RequestError("--drafter and --no-drafter contradict each other: give one.")
        chosen = choose_model(model)
        with load(chosen, None if no_drafter else drafter or AUTO) as engine:
            pieces = engine.stream(
                sys.stdin.read() if prompt == "-" else prompt,
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
    drafter: Annotated[
        str | None,
        typer.Option(help='Drafter: "demo", a folder, or a repository.', metavar="DRAFTER"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Decode the same prompts plain and speculatively, and show texts, speeds and their ratio."""
    from lse_mlx.checkpoints.resolve import DEMO
    from lse_mlx.cli.common import console, one_sentence_errors
    from lse_mlx.cli.demo import run_demo

    with one_sentence_errors():
        if model is None:
            console.print("Using the small demo pair; --model names another.", style="dim")
        report = run_demo(model or DEMO, drafter, prompt, max_tokens, quiet=as_json)
        if as_json:
            print(json.dumps(report, ensure_ascii=False))
