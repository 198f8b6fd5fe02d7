"""The device form of a model: products of the registry, right, and row by row the same if exact."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lse_mlx.errors import KernelError
from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.registry import Registry
from lse_mlx.target.device_form import (
    DeviceEmbedding,
    DeviceLinear,
    StockEmbedding,
    StockLinear,
    move_to_device,
    output_head,
    products,
)
from tests.kernels.affine import as_doubles, normal
from tests.kernels.modes import needs_compiler
from tests.metal_host.host import MetalHost

pytestmark = needs_compiler

IN, OUT = 128, 41


class Model(nn.Module):
    """Some modules side by side."""

    def __init__(self, *parts: nn.Module):
        super().__init__()
        self.parts = list(parts)


def on_harness(exact: bool = False) -> Registry:
    return Registry("metal", MetalHost().metal_kernel, Choices("own", exact))


def linear(bias: bool = False, dtype: mx.Dtype = mx.float32) -> nn.Linear:
    layer = nn.Linear(IN, OUT, bias=bias)
    layer.weight = (normal(OUT, IN) / IN**0.5).astype(dtype)
    if bias:
        layer.bias = normal(OUT).astype(dtype)
    return layer


def embedding() -> nn.Embedding:
    table = nn.Embedding(OUT, IN)
    table.weight = normal(OUT, IN, seed=1) / IN**0.5
    return table


def moved(module: nn.Module, registry: Registry) -> nn.Module:
    model = Model(module)
    move_to_device(model, registry)
    return model.parts[0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_in_codes_is_a_product_of_the_registry(bits: int, bias: bool) -> None:
    stock, registry = linear(bias).to_quantized(64, bits), on_harness()
    layer = moved(stock, registry)
    x = normal(2, 3, IN)
    y = layer(x)
    assert isinstance(layer, DeviceLinear)
    assert registry.served == {("skinny_qmm", "metal"): 1}
    np.testing.assert_allclose(np.array(y), np.array(stock(x)), atol=2e-6)


def test_a_bias_leaves_the_dtype_of_x() -> None:
    layer = moved(linear(True).to_quantized(64, 4), on_harness())
    assert layer(normal(2, IN, dtype=mx.bfloat16)).dtype == mx.bfloat16


def test_an_embedding_in_codes_looks_up_as_before_and_is_a_head() -> None:
    stock, registry = embedding().to_quantized(64, 4), on_harness()
    table = moved(stock, registry)
    assert isinstance(table, DeviceEmbedding)
    tokens = mx.array([[3, 0], [40, 3]])
    assert np.array_equal(np.array(table(tokens)), np.array(stock(tokens)))
    assert not registry.served
    x = normal(5, IN)
    logits = np.array(table.as_linear(x))
    np.testing.assert_allclose(logits, np.array(stock.as_linear(x)), atol=2e-6)
    assert registry.served == {("skinny_qmm", "metal"): 1}


def other_linears() -> list[nn.Module]:
    """Layers that no kernel of the project serves."""
    bf16 = linear(dtype=mx.bfloat16)
    return [linear(True), bf16, bf16.to_quantized(32, 4, "mxfp4"), linear().to_quantized(64, 3)]


def test_what_is_not_in_codes_stays_as_it_is() -> None:
    for stock in (linear(True), linear(dtype=mx.bfloat16), embedding()):
        registry = on_harness()
        assert moved(stock, registry) is stock
        assert not registry.served


other_codes = pytest.mark.parametrize(
    ("group_size", "bits", "mode"),
    [(64, 3, "affine"), (32, 4, "mxfp4"), (32, 8, "mxfp8"), (16, 4, "nvfp4")],
)


@other_codes
@pytest.mark.parametrize("exact", [False, True])
def test_codes_without_a_kernel_are_stocks_and_counted(
    group_size: int, bits: int, mode: str, exact: bool
) -> None:
    """A layer's product and a head's; not the look-up, which is no product."""
    registry = on_harness(exact)
    stock = linear().to_quantized(group_size, bits, mode)
    x = normal(3, IN)
    np.testing.assert_allclose(
        np.array(moved(stock, registry)(x)), np.array(stock(x)), rtol=1e-5, atol=1e-5
    )
    assert registry.served == {("skinny_qmm", "reference"): 1}
    table = embedding().to_quantized(group_size, bits, mode)
    moved_table = moved(table, registry)
    tokens = mx.array([3, 40])
    assert np.array_equal(as_doubles(moved_table(tokens)), as_doubles(table(tokens)))
    assert registry.served == {("skinny_qmm", "reference"): 1}
    np.testing.assert_allclose(
        np.array(moved_table.as_linear(x)), np.array(table.as_linear(x)), rtol=1e-5, atol=1e-5
    )
    assert registry.served == {("skinny_qmm", "reference"): 2}


@other_codes
def test_codes_without_a_kernel_are_an_error_where_kernels_are_required(
    group_size: int, bits: int, mode: str
) -> None:
    registry = on_harness()
    registry.required = True
    layer = moved(linear().to_quantized(group_size, bits, mode), registry)
    with pytest.raises(KernelError, match="skinny_qmm has no form"):
        layer(normal(3, IN))


@pytest.mark.parametrize("index", range(4))
def test_where_choices_are_exact_tiles_give_what_the_layer_gives(index: int) -> None:
    """That all products have eight rows is looked at below: on this CPU MLX's rows never depend on
    their number."""
    stock = other_linears()[index]
    layer = moved(stock, on_harness(exact=True))
    x = normal(11, IN, dtype=mx.bfloat16)
    wide = x.astype(mx.float32)
    np.testing.assert_allclose(as_doubles(layer(x)), as_doubles(stock(wide)), atol=0.05)


def test_exact_products_of_dense_layers_all_have_eight_rows() -> None:
    """The calls themselves are looked at, their shapes being what decides."""
    seen: list[tuple[int, ...]] = []

    class Watched(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            seen.append(x.shape)
            return super().__call__(x)

    class WatchedTable(nn.Embedding):
        def as_linear(self, x: mx.array) -> mx.array:
            seen.append(x.shape)
            return super().as_linear(x)

    layer = moved(Watched(IN, OUT), on_harness(exact=True))
    table = moved(WatchedTable(OUT, IN), on_harness(exact=True))
    assert isinstance(layer, StockLinear) and isinstance(table, StockEmbedding)
    for rows in (1, 8, 11):
        assert layer(normal(1, rows, IN)).shape == (1, rows, OUT)
        assert table.as_linear(normal(rows, IN)).shape == (rows, OUT)
    assert set(seen) == {(8, IN)}
    assert table(mx.array([3])).shape == (1, IN)


def test_a_dense_layer_that_is_exact_takes_rows_in_its_own_dtype() -> None:
    """As the head of a bf16 target does with a drafter's rows."""
    layer = moved(linear(dtype=mx.bfloat16), on_harness(exact=True))
    assert layer(normal(3, IN)).dtype == mx.bfloat16


def test_norms_and_convolutions_stay() -> None:
    norm, convolution = nn.RMSNorm(IN), nn.Conv1d(4, 4, 3)
    for exact in (False, True):
        assert moved(norm, on_harness(exact)) is norm
        assert moved(convolution, on_harness(exact)) is convolution


@pytest.mark.parametrize("tied", [False, True])
def test_the_products_of_a_pass(tied: bool) -> None:
    trunk = Model(linear().to_quantized(64, 4), linear(), nn.RMSNorm(IN))
    trunk.embed_tokens = embedding().to_quantized(64, 8)
    model = Model(trunk, linear().to_quantized(64, 8))
    move_to_device(model, on_harness())
    head = None if tied else model.parts[1]
    found = [(p.bits, p.in_width, p.out_width) for p in products(trunk, head)]
    assert sorted(found) == [(4, IN, OUT), (8, IN, OUT)]
    [output] = output_head(trunk, head)
    assert output is (trunk.embed_tokens if tied else head).product
