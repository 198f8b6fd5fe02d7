"""Showing a reply as it comes."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from lse_mlx.cli.common import notes
from lse_mlx.engine import Piece, Result
from lse_mlx.errors import RequestError, counted


def read_input() -> str:
    """Standard input as a prompt: what a shell puts at its end, one line end, is not part of it.

    Raises RequestError for what is not UTF-8 text.
    """
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"Standard input is not valid text at byte {error.start}: give it as UTF-8."
        ) from error


def show_reply(pieces: Iterator[Piece], as_json: bool) -> None:
    """Print the text as it arrives and a line of figures on stderr, or one JSON object."""
    result: Result | None = None
    for piece in pieces:
        if not as_json:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        result = piece.result
    assert result is not None  # the last piece always has it
    if as_json:
        print(json.dumps(asdict(result), ensure_ascii=False))
        return
    print()
    notes.print(_figures(result), style="dim")


def _figures(result: Result) -> str:
    t = result.timings
    reply = f"reply {counted(t['generated_n'], 'token')}"
    if t["decode_n"]:  # the first token came with the prompt and has no rate
        reply += f" at {t['decode_per_second']:.1f} tokens/s"
    parts = [f"prompt {counted(t['prompt_n'], 'token')} in {t['prompt_ms'] / 1000:.2f} s", reply]
    if "tokens_per_pass" in t:
        parts.append(f"{t['tokens_per_pass']:.2f} tokens per verify pass")
    parts.append(f"ended by {result.stop_reason}")
    return "; ".join(parts)
