"""Checks of the demo pair: the same tokens with the drafter as without it."""

import json
from collections.abc import Iterator
from typing import Any

from lse_mlx import demo_pair
from lse_mlx.checkpoints.progress import Progress
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.engine import Engine
from lse_mlx.kernels.options import KernelOptions
from lse_mlx.loading import load_pair
from lse_mlx.replies import Result
from lse_mlx.selftest.checks import REFUSALS, Outcome, why_not

PROMPTS = 4
TOKENS = 48
SUBJECT = "demo pair"
PHASE = "demo-pair"


def pair_outcomes(
    options: KernelOptions, progress: Progress
) -> tuple[list[Outcome], dict[str, Any]]:
    """Decode some prompts both ways; what came of it, and what the warm-up found.

    options: exact ones, or a device may take kernels whose rows depend on how many are in a pass
    """
    try:
        engine = load_pair(
            Pair(demo_pair.TARGET, demo_pair.DRAFTER),
            registry=options.registry(),
            progress=progress,
        )
    except REFUSALS as refused:
        return [_failed("loads", refused)], {}
    with engine:
        assert engine.warmed is not None
        return list(replies(engine, progress)), engine.warmed.as_dict()


def replies(engine: Engine, progress: Progress) -> Iterator[Outcome]:
    """Of each prompt, and then of what all of them compiled."""
    entries = json.loads(demo_pair.HELD_OUT_PROMPTS.read_text(encoding="utf-8"))
    registry = engine.target.registry
    before, total = registry.counts(), PROMPTS + 1
    for number, entry in enumerate(entries[:PROMPTS], 1):
        progress.advance(PHASE, number - 1, total)
        name = f"prompt {number}: the same tokens with and without the drafter"
        calls = registry.counts()
        try:
            fast = engine.generate(entry["prompt"], max_tokens=TOKENS)
            alone = engine.generate(entry["prompt"], max_tokens=TOKENS, speculate=False)
        except REFUSALS as refused:
            yield _failed(name, refused)
            continue
        by_reference = registry.counts().since(calls).reference_calls
        yield _compared(name, fast, alone, "reference" if by_reference else registry.form)
    progress.advance(PHASE, total - 1, total)
    compiled = registry.counts().since(before).jit_compiles
    name = "requests after the warm-up compile nothing"
    yield Outcome(SUBJECT, name, "failed" if compiled else "passed", float(compiled), 0.0)
    progress.advance(PHASE, total, total)


def _compared(name: str, fast: Result, alone: Result, served: str) -> Outcome:
    pairs = zip(fast.token_ids, alone.token_ids, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(fast.token_ids))
    rate = fast.timings.get("acceptance_rate", 0.0)
    return Outcome(
        SUBJECT,
        name,
        "passed" if fast.token_ids == alone.token_ids else "failed",
        float(len(alone.token_ids) - same),
        0.0,
        served,
        f"{rate:.0%} of the tested tokens accepted" if rate else "no token was accepted",
    )


def _failed(name: str, refused: Exception) -> Outcome:
    return Outcome(SUBJECT, name, "failed", why=why_not(refused))
