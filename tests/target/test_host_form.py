"""The CPU form of a model: what its layers compute is what they computed before, in fp32."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3
from numpy.typing import NDArray
from scipy.special import expit

from lse_mlx.kernels.host_linear import HostLinear
from lse_mlx.kernels.registry import Registry
from lse_mlx.target.host_form import HostEmbedding, HostGatedMLP, move_to_host

IN, OUT, HIDDEN = 256, 83, 320


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def run(layer: nn.Module, x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.array(layer(mx.array(x)))


def dequantized(layer: nn.QuantizedLinear | nn.QuantizedEmbedding) -> NDArray[np.float64]:
    """Affine codes unpacked by hand, lowest bits first: scale * code + bias, in float64."""
    words, per_word = np.array(layer.weight), 32 // layer.bits
    shifts = np.arange(per_word, dtype=np.uint32) * layer.bits
    codes = (words[..., None] >> shifts) & ((1 << layer.bits) - 1)
    codes = codes.reshape(len(words), -1, layer.group_size).astype(np.float64)
    scales, biases = (
        np.array(a.astype(mx.float32), np.float64)[..., None] for a in (layer.scales, layer.biases)
    )
    return (codes * scales + biases).reshape(len(words), -1)


class Model(nn.Module):
    """Some modules, and as many gated MLPs as asked for, where a decoder has them."""

    def __init__(self, *parts: nn.Module, mlps: int = 0):
        super().__init__()
        self.parts = list(parts)
        self.layers = [Block() for _ in range(mlps)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = qwen3.MLP(IN, HIDDEN)


def mlp(seed: int = 0) -> tuple[HostGatedMLP, list[NDArray[np.float64]]]:
    """A gated MLP on the host, and its weights gate, up and down."""
    model = Model(mlps=1)
    linears = [getattr(model.layers[0].mlp, f"{n}_proj") for n in ("gate", "up", "down")]
    for i, linear in enumerate(linears):
        linear.weight = mx.array(normal(*linear.weight.shape, seed=seed + i) / 16)
    weights = [np.array(linear.weight, np.float64) for linear in linears]
    move_to_host(model)
    return model.layers[0].mlp, weights


def test_a_layers_bias_is_kept() -> None:
    model = Model(nn.Linear(IN, OUT, bias=True))
    weight, bias = normal(OUT, IN), normal(OUT)
    model.parts[0].weight, model.parts[0].bias = mx.array(weight), mx.array(bias)
    move_to_host(model)
    x = normal(3, IN, seed=7)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T + bias
    np.testing.assert_allclose(run(model.parts[0], x), expected, atol=5e-5)


def test_a_bf16_layer_keeps_its_values() -> None:
    model = Model(nn.Linear(IN, OUT, bias=False))
    weight = mx.array(normal(OUT, IN)).astype(mx.bfloat16)
    model.parts[0].weight = weight
    move_to_host(model)
    exact = HostLinear(np.array(weight.astype(mx.float32)))
    x = normal(3, IN, seed=8)
    assert np.array_equal(run(model.parts[0], x), run(exact, x))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_quantized_layers_multiply_by_what_their_codes_mean(
    bits: int, group_size: int, dtype: mx.Dtype
) -> None:
    linear, embedding = nn.Linear(IN, OUT, bias=True), nn.Embedding(OUT, IN)
    linear.weight = mx.array(normal(OUT, IN)).astype(dtype)
    linear.bias = mx.array(normal(OUT)).astype(dtype)
    embedding.weight = linear.weight
    model = Model(linear.to_quantized(group_size, bits), embedding.to_quantized(group_size, bits))
    meant = [dequantized(layer) for layer in model.parts]
    move_to_host(model)
    x = normal(3, IN, seed=9)
    product = x.astype(np.float64) @ meant[0].T + np.array(linear.bias.astype(mx.float32))
    np.testing.assert_allclose(run(model.parts[0], x), product, atol=1e-4)
    tokens = mx.array([0, 82, 5])
    rows = np.array(model.parts[1](tokens))
    np.testing.assert_allclose(rows, meant[1][[0, 82, 5]], rtol=1e-6, atol=1e-6)
    as_head = np.array(model.parts[1].as_linear(mx.array(x)))
    np.testing.assert_allclose(as_head, x.astype(np.float64) @ meant[1].T, atol=1e-4)


@pytest.mark.parametrize(
    ("mode", "group_size", "bits"), [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
)
def test_layers_of_the_other_modes_become_fp32_too(mode: str, group_size: int, bits: int) -> None:
    linear = nn.Linear(IN, OUT, bias=False)
    linear.weight = mx.array(normal(OUT, IN)).astype(mx.bfloat16)
    model = Model(linear.to_quantized(group_size, bits, mode))
    x = normal(3, IN, seed=13)
    stock = run(model.parts[0], x)
    move_to_host(model)
    assert isinstance(model.parts[0], HostLinear)
    np.testing.assert_allclose(run(model.parts[0], x), stock, atol=1e-4)


def test_an_embedding_looks_up_rows_and_is_a_head() -> None:
    table = normal(OUT, IN)
    embedding = HostEmbedding(mx.array(table))
    assert np.array_equal(
        np.array(embedding(mx.array([[3, 0], [82, 3]]))), table[[[3, 0], [82, 3]]]
    )
    as_head = partial(run, HostLinear(table))
    x = normal(5, IN, seed=10)
    assert np.array_equal(np.array(embedding.as_linear(mx.array(x))), as_head(x))


@pytest.mark.parametrize("rows", range(1, 18))
def test_a_gated_mlp_gives_a_row_the_same_bits_alone_and_among_others(rows: int) -> None:
    layer, _ = mlp()
    x = normal(17, IN, seed=11)
    alone = np.concatenate([run(layer, x[i : i + 1]) for i in range(rows)])
    assert np.array_equal(run(layer, x[:rows]), alone)
    assert np.array_equal(run(layer, x[None, :rows])[0], alone)
    assert np.array_equal(run(layer, x[:rows][::-1].copy()), alone[::-1])


@pytest.mark.parametrize("size", [1.0, 400.0])
def test_a_gated_mlp_is_down_of_silu_of_gate_times_up(size: float) -> None:
    layer, (gate, up, down) = mlp()
    x = normal(5, IN, seed=12) * np.float32(size)
    gated = x.astype(np.float64) @ gate.T
    expected = (gated * expit(gated) * (x.astype(np.float64) @ up.T)) @ down.T
    np.testing.assert_allclose(run(layer, x), expected, atol=2e-6 * np.abs(expected).max())


def test_everything_else_becomes_fp32() -> None:
    model = Model(nn.RMSNorm(IN), nn.Linear(IN, OUT))
    model.set_dtype(mx.bfloat16)
    move_to_host(model)
    assert model.parts[0].weight.dtype == mx.float32
    assert isinstance(model.parts[1], HostLinear)


def test_products_that_a_kernel_would_serve_on_a_device_are_counted() -> None:
    """Those of affine codes, once each; a dense layer, a lookup and other modes are none."""
    linear, embedding = nn.Linear(IN, OUT, bias=False), nn.Embedding(OUT, IN)
    quantized, table = linear.to_quantized(64, 4), embedding.to_quantized(64, 8)
    model = Model(linear, quantized, table, linear.to_quantized(32, 4, "mxfp4"), mlps=1)
    model.layers[0].mlp.up_proj = model.layers[0].mlp.up_proj.to_quantized(64, 4)
    registry = Registry("reference")
    move_to_host(model, registry)
    dense, coded, table, other = model.parts
    x = mx.array(normal(3, IN))
    for layer, count in ((dense, 0), (coded, 1), (other, 0), (table.as_linear, 1)):
        before = registry.served["skinny_qmm", "reference"]
        layer(x)
        assert registry.served["skinny_qmm", "reference"] - before == count
    table(mx.array([3]))
    assert registry.served == {("skinny_qmm", "reference"): 2}
    model.layers[0].mlp(x)
    assert registry.served == {("skinny_qmm", "reference"): 3}
