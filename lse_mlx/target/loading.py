"""Loading a target checkpoint through mlx-lm, or saying in one sentence why it cannot be."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock as SparseMoeBlock
from mlx_lm.utils import load_model

from lse_mlx.checkpoints.plain_name import plain_name
from lse_mlx.checkpoints.target_config import (
    check_supported,
    context_limit,
    is_mixture,
    read_config,
)
from lse_mlx.errors import CheckpointError, RequestError, reason
from lse_mlx.kernels.registry import Registry
from lse_mlx.target.attention_layer import AttentionLayer
from lse_mlx.target.delta_layer import DeltaLayer, DeltaMixer
from lse_mlx.target.device_form import move_to_device
from lse_mlx.target.expert_layer import ExpertLayer, ExpertMixer, ExpertSizes
from lse_mlx.target.host_delta_layer import HostDeltaLayer
from lse_mlx.target.host_expert_layer import HostExpertLayer
from lse_mlx.target.host_form import move_to_host
from lse_mlx.target.model import Target

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
    folder: Path,
    context_length: int | None = None,
    on_host: bool | None = None,
    registry: Registry | None = None,
) -> Target:
    """Load the mlx-lm checkpoint in `folder`: the text part of `qwen3_5`, dense or as the mixture of
    experts `qwen3_5_moe`, or `qwen3`.

    context_length: the most tokens a sequence may hold; the checkpoint's own limit if None.
    on_host: dequantize the weights to fp32 once and compute with NumPy; otherwise keep them as they
    are and compute with MLX. None chooses the first where no device kernels run.
    registry: the door to device kernels; that of MLX's default device if None.
    Raises CheckpointError for a missing, broken or unsupported checkpoint, and RequestError for a
    mixture of experts where choices are exact and the weights stay as they are.
    """
    config = read_config(folder)
    text = check_supported(config, folder)
    limit = context_limit(text, context_length, folder)
    registry = registry or Registry.for_device()
    if on_host is None:
        on_host = not registry.on_device
    if is_mixture(config) and registry.choices.exact and not on_host:
        raise RequestError(
            f"Exact decoding was asked for, but {folder} is a mixture of experts, whose products on "
            "a device depend on how many rows are in a pass: leave exact out, or compute on the CPU."
        )
    model = load_modules(folder)
    with _named_errors(folder, "cannot be run"):
        inner: Any = model.language_model if "language_model" in model else model
        sizes = _expert_sizes(inner.model.layers)
        if on_host:
            move_to_host(model, registry)
        else:
            move_to_device(model, registry)
        target = Target(
            trunk=inner.model,
            lm_head=inner.lm_head if "lm_head" in inner else None,
            mixers=tuple(_mixer(layer, on_host, registry) for layer in inner.model.layers),
            registry=registry,
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            context_length=limit,
            experts={
                index: _experts(inner.model.layers[index].mlp, stored, on_host)
                for index, stored in sizes.items()
            },
        )
        # One token through all of it: what cannot be computed should fail here.
        mx.eval(target.advance([0], target.new_state(), ()).logits)
    return target


def load_modules(folder: Path) -> Any:
    """mlx-lm's own model of the supported checkpoint in `folder`, as it is stored.

    Raises CheckpointError when its weights are missing or do not load.
    """
    name = read_config(folder)["model_type"]
    if not any(folder.glob("model*.safetensors")):
        raise CheckpointError(
            f"{folder} has no model*.safetensors: download the weights of this checkpoint."
        )
    # mlx-lm knows `qwen3_5` and `qwen3_5_moe`: the text part's own name is the same class.
    family = name.removesuffix("_text")
    with _named_errors(folder, f"do not load as {name}"), plain_name(folder) as path:
        model, _ = load_model(path, model_config={"model_type": family})
    return model.eval()


@contextmanager
def _named_errors(folder: Path, what: str) -> Iterator[None]:
    """Turn what other libraries raise on the weights in `folder` into one CheckpointError."""
    try:
        yield
    except _LOADING_ERRORS as error:
        raise CheckpointError(
            f"The weights in {folder} {what} ({reason(error)}): "
            "download or convert the checkpoint again."
        ) from error


def _mixer(layer: Any, on_host: bool, registry: Registry) -> DeltaMixer | AttentionLayer:
    if not getattr(layer, "is_linear", False):
        return AttentionLayer(layer.self_attn, registry)
    if on_host:
        return HostDeltaLayer.of(layer.linear_attn, registry)
    return DeltaLayer.of(layer.linear_attn, layer.input_layernorm.weight.dtype, registry)


def _expert_sizes(layers: Sequence[Any]) -> dict[int, ExpertSizes]:
    """The sizes of each layer of experts, by its index, as they are stored."""
    return {
        index: ExpertSizes.of(layer.mlp)
        for index, layer in enumerate(layers)
        if isinstance(layer.mlp, SparseMoeBlock)
    }


def _experts(block: Any, sizes: ExpertSizes, on_host: bool) -> ExpertMixer:
    return HostExpertLayer.of(block, sizes) if on_host else ExpertLayer(block, sizes)
