"""The demo: the same prompts plain and speculatively, in one run."""

import json
from typing import Any

import mlx.core as mx
from rich.table import Table

from lse_mlx.checkpoints.resolve import AUTO, resolve_pair
from lse_mlx.cli.common import console
from lse_mlx.comparison import Comparison, compare, mlx_lm_rate
from lse_mlx.demo_pair import HELD_OUT_PROMPTS
from lse_mlx.engine import Result, load
from lse_mlx.errors import RequestError

PROMPTS = 8
MLX_LM_TOKENS = 32


def run_demo(
    model: str, drafter: str | None, prompt: str | None, max_tokens: int, quiet: bool
) -> dict[str, Any]:
    """Run the comparison and show it on the terminal unless `quiet`; returns the whole report.

    The built-in prompts are ones that neither model of the demo pair was trained on.
    """
    prompts = [prompt] if prompt is not None else built_in_prompts()
    pair = resolve_pair(model, drafter or AUTO)
    if pair.drafter is None:
        raise RequestError(f"The demo compares with and without a drafter: give {model!r} one.")
    with load(model, drafter or AUTO) as engine:
        comparison = compare(engine, prompts, max_tokens, None if quiet else _show_reply)
        first = engine.tokenizer.encode(prompts[0])
    report = {
        "model": model,
        "max_tokens": max_tokens,
        **comparison.summary(),
        "mlx_lm_tokens_per_second": mlx_lm_rate(pair.target, first, MLX_LM_TOKENS),
        # A form that lse-mlx computes with on a CPU only; elsewhere it may not fit into memory.
        "mlx_lm_fp32_tokens_per_second": (
            mlx_lm_rate(pair.target, first, MLX_LM_TOKENS, dense=True)
            if mx.default_device() == mx.cpu
            else None
        ),
        "replies": _replies(comparison),
    }
    if not quiet:
        console.print(_table(report))
    return report


def built_in_prompts() -> list[str]:
    """The first prompts of the demo pair's held-out list, on which it was never trained."""
    held = json.loads(HELD_OUT_PROMPTS.read_text(encoding="utf-8"))
    return [entry["prompt"] for entry in held[:PROMPTS]]


def _replies(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {
            "prompt": prompt,
            "text": fast.text,
            "finish_reason": fast.finish_reason,
            "tokens": len(fast.token_ids),
            "identical": plain.token_ids == fast.token_ids,
            "plain_tokens_per_second": plain.timings["decode_per_second"],
            "speculative_tokens_per_second": fast.timings["decode_per_second"],
            "tokens_per_pass": fast.timings.get("tokens_per_pass", 0.0),
        }
        for prompt, plain, fast in zip(
            comparison.prompts, comparison.plain, comparison.speculative, strict=True
        )
    ]


def _show_reply(prompt: str, result: Result) -> None:
    console.print(f"> {prompt}", style="bold", markup=False)
    print(result.text, flush=True)
    console.print()


def _table(report: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    same = "the same tokens" if report["identical"] else "DIFFERENT tokens"
    by_position = " ".join(f"{share:.2f}" for share in report["acceptance_by_position"])
    dense = report["mlx_lm_fp32_tokens_per_second"]
    for name, value in (
        ("mlx-lm, stock", f"{report['mlx_lm_tokens_per_second']:.1f} tokens/s"),
        ("mlx-lm, weights in fp32", "not run" if dense is None else f"{dense:.1f} tokens/s"),
        ("plain", f"{report['plain_tokens_per_second']:.1f} tokens/s"),
        ("speculative", f"{report['speculative_tokens_per_second']:.1f} tokens/s"),
        ("ratio", f"{report['ratio']:.2f}"),
        ("output", same),
        ("tokens per verify pass", f"{report['tokens_per_pass']:.2f}"),
        ("accepted by position", by_position),
    ):
        table.add_row(name, value)
    return table
