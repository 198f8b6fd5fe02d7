"""The prompts that a pair is qualified with."""

import json
from pathlib import Path
from typing import Any

from lse_mlx.demo_pair import HELD_OUT_PROMPTS
from lse_mlx.errors import RequestError, printable, reason

GENERAL = (
    "Tell me a short story about a brave sailor.",
    "Explain in a few sentences why the sky is blue.",
    "List five things to pack for a walk in the mountains.",
    "Write a polite letter that asks a neighbour to keep a secret.",
)
"""For rungs that need some text and no particular one."""


def demo_prompts() -> list[str]:
    """The demo pair's held-out prompts, on which neither of its models was trained."""
    return _texts(json.loads(HELD_OUT_PROMPTS.read_text(encoding="utf-8")), HELD_OUT_PROMPTS)


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file, in its order.

    A JSON list holds texts, or objects with a text under "prompt". Anything else is text with a prompt
    a line; empty lines do not count. Raises RequestError for a file that cannot be read as UTF-8, holds
    no prompt, or begins as a JSON object does.
    """
    named = printable(str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise RequestError(
            f"The prompts in {named} cannot be read ({reason(error)}): give a file of UTF-8 text."
        ) from error
    if text.lstrip().startswith("{"):
        raise RequestError(
            f"{named} begins as a JSON object, which is no prompt: give a JSON list, or a text with a "
            "prompt a line."
        )
    if text.lstrip().startswith("["):
        try:
            prompts = _texts(json.loads(text), path)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"The prompts in {named} are no JSON list ({reason(error)}): "
                "give one, or a text with a prompt a line."
            ) from error
    else:
        prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise RequestError(f"{named} holds no prompt: give one a line, or a JSON list.")
    return prompts


def _texts(held: list[Any], path: Path) -> list[str]:
    texts = [entry.get("prompt") if isinstance(entry, dict) else entry for entry in held]
    for entry, text in zip(held, texts, strict=True):
        if not isinstance(text, str) or not text.strip():
            raise RequestError(
                f"{printable(str(path))} holds {printable(repr(entry)[:100])}: "
                'give texts, or objects with a text under "prompt".'
            )
    return [text for text in texts if isinstance(text, str)]
