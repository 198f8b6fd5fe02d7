"""Which form of an operation is fastest on this device, found once by races and kept on disk."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import mlx.core as mx

from lse_mlx.checkpoints.progress import Progress
from lse_mlx.drafters.base import Drafter
from lse_mlx.drafters.dflash2.drafter import DFlash2
from lse_mlx.errors import KernelError, printable
from lse_mlx.kernels.choices import STOCK, Choices, any_rows
from lse_mlx.kernels.contests import attention_contests, product_contests, topk_contest
from lse_mlx.kernels.race import Contest, RaceResult, compare, race_all, winners
from lse_mlx.kernels.winners import WinnersFile, this_device
from lse_mlx.target.attention_layer import AttentionLayer
from lse_mlx.target.device_form import output_head, products
from lse_mlx.target.model import Target

RACE_SECONDS = 30.0
"""The longest that races take at one load; those left are made up for at the next."""


def hold_races(
    contests: Iterable[Contest],
    choices: Choices,
    folder: Path,
    progress: Progress,
    seconds: float = RACE_SECONDS,
) -> tuple[list[RaceResult], int]:
    """Fill in the winners of this device: results of `contests`, and how many of them are new.

    folder: where results are kept; seconds: how long races may begin
    Where the form is given there is nothing to race for. But where choices are exact, the numbers of
    all forms are compared with stock's in any case: those contests that have no result are compared
    without a race. Raises KernelError where no form is right.
    """
    if not (choices.exact or choices.mode == "auto"):
        return [], 0
    by_key: dict[str, Contest] = {}
    for contest in contests:
        by_key.setdefault(contest.key, contest)
    file = WinnersFile(folder, this_device())
    kept, fault = file.read()
    if fault:
        progress.note(f"{fault}, so races are run again")
    # Another choice of forms, or a damaged entry, is no result of these contests.
    known = {
        key: kept[key]
        for key, contest in by_key.items()
        if key in kept and contest.allows(kept[key])
    }
    new: list[RaceResult] = []
    if choices.mode == "auto":
        missing = [contest for key, contest in by_key.items() if key not in known]
        raced = _race(missing, choices, seconds, progress)
        _tell_not_held(raced, progress)
        new = [result for result in raced if result.held]
    known |= {result.key: result for result in new}
    if new and (fault := file.write(new)):
        progress.note(f"{fault}, so the next start races again")
    mine = [known[key] for key in by_key if key in known]
    judged = list(mine)
    if choices.exact:
        judged += [compare(contest, choices) for key, contest in by_key.items() if key not in known]
    _tell_refused([result for result in judged if result.held], progress)
    choices.winners |= winners(judged)
    if choices.exact:
        _settle_exact(by_key.values(), choices)
    return mine, len(new)


def pair_contests(target: Target, drafter: Drafter | None) -> Iterator[Contest]:
    """The operations that this pair asks of its device and that stock MLX has too."""
    dtype = target.trunk.norm.weight.dtype
    yield from product_contests(products(target.trunk, target.lm_head), dtype)
    attention = next((m for m in target.mixers if isinstance(m, AttentionLayer)), None)
    if attention is not None:
        yield from attention_contests(
            target.registry, attention.heads, attention.kv_heads, attention.head_dim, dtype
        )
    if isinstance(drafter, DFlash2):
        yield from product_contests(drafter.products(), mx.float32)
        # The target's head, which is given the drafter's own rows.
        head = output_head(target.trunk, target.lm_head)
        yield from product_contests(head, mx.float32, [drafter.depth])
        yield topk_contest(
            target.registry, drafter.depth, target.vocab_size, drafter.config.selector_top_k
        )


def _race(
    missing: Sequence[Contest], choices: Choices, seconds: float, progress: Progress
) -> list[RaceResult]:
    """Race what is missing, as far as time allows."""
    if missing:
        progress.advance("race", 0, len(missing))
    new = race_all(
        missing,
        choices,
        seconds,
        lambda done, result: progress.advance("race", done, len(missing)),
    )
    if len(new) < len(missing):
        progress.advance("race", len(missing), len(missing))
        serves = "the first form with the right numbers" if choices.exact else "stock MLX"
        progress.note(
            f"{len(missing) - len(new)} races did not begin within {seconds:.0f} s: {serves} serves "
            "there until the next start makes up for them"
        )
    return new


def _tell_refused(results: Sequence[RaceResult], progress: Progress) -> None:
    """One line for each form that gave wrong numbers or none, however many shapes it has."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for form, why in result.refused.items():
            reasons.setdefault((result.operation, form), []).append(f"{result.shape}: {why}")
    for (operation, form), found in reasons.items():
        progress.note(
            f"{operation}: the form {form} is not used at {len(found)} shapes, the first of them "
            f"{printable(found[0])}; please report what `lse-mlx selftest --json` prints"
        )


def _tell_not_held(results: Sequence[RaceResult], progress: Progress) -> None:
    """One line for all races in which stock itself did not run."""
    lost = [result for result in results if not result.held]
    if lost:
        progress.note(
            f"races could not be held at {len(lost)} shapes, the first of them {lost[0].key}, where "
            f"stock MLX {printable(lost[0].refused[STOCK])}: it serves there until the next start "
            "tries again"
        )


def _settle_exact(contests: Iterable[Contest], choices: Choices) -> None:
    """See that each contest has a form for exact decoding: if none of its own, then stock's."""
    for contest in contests:
        key = any_rows(contest.operation, contest.shape)
        if key in choices.winners:
            continue
        if not contest.stock_is_exact:
            raise KernelError(
                f"No form of {contest.operation} at {contest.shape} gives the numbers of MLX on this "
                "device, so exact decoding cannot be had: leave it out, and report what `lse-mlx "
                "selftest --json` prints."
            )
        choices.winners[key] = STOCK
