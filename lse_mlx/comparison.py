"""The same prompts decoded plain and speculatively in one run, and by stock mlx-lm for scale."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import dequantize_model

from lse_mlx.engine import Engine
from lse_mlx.replies import Result
from lse_mlx.target.loading import load_modules


@dataclass(frozen=True)
class Comparison:
    """Greedy replies to the same prompts; rates are decoding alone, without the prompt's pass."""

    prompts: list[str]
    plain: list[Result]
    speculative: list[Result]

    def summary(self) -> dict[str, Any]:
        """Totals over all prompts, ready for JSON."""
        plain, speculative = _rate(self.plain), _rate(self.speculative)
        timings = [r.timings for r in self.speculative]
        passes = sum(t["spec_steps"] for t in timings)
        tested = _columns(t["spec_tested_by_position"] for t in timings)
        accepted = _columns(t["spec_accepted_by_position"] for t in timings)
        return {
            "plain_tokens_per_second": plain,
            "speculative_tokens_per_second": speculative,
            "ratio": speculative / plain if plain else 0.0,
            "identical": all(
                a.token_ids == b.token_ids
                for a, b in zip(self.plain, self.speculative, strict=True)
            ),
            "tokens_per_pass": (
                sum(t["spec_steps_n"] for t in timings) / passes if passes else 0.0
            ),
            "acceptance_by_position": [
                a / t if t else None for a, t in zip(accepted, tested, strict=True)
            ],
            "prompts": len(self.prompts),
            "tokens": sum(len(r.token_ids) for r in self.speculative),
        }


def compare(
    engine: Engine,
    prompts: Sequence[str],
    max_tokens: int,
    on_reply: Callable[[str, Result], None] | None = None,
) -> Comparison:
    """Answer each prompt greedily, plain and then speculatively, turn about so that both meet the
    same machine. `on_reply` is told each prompt with its speculative reply.

    engine: strict, or a drafter that fails is compared as one that proposes nothing
    """
    # One short reply each first: what a first pass sets up belongs to neither rate.
    for speculate in (False, True):
        engine.generate(prompts[0], max_tokens=4, speculate=speculate)
    plain, speculative = [], []
    for prompt in prompts:
        plain.append(engine.generate(prompt, max_tokens=max_tokens, speculate=False))
        speculative.append(engine.generate(prompt, max_tokens=max_tokens))
        if on_reply:
            on_reply(prompt, speculative[-1])
    return Comparison(list(prompts), plain, speculative)


def mlx_lm_rate(folder: Path, prompt: list[int], tokens: int, dense: bool = False) -> float:
    """Tokens per second of mlx-lm's own `generate_step` with the checkpoint in `folder`.

    The model is loaded by mlx-lm as it is; with `dense` its weights are first dequantized to fp32,
    which is the form that lse-mlx computes with on a CPU. The prompt's pass is not counted.
    """
    model = load_modules(folder)
    if dense:
        model.set_dtype(mx.float32)
        model = dequantize_model(model)
    steps = generate_step(mx.array(prompt), model, max_tokens=tokens + 1)
    next(steps)
    started = perf_counter()
    done = sum(1 for _ in steps)
    return done / (perf_counter() - started)


def _rate(results: list[Result]) -> float:
    count = sum(r.timings["decode_n"] for r in results)
    ms = sum(r.timings["decode_ms"] for r in results)
    return 1000 * count / ms if ms else 0.0


def _columns(rows: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]
