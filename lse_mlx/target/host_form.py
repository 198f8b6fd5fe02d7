"""The CPU form of an mlx-lm model: fp32 throughout, its layers in NumPy where that is faster."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.switch_layers import SwitchGLU

from lse_mlx.kernels.host_arithmetic import Rows, host_silu
from lse_mlx.kernels.host_linear import HostLinear, host_tiles, row_count
from lse_mlx.kernels.registry import Registry


class HostGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) in fp32 on the CPU, without a round trip to MLX in between.

    Shapes as in `HostLinear`.
    """

    def __init__(self, gate: HostLinear, up: HostLinear, down: HostLinear):
        super().__init__()
        self._gate, self._up, self._down = gate, up, down

    def __call__(self, x: mx.array) -> mx.array:
        return mx.array(self.product(host_tiles(x))[: row_count(x)]).reshape(x.shape)

    def product(self, rows: Rows) -> Rows:
        """The same of whole tiles in NumPy, see `HostLinear.product`."""
        hidden = host_silu(self._gate.product(rows)) * self._up.product(rows)
        return self._down.product(hidden)


class HostExperts(nn.Module):
    """The routed experts of a layer, a gated MLP each, by id."""

    def __init__(self, switch: SwitchGLU):
        super().__init__()
        stacks = [
            [HostLinear(np.asarray(_dense(layer, e))) for e in range(layer.num_experts)]
            for layer in (switch.gate_proj, switch.up_proj, switch.down_proj)
        ]
        self._experts = [HostGatedMLP(*parts) for parts in zip(*stacks, strict=True)]

    @property
    def experts(self) -> list[HostGatedMLP]:
        return self._experts


class HostEmbedding(nn.Module):
    """A dequantized embedding table, fp32 [vocab, hidden], that is also the output head if tied."""

    def __init__(self, weight: mx.array, counted_by: Registry | None = None):
        super().__init__()
        self._table = weight
        self._head = HostLinear(np.asarray(weight), counted_by=counted_by)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._table[tokens]

    def as_linear(self, x: mx.array) -> mx.array:
        return self._head(x)


def _dense(module: Any, expert: int | None = None) -> mx.array:
    """The weight of a linear layer or embedding as fp32, dequantized in fp32 if it is quantized.

    expert: which one's, of a layer that holds a stack of them
    """

    def part(name: str) -> mx.array | None:
        held = module.get(name)
        return held if held is None or expert is None else held[expert]

    weight, scales, biases = part("weight"), part("scales"), part("biases")
    assert weight is not None
    if scales is None:
        return weight.astype(mx.float32)
    affine = module.mode == "affine"  # the scales of the other modes are codes themselves
    return mx.dequantize(
        weight,
        scales.astype(mx.float32) if affine else scales,
        biases.astype(mx.float32) if affine and biases is not None else None,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        global_scale=part("global_scale"),
        dtype=mx.float32,
    )


def _host_form(module: nn.Module, registry: Registry | None) -> nn.Module:
    # A device would serve a product of affine codes by a kernel, and no other.
    counted_by = registry if getattr(module, "mode", None) == "affine" else None
    if isinstance(module, nn.Linear | nn.QuantizedLinear):
        bias = np.asarray(module.bias.astype(mx.float32)) if "bias" in module else None
        return HostLinear(np.asarray(_dense(module)), bias, counted_by)
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return HostEmbedding(_dense(module), counted_by)
    return module


def _gated(mlp: Any) -> HostGatedMLP:
    return HostGatedMLP(mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def move_to_host(model: nn.Module, registry: Registry | None = None) -> None:
    """Give `model` its CPU form in place: fp32 throughout, linear layers and embeddings in NumPy.

    Called once at load, when MLX's default device is the CPU; every other device has a form of its
    own. registry: counts the products that a kernel would serve there.
    """
    # The layers go first: what is left for the cast is norms, convolutions and per-head vectors.
    model.update_modules(
        tree_map(
            lambda module: _host_form(module, registry),
            model.leaf_modules(),
            is_leaf=lambda module: isinstance(module, nn.Module),
        )
    )
    for layer in model.layers:
        if "switch_mlp" in layer.mlp:
            layer.mlp.switch_mlp = HostExperts(layer.mlp.switch_mlp)
            layer.mlp.shared_expert = _gated(layer.mlp.shared_expert)
        else:
            layer.mlp = _gated(layer.mlp)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
