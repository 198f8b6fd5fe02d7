"""What the commands share: the choice of a model, the prompt, and errors as one sentence."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import typer
from rich.console import Console

from lse_mlx.checkpoints.resolve import DEMO
from lse_mlx.errors import CheckpointError, LseError, RequestError, printable, reason

notes = Console(stderr=True, highlight=False, soft_wrap=True)
"""Where notes about the work go; what was asked for goes to standard output."""


def choose_model(model: str | None) -> str:
    """The model to use: the one named, or the demo pair where no Apple GPU could run a larger one.

    Says on stderr when it chose. Raises RequestError on an Apple GPU, where the user must choose.
    """
    if model is not None:
        return model
    if mx.metal.is_available():
        raise RequestError(
            f"No model is named: give --model with a folder or a repository, or --model {DEMO}."
        )
    notes.print("No --model given and no Apple GPU here: using the small demo pair.", style="dim")
    return DEMO


def read_prompt(prompt: str, raw: bool) -> str:
    """The prompt, from standard input where it is a dash.

    What a shell puts at the end of standard input, one line end, is not part of it. Raises
    RequestError for a prompt without text, and for input that is not UTF-8.
    """
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n") if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise RequestError(
            f"Standard input is not valid text at byte {error.start}: give it as UTF-8."
        ) from error
    if not text.strip() and not (raw and text):
        raise RequestError("The prompt is empty: give it some text.")
    return text


@contextmanager
def one_sentence_errors() -> Iterator[None]:
    """Turn an LseError into its sentence on stderr, and Ctrl-C into exit status 130.

    The status is 2 for what was asked wrongly, on the command line or in the environment, and for
    checkpoints that are missing, broken or no pair; it is 1 for the rest.
    """
    try:
        if sys.stdout is None:
            raise LseError("Standard output is closed: give the command somewhere to write.")
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # the reader had enough: the command line's library ends quietly
    except LseError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, RequestError | CheckpointError) else 1) from error
    except OSError as error:
        print(f"error: The output cannot be written ({reason(error)}).", file=sys.stderr)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        print("\ninterrupted", file=sys.stderr)
        raise typer.Exit(130) from error
