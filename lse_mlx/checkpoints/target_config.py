"""What a target checkpoint's config.json says, checked before anything is built from it."""

import os
from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.json_object import read_json_object
from lse_mlx.checkpoints.names import CONFIG, is_dflash2
from lse_mlx.errors import CheckpointError

MIXTURES = ("qwen3_5_moe", "qwen3_5_moe_text")
SUPPORTED = ("qwen3_5", "qwen3_5_text", "qwen3", *MIXTURES)
NAMED = "name a qwen3_5, qwen3_5_moe or qwen3 checkpoint"
DIMENSIONS = ("hidden_size", "vocab_size", "num_hidden_layers")
EXPERT_DIMENSIONS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json as a dict. Raises CheckpointError when it cannot be read."""
    path = folder / CONFIG
    if not os.path.exists(path):
        raise CheckpointError(f"{folder} has no config.json: name the folder of a checkpoint.")
    return read_json_object(path)


def read_stop_tokens(folder: Path) -> list[int] | None:
    """The end tokens that the checkpoint names: generation_config.json first, then config.json.

    None where neither names any. Raises CheckpointError for what is no token id.
    """
    path = folder / "generation_config.json"
    config = read_config(folder)
    for part in (
        read_json_object(path) if os.path.exists(path) else None,
        config,
        config.get("text_config"),
    ):
        named = part.get("eos_token_id") if isinstance(part, dict) else None
        if named is None:
            continue
        ids = named if isinstance(named, list) else [named]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise CheckpointError(
                f"The eos_token_id of {folder} is {named!r}, which is no token id: "
                "download the checkpoint again."
            )
        return ids
    return None


def check_supported(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The text part of a supported config; raises CheckpointError for any other."""
    if is_dflash2(config.get("architectures")):
        raise CheckpointError(
            f"{folder} is a DFlash2 drafter: name it as the drafter, beside the target it is for."
        )
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise CheckpointError(f"{folder} is a {kind!r} model, which is not supported: {NAMED}.")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(
            f"The text_config in {folder / 'config.json'} is not an object: "
            "download the checkpoint again."
        )
    if kind not in MIXTURES and text.get("num_experts", 0):
        raise CheckpointError(
            f"{folder} is a {kind!r} model of {text['num_experts']} experts, "
            f"which is not supported: {NAMED}."
        )
    _check_counts(text, DIMENSIONS, folder)
    if kind in MIXTURES:
        _check_experts(text, folder)
    return text


def is_mixture(config: dict[str, Any]) -> bool:
    """Whether a supported config is that of a mixture of experts."""
    return config.get("model_type") in MIXTURES


def _check_counts(text: dict[str, Any], fields: tuple[str, ...], folder: Path) -> None:
    for field in fields:
        value = text.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"The {field} in {folder / 'config.json'} is {value!r} instead of a count: "
                "download the checkpoint again."
            )


def _check_experts(text: dict[str, Any], folder: Path) -> None:
    """What a mixture says of its experts: counts that fit, and how scores are scaled."""
    _check_counts(text, EXPERT_DIMENSIONS, folder)
    experts, chosen = text["num_experts"], text["num_experts_per_tok"]
    if chosen > experts:
        raise CheckpointError(
            f"The num_experts_per_tok in {folder / 'config.json'} is {chosen}, more than the "
            f"{experts} experts there are: download the checkpoint again."
        )
    normed = text.get("norm_topk_prob", True)
    if not isinstance(normed, bool):
        raise CheckpointError(
            f"The norm_topk_prob in {folder / 'config.json'} is {normed!r} instead of true or "
            "false: download the checkpoint again."
        )


def read_vocab_size(folder: Path) -> int:
    """How many tokens the target in `folder` knows. Raises CheckpointError as `check_supported`."""
    return check_supported(read_config(folder), folder)["vocab_size"]


def context_limit(text: dict[str, Any], asked: int | None, folder: Path) -> int:
    """How many tokens a sequence may hold: what was asked for, or the checkpoint's own limit."""
    own = text.get("max_position_embeddings", 32768)
    if isinstance(own, bool) or not isinstance(own, int) or own < 2:
        raise CheckpointError(
            f"The max_position_embeddings in {folder / 'config.json'} is {own!r}, "
            "no count of tokens: download the checkpoint again."
        )
    if asked is None:
        return own
    whole = isinstance(asked, int) and not isinstance(asked, bool)
    if not whole or not 2 <= asked <= own:
        raise CheckpointError(
            f"A context of {asked!r} tokens is not possible: choose 2 to {own} for this checkpoint."
        )
    return asked
