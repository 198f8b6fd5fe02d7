"""Loading a target checkpoint through mlx-lm, or saying in one sentence why it cannot be."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

from lse_mlx.errors import CheckpointError, reason
from lse_mlx.target.delta_layer import DeltaLayer, DeltaMixer
from lse_mlx.target.host_delta_layer import HostDeltaLayer
from lse_mlx.target.host_form import move_to_host
from lse_mlx.target.model import Target

SUPPORTED = ("qwen3_5", "qwen3_5_text", "qwen3")
_LOADING_ERRORS = (
    # What mlx-lm and MLX raise on files that hold anything but what they expect.
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    OSError,
)


def load_target(
    folder: Path, context_length: int | None = None, on_host: bool | None = None
) -> Target:
    """Load the mlx-lm checkpoint in `folder`: `qwen3_5` (its text part, dense) or `qwen3`.

    context_length: the most tokens a sequence may hold; the checkpoint's own limit if None.
    on_host: dequantize the weights to fp32 once and compute with NumPy; otherwise keep them as they
    are and compute with MLX. None chooses the first where MLX's default device is the CPU.
    Raises CheckpointError for a missing, broken or unsupported checkpoint.
    """
    config = read_config(folder)
    text = _check_supported(config, folder)
    limit = _context_limit(text, context_length, folder)
    model = load_modules(folder)
    if on_host is None:
        on_host = mx.default_device() == mx.cpu
    if on_host:
        move_to_host(model)
    inner: Any = model.language_model if "language_model" in model else model
    return Target(
        trunk=inner.model,
        lm_head=inner.lm_head if "lm_head" in inner else None,
        mixers=tuple(_mixer(layer, on_host) for layer in inner.model.layers),
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        context_length=limit,
    )


def load_modules(folder: Path) -> Any:
    """mlx-lm's own model of the supported checkpoint in `folder`, as it is stored.

    Raises CheckpointError when its weights are missing or do not load.
    """
    name = read_config(folder)["model_type"]
    try:
        # mlx-lm knows `qwen3_5` alone: the text part's own name is the same class.
        family = "qwen3_5" if name == "qwen3_5_text" else name
        model, _ = load_model(folder, model_config={"model_type": family})
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no model*.safetensors: download the weights of this checkpoint."
        ) from error
    except _LOADING_ERRORS as error:
        raise CheckpointError(
            f"The weights in {folder} do not load as {name} ({reason(error)}): "
            "download or convert the checkpoint again."
        ) from error
    return model.eval()


def _mixer(layer: Any, on_host: bool) -> DeltaMixer | None:
    if not getattr(layer, "is_linear", False):
        return None
    if on_host:
        return HostDeltaLayer.of(layer.linear_attn)
    return DeltaLayer(layer.linear_attn, layer.input_layernorm.weight.dtype)


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json as a dict. Raises CheckpointError when it cannot be read."""
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{folder} has no config.json: name the folder of a checkpoint.")
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({reason(error)}): download the checkpoint again."
        ) from error
    if not isinstance(held, dict):
        raise CheckpointError(f"{path} does not hold a JSON object: download the checkpoint again.")
    return held


def read_stop_tokens(folder: Path) -> int | list[int] | None:
    """The end tokens that the checkpoint names: generation_config.json first, then config.json."""
    path = folder / "generation_config.json"
    if path.exists():
        named = _read_json(path).get("eos_token_id")
        if named is not None:
            return named
    config = read_config(folder)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and part.get("eos_token_id") is not None:
            return part["eos_token_id"]
    return None


def _check_supported(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The text part of a supported config."""
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise CheckpointError(
            f"{folder} is a {kind!r} model, which is not supported: "
            "name a dense qwen3_5 or qwen3 checkpoint."
        )
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(
            f"The text_config in {folder / 'config.json'} is not an object: "
            "download the checkpoint again."
        )
    if text.get("num_experts", 0):
        raise CheckpointError(
            f"{folder} is a mixture of {text['num_experts']} experts, which is not supported: "
            "name a dense qwen3_5 or qwen3 checkpoint."
        )
    for field in ("hidden_size", "vocab_size", "num_hidden_layers"):
        if not isinstance(text.get(field), int):
            raise CheckpointError(
                f"{folder / 'config.json'} has no {field}: download the checkpoint again."
            )
    return text


def _context_limit(text: dict[str, Any], asked: int | None, folder: Path) -> int:
    own = text.get("max_position_embeddings", 32768)
    if isinstance(own, bool) or not isinstance(own, int) or own < 2:
        raise CheckpointError(
            f"The max_position_embeddings in {folder / 'config.json'} is {own!r}, "
            "no count of tokens: download the checkpoint again."
        )
    if asked is None:
        return own
    if not 2 <= asked <= own:
        raise CheckpointError(
            f"A context of {asked} tokens is not possible: choose 2 to {own} for this checkpoint."
        )
    return asked
