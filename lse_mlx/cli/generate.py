"""Showing a reply as it comes."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from lse_mlx.cli.common import console
from lse_mlx.engine import Piece, Result


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
    console.print(_figures(result), style="dim")


def _figures(result: Result) -> str:
    t = result.timings
    parts = [
        f"prompt {t['prompt_n']} tokens in {t['prompt_ms'] / 1000:.2f} s",
        f"reply {t['generated_n']} tokens at {t['decode_per_second']:.1f} tokens/s",
    ]
    if "tokens_per_pass" in t:
        parts.append(f"{t['tokens_per_pass']:.2f} tokens per verify pass")
    parts.append(f"ended by {result.stop_reason}")
    return "; ".join(parts)
