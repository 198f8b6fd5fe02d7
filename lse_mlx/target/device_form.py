"""The device form of an mlx-lm model: its products in the forms that the registry chooses."""

from collections.abc import Iterator
from typing import TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.row_tiles import in_tiles
from lse_mlx.kernels.skinny_qmm import QuantizedProduct

AnyLinear: TypeAlias = nn.Linear | nn.QuantizedLinear
AnyEmbedding: TypeAlias = nn.Embedding | nn.QuantizedEmbedding


class DeviceLinear(nn.Module):
    """A linear layer in affine codes: x [..., in] -> x @ W.T + bias [..., out], of x's dtype."""

    def __init__(self, layer: nn.QuantizedLinear, registry: Registry):
        super().__init__()
        self.product = _quantized_product(layer, registry)
        self._bias = layer.bias if "bias" in layer else None

    def __call__(self, x: mx.array) -> mx.array:
        y = self.product(x)
        return y if self._bias is None else (y + self._bias).astype(y.dtype)


class DeviceEmbedding(nn.Module):
    """An embedding in affine codes that is also the output head if tied; lookups stay MLX's."""

    def __init__(self, table: nn.QuantizedEmbedding, registry: Registry):
        super().__init__()
        self._table = table
        self.product = _quantized_product(table, registry)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._table(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., vocab] of x [..., hidden]."""
        return self.product(x)


class TiledLinear(nn.Module):
    """A linear layer by stock MLX, always on eight rows at a time."""

    def __init__(self, layer: AnyLinear):
        super().__init__()
        self._layer = layer

    def __call__(self, x: mx.array) -> mx.array:
        return in_tiles(self._layer, _like_weights(x, self._layer))


class TiledEmbedding(nn.Module):
    """An embedding by stock MLX that, as an output head, is run on eight rows at a time."""

    def __init__(self, table: AnyEmbedding):
        super().__init__()
        self._table = table

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._table(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., vocab] of x [..., hidden]."""
        return in_tiles(self._table.as_linear, _like_weights(x, self._table))


def move_to_device(model: nn.Module, registry: Registry) -> None:
    """Give `model` its device form in place.

    Linear layers and embeddings in affine codes become products of `registry`. All else stays as
    mlx-lm has it, except where choices are exact: then the other products, dense or of another
    quantization, run on eight rows at a time, so that a row does not depend on how many there are.
    """

    def device_form(module: nn.Module) -> nn.Module:
        affine = getattr(module, "mode", None) == "affine"
        if isinstance(module, nn.QuantizedLinear) and affine:
            return DeviceLinear(module, registry)
        if isinstance(module, nn.QuantizedEmbedding) and affine:
            return DeviceEmbedding(module, registry)
        if isinstance(module, AnyLinear) and registry.choices.exact:
            return TiledLinear(module)
        if isinstance(module, AnyEmbedding) and registry.choices.exact:
            return TiledEmbedding(module)
        return module

    model.update_modules(
        tree_map(device_form, model.leaf_modules(), is_leaf=lambda m: isinstance(m, nn.Module))
    )


def products(trunk: nn.Module, lm_head: nn.Module | None) -> Iterator[QuantizedProduct]:
    """The products in affine codes of a pass over a moved model, in no order that matters.

    lm_head: the output head; None where the embedding is the head, which counts as a product then
    """
    for _, module in trunk.named_modules():
        if isinstance(module, DeviceLinear) or (
            lm_head is None and isinstance(module, DeviceEmbedding)
        ):
            yield module.product
    if isinstance(lm_head, DeviceLinear):
        yield lm_head.product


def _quantized_product(
    module: nn.QuantizedLinear | nn.QuantizedEmbedding, registry: Registry
) -> QuantizedProduct:
    assert module.biases is not None  # as always with affine codes
    return QuantizedProduct(
        registry, module.weight, module.scales, module.biases, module.bits, module.group_size
    )


def _like_weights(x: mx.array, layer: AnyLinear | AnyEmbedding) -> mx.array:
    """`x` in the dtype of a dense layer's weights.

    A drafter's rows are fp32: a bf16 matrix would be converted whole for each product.
    """
    return x if "scales" in layer else x.astype(layer.weight.dtype)
