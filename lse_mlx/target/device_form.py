"""The device form of an mlx-lm model: its products in the forms that the registry chooses."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.row_tiles import in_tiles
from lse_mlx.kernels.skinny_qmm import NAME, QuantizedProduct

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


class StockLinear(nn.Module):
    """A linear layer by stock MLX, on eight rows at a time where choices are exact.

    In codes that no kernel of the project reads, each call counts as served by plain MLX.
    """

    def __init__(self, layer: AnyLinear, registry: Registry):
        super().__init__()
        self._layer = layer
        self._registry = registry

    def __call__(self, x: mx.array) -> mx.array:
        return _by_stock(self._layer, self._layer, x, self._registry)


class StockEmbedding(nn.Module):
    """An embedding whose product as an output head is stock MLX's, see `StockLinear`."""

    def __init__(self, table: AnyEmbedding, registry: Registry):
        super().__init__()
        self._table = table
        self._registry = registry

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._table(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., vocab] of x [..., hidden]."""
        return _by_stock(self._table.as_linear, self._table, x, self._registry)


def move_to_device(model: nn.Module, registry: Registry) -> None:
    """Give `model` its device form in place.

    Linear layers and embeddings in affine codes become products of `registry`. Of the others, those
    in codes of another kind count as served by plain MLX, and where choices are exact all of them
    run on eight rows at a time, so that a row does not depend on how many there are.
    """

    def device_form(module: nn.Module) -> nn.Module:
        affine = getattr(module, "mode", None) == "affine"
        wrapped = "scales" in module or registry.choices.exact
        if isinstance(module, nn.QuantizedLinear) and affine:
            return DeviceLinear(module, registry)
        if isinstance(module, nn.QuantizedEmbedding) and affine:
            return DeviceEmbedding(module, registry)
        if isinstance(module, AnyLinear) and wrapped:
            return StockLinear(module, registry)
        if isinstance(module, AnyEmbedding) and wrapped:
            return StockEmbedding(module, registry)
        return module

    model.update_modules(
        tree_map(device_form, model.leaf_modules(), is_leaf=lambda m: isinstance(m, nn.Module))
    )


def products(trunk: nn.Module, lm_head: nn.Module | None) -> Iterator[QuantizedProduct]:
    """The products in affine codes of a pass over a moved model, in no order that matters.

    lm_head: the output head; None where the embedding is the head, which counts as a product then
    """
    for _, module in trunk.named_modules():
        if isinstance(module, DeviceLinear):
            yield module.product
    yield from output_head(trunk, lm_head)


def output_head(trunk: nn.Module, lm_head: nn.Module | None) -> Iterator[QuantizedProduct]:
    """The one of the output head, if that is in affine codes."""
    head = trunk.embed_tokens if lm_head is None else lm_head
    if isinstance(head, DeviceLinear | DeviceEmbedding):
        yield head.product


def _quantized_product(
    module: nn.QuantizedLinear | nn.QuantizedEmbedding, registry: Registry
) -> QuantizedProduct:
    assert module.biases is not None  # as always with affine codes
    return QuantizedProduct(
        registry, module.weight, module.scales, module.biases, module.bits, module.group_size
    )


def _by_stock(
    product: Callable[[mx.array], mx.array],
    layer: AnyLinear | AnyEmbedding,
    x: mx.array,
    registry: Registry,
) -> mx.array:
    if "scales" in layer:
        registry.reference(NAME)
    else:
        # A drafter's rows are fp32: a bf16 matrix would be converted whole for each product.
        x = x.astype(layer.weight.dtype)
    return in_tiles(product, x) if registry.choices.exact else product(x)
