"""Arguments that several commands share: the prompt, which models, how long a reply, what to print."""

from typing import Annotated

import typer

from lse_mlx.checkpoints.resolve import AUTO
from lse_mlx.errors import RequestError

MODELS = "Models"
"""The heading in `--help` under which options about checkpoints stand."""

ENDS = "Where the reply ends"

Prompt = Annotated[
    str,
    typer.Argument(
        help='What to answer; "-" reads standard input. Put "--" before a prompt that begins with a '
        "dash.",
        metavar="PROMPT",
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Take the prompt as it stands, without a chat template.")
]

_TARGET = (
    "Target: a pair's name (`lse-mlx models` lists them), a folder, or a Hugging Face repository."
)
Model = Annotated[
    str | None,
    typer.Option(
        help=f"{_TARGET} Without it the demo pair is used.",
        metavar="MODEL",
        rich_help_panel=MODELS,
    ),
]
ModelOrApple = Annotated[
    str | None,
    typer.Option(
        help=f"{_TARGET} Without it the demo pair is used, but on an Apple GPU it must be named.",
        metavar="MODEL",
        rich_help_panel=MODELS,
    ),
]
Drafter = Annotated[
    str,
    typer.Option(
        help='Drafter: a folder, a repository, or a pair\'s name; "auto" is the one registered for '
        "the target, and none where there is none.",
        metavar="DRAFTER",
        rich_help_panel=MODELS,
    ),
]
NoDrafter = Annotated[
    bool, typer.Option("--no-drafter", help="Use the target alone.", rich_help_panel=MODELS)
]
StrictDraft = Annotated[
    bool,
    typer.Option(
        "--strict-draft",
        help="End with an error when the drafter fails. Otherwise the target goes on alone.",
        rich_help_panel=MODELS,
    ),
]
Yes = Annotated[
    bool,
    typer.Option(
        "--yes",
        "-y",
        help="Convert a target in bf16 to 4 bits without asking.",
        rich_help_panel=MODELS,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        help="The most tokens of a reply; any number, as it also ends where the context is full.",
        metavar="N",
        rich_help_panel=ENDS,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def check_drafter(drafter: str, no_drafter: bool) -> None:
    """RequestError where a drafter is named and none is wanted."""
    if no_drafter and drafter != AUTO:
        raise RequestError("--drafter and --no-drafter contradict each other: give one.")
