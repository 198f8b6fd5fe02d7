"""The demo: the same prompts plain and speculatively, in one run."""

from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.cli.common import notes
from lse_mlx.cli.progress import progress
from lse_mlx.comparison import Comparison, compare, mlx_lm_rate
from lse_mlx.errors import RequestError, counted
from lse_mlx.loading import Registry, load_pair
from lse_mlx.qualify.prompts import demo_prompts
from lse_mlx.replies import Result

shown = Console(highlight=False, soft_wrap=True)
"""What was asked for: prompts, replies and the table, on standard output."""

PROMPTS = 12
MLX_LM_TOKENS = 32


def run_demo(
    model: str, pair: Pair, prompt: str | None, max_tokens: int, registry: Registry, quiet: bool
) -> dict[str, Any]:
    """Run the comparison and show it on the terminal unless `quiet`; returns the whole report.

    model: what the user called the pair; registry: of the device kernels. The built-in prompts are
    ones that neither model of the demo pair was trained on. Raises RequestError for a pair without a
    drafter, and DraftError for one that fails: without it there would be nothing to compare.
    """
    prompts = [prompt] if prompt is not None else built_in_prompts()
    if pair.drafter is None:
        raise RequestError(f"The demo compares with and without a drafter: give {model!r} one.")
    with progress() as told:
        engine = load_pair(pair, registry=registry, strict_draft=True, progress=told)
    with engine:
        comparison = compare(engine, prompts, max_tokens, None if quiet else _show_reply)
        first = engine.tokenizer.encode(prompts[0])
    with notes.status("timing mlx-lm on the first prompt"):
        stock = mlx_lm_rate(pair.target, first, MLX_LM_TOKENS)
        # A form that lse-mlx computes with on a CPU only; elsewhere it may not fit into memory.
        on_cpu = mx.default_device() == mx.cpu
        dense = mlx_lm_rate(pair.target, first, MLX_LM_TOKENS, dense=True) if on_cpu else None
    report = {
        "model": model,
        "max_tokens": max_tokens,
        **comparison.summary(),
        "mlx_lm_tokens_per_second": stock,
        "mlx_lm_fp32_tokens_per_second": dense,
        "replies": _replies(comparison),
    }
    if not quiet:
        shown.print(_table(report))
    return report


def built_in_prompts() -> list[str]:
    """The first prompts of the demo pair's held-out list, on which it was never trained."""
    return demo_prompts()[:PROMPTS]


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
    shown.print(f"> {prompt}", style="bold", markup=False)
    shown.print(result.text, markup=False)
    shown.print()


def _table(report: dict[str, Any]) -> Table:
    table = Table(
        show_header=False, caption=f"{counted(report['prompts'], 'prompt')}, greedy replies"
    )
    changed = "no, the same tokens" if report["identical"] else "YES, which must not happen"
    by_position = [_figure(share, ".2f") for share in report["acceptance_by_position"]]
    for name, value in (
        ("with the drafter", _speed(report["speculative_tokens_per_second"])),
        ("without it", _speed(report["plain_tokens_per_second"])),
        ("times as fast", _figure(report["ratio"], ".2f")),
        ("does the drafter change the text", changed),
        ("tokens per verify pass", _figure(report["tokens_per_pass"], ".2f")),
        ("drafted token 1, 2, ... kept where tried", " ".join(by_position)),
        ("mlx-lm as it is", _speed(report["mlx_lm_tokens_per_second"])),
        ("mlx-lm, weights dequantized to fp32", _speed(report["mlx_lm_fp32_tokens_per_second"])),
    ):
        table.add_row(name, value)
    return table


def _figure(value: float | None, form: str) -> str:
    return format(value, form) if value else "-"


def _speed(value: float | None) -> str:
    return f"{value:.1f} tokens/s" if value else "-"
