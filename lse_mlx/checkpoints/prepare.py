"""From names to folders that can be loaded: found, checked against each other, converted."""

from collections.abc import Callable
from pathlib import Path

from lse_mlx.checkpoints.conversion.first_use import prepare_drafter
from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.conversion.target import (
    find_target,
    is_unquantized_target,
    prepare_target,
)
from lse_mlx.checkpoints.gate.gate import check_pair
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.progress import Progress
from lse_mlx.checkpoints.resolve import Pair, resolve_pair

Consent = bool | Callable[[str], bool]
"""Whether to go ahead, or who is asked with a question of one line."""


def prepare_pair(
    model: str | Path,
    drafter: str | Path | None,
    *,
    hub: Hub,
    settings: CacheSettings,
    progress: Progress,
    allow_revision_mismatch: bool = False,
    quantize_target: Consent = False,
) -> Pair:
    """The folders of a pair, ready to be loaded.

    model, drafter: as in `resolve_pair`
    allow_revision_mismatch: let the gate pass a pair whose revisions differ from the recorded ones
    quantize_target: convert a target in bf16 to 4 bits; without consent one that was converted before
    is found, and any other is used as it is stored

    The gate comes before any conversion. Raises CheckpointError for what cannot be found, does not
    belong together, or cannot be converted.
    """
    pair = resolve_pair(model, drafter, hub, progress)
    if pair.drafter is not None:
        check_pair(pair.target, pair.drafter, allow_revision_mismatch)
    target = pair.target
    if is_unquantized_target(target):
        target = _quantized(target, quantize_target, settings, progress)
    converted = pair.drafter and prepare_drafter(pair.drafter, settings, progress)
    return Pair(target, converted)


def _quantized(target: Path, consent: Consent, settings: CacheSettings, progress: Progress) -> Path:
    found = find_target(target, settings, progress)  # once made with consent, it needs none
    if found is not None:
        return found
    question = f"{target} is not quantized. Convert it to 4 bits once?"
    if consent(question) if callable(consent) else consent:
        return prepare_target(target, settings, progress)
    progress.note(
        f"{target} is not quantized and is used as it is stored; --yes, or quantize_target=True in "
        "Python, converts it to 4 bits once"
    )
    return target
