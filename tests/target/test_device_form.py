"""The device form of a model: products of the registry, right, and row by row the same if exact."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.registry import Registry
from lse_mlx.target.device_form import (
    DeviceEmbedding,
    DeviceLinear,
    TiledEmbedding,
    TiledLinear,
    move_to_device,
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


@pytest.mark.parametrize("index", range(3))
def test_what_is_not_in_affine_codes_stays_as_it_is(index: int) -> None:
    stock = other_linears()[index]
    assert moved(stock, on_harness()) is stock
    table = embedding()
    assert moved(table, on_harness()) is table


@pytest.mark.parametrize("index", range(4))
def test_where_choices_are_exact_rows_are_the_same_whatever_their_number(index: int) -> None:
    stock = other_linears()[index]
    layer = moved(stock, on_harness(exact=True))
    x = normal(11, IN, dtype=mx.bfloat16)
    together = as_doubles(layer(x))
    wide = x.astype(mx.float32)
    np.testing.assert_allclose(together, as_doubles(stock(wide)), atol=0.05)
    alone = np.concatenate([as_doubles(layer(x[i : i + 1])) for i in range(11)])
    assert np.array_equal(together, alone)


def test_exact_products_of_dense_layers_all_have_eight_rows() -> None:
    """On this CPU MLX's rows never depend on their number, so the calls themselves are looked at."""
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
    assert isinstance(layer, TiledLinear) and isinstance(table, TiledEmbedding)
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
    trunk = Model(embedding(), linear(), linear(), nn.RMSNorm(IN))
    trunk.parts[0] = trunk.parts[0].to_quantized(64, 8)
    trunk.parts[1] = trunk.parts[1].to_quantized(64, 4)
    model = Model(trunk, linear().to_quantized(64, 8))
    move_to_device(model, on_harness())
    head = None if tied else model.parts[1]
    found = [(p.bits, p.in_width, p.out_width) for p in products(trunk, head)]
    assert sorted(found) == [(4, IN, OUT), (8, IN, OUT)]
