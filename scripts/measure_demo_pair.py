"""Measure the demo pair with the engine itself, on prompts that neither model was trained on.

    python scripts/measure_demo_pair.py --prompts 128 --temperature 0.7 --output figures.json

Prints one JSON object: tokens per verify pass over all replies and over those without loops,
acceptance by position, and the share of replies without loops and of replies that name the thing
they were asked about. A pass counts when all of its proposals lie inside the reply: near the end a
pass has less to win than its width. Prompts with known words are new combinations of words that
training used; those with new words are about things that it never named.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lse_mlx
from lse_mlx.demo_pair import HELD_OUT_PROMPTS

LOOP_FREE = 0.8
"""A reply whose share of distinct 4-grams is at least this counts as one without loops."""


@dataclass(frozen=True)
class Reply:
    """One measured reply: its tokens, how many each pass emitted, and whether it names its topic."""

    tokens: list[int]
    passes: list[int]
    ended: bool
    on_topic: bool

    @property
    def distinct(self) -> float:
        """The share of distinct 4-grams among the reply's tokens; 1 for a very short reply."""
        grams = [tuple(self.tokens[i : i + 4]) for i in range(len(self.tokens) - 3)]
        return len(set(grams)) / len(grams) if grams else 1.0

    def full_passes(self, depth: int) -> list[int]:
        """Tokens of each pass that had room for `depth` proposals and its own answer."""
        length = len(self.tokens) + self.ended  # the stop token is the reply's last
        counted, start = [], 1  # the first token came with the prompt
        for emitted in self.passes:
            if start + depth + 1 <= length:
                counted.append(emitted)
            start += emitted
        return counted


def measure(
    engine: lse_mlx.Engine, entry: dict[str, str], max_tokens: int, temperature: float, seed: int
) -> Reply:
    """Answer one held-out prompt speculatively."""
    pieces = list(
        engine.stream(entry["prompt"], max_tokens=max_tokens, temperature=temperature, seed=seed)
    )
    result = pieces[-1].result
    assert result is not None
    return Reply(
        tokens=result.token_ids,
        passes=[len(piece.token_ids) for piece in pieces[1:]],
        ended=result.finish_reason == "stop",
        on_topic=entry["keyword"].lower() in result.text.lower(),
    )


def report(replies: list[Reply], depth: int) -> dict[str, Any]:
    """The figures over `replies`."""
    clean = [reply for reply in replies if reply.distinct >= LOOP_FREE]
    return {
        "replies": len(replies),
        "tokens_per_pass": _per_pass(replies, depth),
        "tokens_per_pass_without_loops": _per_pass(clean, depth),
        "share_without_loops": len(clean) / len(replies),
        "share_on_topic": sum(reply.on_topic for reply in replies) / len(replies),
        "share_ended": sum(reply.ended for reply in replies) / len(replies),
        "mean_tokens": sum(len(reply.tokens) for reply in replies) / len(replies),
        "passes": sum(len(reply.full_passes(depth)) for reply in replies),
    }


def _per_pass(replies: list[Reply], depth: int) -> float:
    counted = [n for reply in replies for n in reply.full_passes(depth)]
    return sum(counted) / len(counted) if counted else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument(
        "--words",
        choices=["known", "new"],
        default="known",
        help="nouns that training knows or not",
    )
    parser.add_argument("--max-tokens", type=int, default=232)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    held_out = json.loads(HELD_OUT_PROMPTS.read_text(encoding="utf-8"))
    entries = [entry for entry in held_out if entry["words"] == options.words][: options.prompts]
    with lse_mlx.load(options.model, options.drafter, strict_draft=True) as engine:
        assert engine.drafter is not None
        replies = [
            measure(engine, entry, options.max_tokens, options.temperature, seed)
            for seed, entry in enumerate(entries)
        ]
        figures = {"words": options.words, "temperature": options.temperature}
        figures |= report(replies, engine.drafter.depth)
    text = json.dumps(figures, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
