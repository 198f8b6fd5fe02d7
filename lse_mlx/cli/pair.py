"""The pair of a command: from its options to folders that can be loaded."""

import os
import sys
from typing import Annotated

import typer

from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.prepare import prepare_pair
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.cli.options import MODELS
from lse_mlx.cli.progress import progress

Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="Use what is on this machine and never connect.",
        rich_help_panel=MODELS,
    ),
]
AllowRevisionMismatch = Annotated[
    bool,
    typer.Option(
        "--allow-revision-mismatch",
        help="Accept a drafter of another revision than the recorded one; nothing else.",
        rich_help_panel=MODELS,
    ),
]


def open_pair(
    model: str, drafter: str | None, offline: bool, allow_revision_mismatch: bool, yes: bool
) -> Pair:
    """Find, check and convert a pair, with the progress on the terminal.

    yes: convert a target in bf16 without asking; otherwise only a terminal is asked
    """
    with progress() as shown:
        return prepare_pair(
            model,
            drafter,
            hub=Hub(offline=offline),
            settings=CacheSettings.from_environment(os.environ),
            progress=shown,
            allow_revision_mismatch=allow_revision_mismatch,
            quantize_target=yes or (ask if can_ask() else False),
        )


def can_ask() -> bool:
    """Whether somebody is there to answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> bool:
    """The answer to a question of one line on stderr; Enter is a yes."""
    return typer.confirm(question, default=True, err=True)
