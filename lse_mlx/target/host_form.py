"""The CPU form of an mlx-lm model: fp32 throughout, its layers in NumPy where that is faster."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from lse_mlx.kernels.host_arithmetic import host_silu
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
        rows = host_tiles(x)
        hidden = host_silu(self._gate.product(rows)) * self._up.product(rows)
        y = self._down.product(hidden)[: row_count(x)]
        return mx.array(y).reshape(x.shape)


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


def _dense(module: nn.Module) -> mx.array:
    """The weight of a linear layer or embedding as fp32, dequantized in fp32 if it is quantized."""
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        affine = module.mode == "affine"  # the scales of the other modes are codes themselves
        return mx.dequantize(
            module.weight,
            module.scales.astype(mx.float32) if affine else module.scales,
            module.biases.astype(mx.float32) if affine else None,
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
            dtype=mx.float32,
        )
    return module.weight.astype(mx.float32)


def _host_form(module: nn.Module, registry: Registry | None) -> nn.Module:
    # A device would serve a product of affine codes by a kernel, and no other.
    counted_by = registry if getattr(module, "mode", None) == "affine" else None
    if isinstance(module, nn.Linear | nn.QuantizedLinear):
        bias = np.asarray(module.bias.astype(mx.float32)) if "bias" in module else None
        return HostLinear(np.asarray(_dense(module)), bias, counted_by)
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return HostEmbedding(_dense(module), counted_by)
    return module


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
        layer.mlp = HostGatedMLP(layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
