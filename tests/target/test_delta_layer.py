"""A Gated DeltaNet layer in its device form: mlx-lm's values, and a row's bits in any pass."""

import itertools
from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs
from numpy.typing import NDArray

from lse_mlx.kernels.registry import Registry
from lse_mlx.target.delta_layer import DeltaLayer, gate_output, gates, short_convolution
from lse_mlx.target.state import DeltaState
from tests.kernels.modes import in_every_mode, needs_compiler, own_registry
from tests.metal_host.host import HostOptions, MetalHost
from tests.states import in_numpy

HIDDEN, ROWS = 64, 8
CONFIG = TextModelArgs(
    hidden_size=HIDDEN,
    linear_num_value_heads=8,
    linear_num_key_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
)
each_dtype = pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)


def plain() -> Registry:
    """Runs the kernel in the harness, as it is."""
    return own_registry(MetalHost(HostOptions()).metal_kernel)


def reference() -> Registry:
    return Registry("reference")


each_form = pytest.mark.parametrize(
    "registry",
    [pytest.param(plain, marks=needs_compiler, id="kernel"), pytest.param(reference, id="mlx")],
)


@cache
def module(dtype: mx.Dtype) -> GatedDeltaNet:
    """The layer of most tests, made once."""
    return drawn_module(dtype)


def drawn_module(dtype: mx.Dtype) -> GatedDeltaNet:
    """mlx-lm's layer with random weights of `dtype`; A_log stays fp32, as in a checkpoint."""
    net, rng = GatedDeltaNet(CONFIG), np.random.default_rng(0)

    def drawn(name: str, shape: tuple[int, ...]) -> mx.array:
        draw = rng.standard_normal(shape)
        if name == "A_log":
            return mx.array(np.log(rng.uniform(0.02, 1.5, shape)).astype(np.float32))
        if name == "norm.weight":
            draw = 1 + 0.2 * draw
        elif len(shape) == 2:
            draw *= 1.2 / np.sqrt(shape[1])
        return mx.array(draw.astype(np.float32)).astype(dtype)

    net.load_weights([(n, drawn(n, tuple(w.shape))) for n, w in tree_flatten(net.parameters())])
    mx.eval(net.parameters())
    return net.eval()


def layer(registry: Registry, dtype: mx.Dtype) -> DeltaLayer:
    return DeltaLayer.of(module(dtype), dtype, registry)


def inputs(rows: int, dtype: mx.Dtype, seed: int = 0) -> mx.array:
    x = np.random.default_rng([seed, rows]).standard_normal((1, rows, HIDDEN))
    return mx.array(x.astype(np.float32)).astype(dtype)


def run(delta: DeltaLayer, x: mx.array, state: DeltaState, whole: bool, n: int) -> mx.array:
    """A pass over the rows of `x`, of which `n` are committed."""
    y = delta(x, state, whole)
    state.commit(n)
    return y


def stepped(delta: DeltaLayer, x: mx.array) -> tuple[NDArray, list[DeltaState]]:
    """Step-by-step decoding: all outputs, and the states before the first row and after each."""
    state, outputs, states = delta.new_state(), [], [delta.new_state()]
    for i in range(x.shape[1]):
        outputs.append(in_numpy(run(delta, x[:, i : i + 1], state, True, 1)))
        states.append(DeltaState(state.tail, state.recurrent, state.fold))
    return np.concatenate(outputs, axis=1), states


@each_form
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(mx.float32, 2e-5), (mx.bfloat16, 0.06)], ids=["float32", "bfloat16"]
)
def test_outputs_and_state_are_those_of_mlx_lm(
    registry: Callable[[], Registry], dtype: mx.Dtype, tolerance: float
) -> None:
    delta, net, x = layer(registry(), dtype), module(dtype), inputs(30, dtype)
    state, held = delta.new_state(), ArraysCache(2)
    pieces = [(0, 13), (13, 14), (14, 22), (22, 30)]
    for start, stop in pieces:
        expected = net(x[:, start:stop], cache=held)
        whole = start == 0 or stop - start == 1
        got = run(delta, x[:, start:stop], state, whole, stop - start)
        assert got.dtype == dtype
        scale = np.abs(in_numpy(expected)).max()
        np.testing.assert_allclose(
            in_numpy(got), in_numpy(expected), atol=tolerance * scale, rtol=tolerance
        )
    state.settle()
    assert np.array_equal(in_numpy(state.tail), in_numpy(held[0]))
    scale = np.abs(in_numpy(held[1])).max()
    np.testing.assert_allclose(
        in_numpy(state.recurrent), in_numpy(held[1]), atol=tolerance * scale, rtol=tolerance
    )


@each_form
def test_a_norm_in_fp32_does_not_widen_what_comes_out(registry: Callable[[], Registry]) -> None:
    """As Qwen3.5 checkpoints store it, beside weights in bf16."""
    net = drawn_module(mx.bfloat16)
    weight = np.random.default_rng(7).normal(1, 0.2, CONFIG.linear_value_head_dim)
    net.norm.weight = mx.array(weight.astype(np.float32))
    delta, held = DeltaLayer.of(net, mx.bfloat16, registry()), ArraysCache(2)
    state = delta.new_state()
    for rows in (13, 1, 8):
        x = inputs(rows, mx.bfloat16)
        expected = net(x, cache=held)
        got = run(delta, x, state, rows != 8, rows)
        assert (got.dtype, state.tail.dtype) == (mx.bfloat16, mx.bfloat16)
        scale = np.abs(in_numpy(expected)).max()
        np.testing.assert_allclose(in_numpy(got), in_numpy(expected), atol=0.06 * scale, rtol=0.06)


@needs_compiler
@each_dtype
def test_rows_of_every_pass_are_step_by_step_decoding(dtype: mx.Dtype) -> None:
    x, wrong = inputs(2 * ROWS, dtype), inputs(ROWS, dtype, seed=1)
    delta = layer(plain(), dtype)
    outputs, states = stepped(delta, x)
    for before, now in itertools.product(range(ROWS + 1), range(1, ROWS + 1)):
        state = delta.new_state()
        if before:
            first = mx.concatenate([x[:, :before], wrong[:, before:]], axis=1)
            run(delta, first, state, False, before)
        kept = (now + 1) // 2
        y = run(delta, x[:, before : before + now], state, now == 1, kept)
        state.settle()
        assert np.array_equal(in_numpy(y), outputs[:, before : before + now])
        assert np.array_equal(in_numpy(state.tail), in_numpy(states[before + kept].tail))
        assert np.array_equal(in_numpy(state.recurrent), in_numpy(states[before + kept].recurrent))


@needs_compiler
@each_dtype
def test_two_passes_give_the_same_bits_in_every_mode(dtype: mx.Dtype) -> None:
    x = inputs(2 * ROWS, dtype)

    def passes(registry: Registry) -> list[mx.array]:
        delta = layer(registry, dtype)
        state = delta.new_state()
        first = run(delta, x[:, :ROWS], state, False, 5)
        second = run(delta, x[:, ROWS:], state, False, 3)
        state.settle()
        return [first, second, state.tail, state.recurrent]

    in_every_mode(passes)


@each_form
@each_dtype
def test_pieces_of_a_prompt_are_step_by_step_decoding(
    registry: Callable[[], Registry], dtype: mx.Dtype
) -> None:
    delta, x = layer(registry(), dtype), inputs(37, dtype)
    outputs, states = stepped(delta, x)
    state = delta.new_state()
    got = [
        in_numpy(run(delta, x[:, a:b], state, True, b - a))
        for a, b in [(0, 20), (20, 22), (22, 37)]
    ]
    assert np.array_equal(np.concatenate(got, axis=1), outputs)
    assert np.array_equal(in_numpy(state.recurrent), in_numpy(states[37].recurrent))


@needs_compiler
def test_a_pass_is_one_launch_and_compiles_nothing_that_an_earlier_one_did_not() -> None:
    registry = plain()
    delta = layer(registry, mx.bfloat16)
    state = delta.new_state()
    run(delta, inputs(5, mx.bfloat16), state, True, 5)
    first = [c.name for c in registry.compilations]
    assert sorted(first) == ["gate_output", "gated_delta_verify", "gates", "short_convolution"]
    for rows in (8, 3, 1, 40):
        run(delta, inputs(rows, mx.bfloat16), state, rows in (1, 40), rows)
    assert len(registry.compilations) == 4
    assert registry.served == {("gated_delta_verify", "metal"): 5}


def test_the_convolution_is_its_taps_then_silu() -> None:
    rng = np.random.default_rng(3)
    x, taps = rng.standard_normal((1, 9, 6)), rng.standard_normal((4, 6))
    rows = [mx.array(x[:, i : i + 6].astype(np.float32)) for i in range(4)]
    got = short_convolution(*rows, *(mx.array(tap.astype(np.float32)) for tap in taps))
    mixed = sum(x[:, i : i + 6] * taps[i] for i in range(4))
    np.testing.assert_allclose(in_numpy(got), mixed / (1 + np.exp(-mixed)), atol=1e-6, rtol=1e-5)


def test_decay_and_write_strength_follow_their_formulas_in_fp32() -> None:
    rng = np.random.default_rng(4)
    a, b = (mx.array(rng.normal(0, 3, (1, 5, 8))).astype(mx.bfloat16) for _ in range(2))
    a_log, dt_bias = (mx.array(rng.normal(0, 2, 8).astype(np.float32)) for _ in range(2))
    decay, beta = gates(a, b, a_log, dt_bias)
    step = np.logaddexp(0, in_numpy(a).astype(np.float64) + in_numpy(dt_bias))
    expected = np.exp(-np.exp(in_numpy(a_log).astype(np.float64)) * step)
    assert (decay.dtype, beta.dtype) == (mx.float32, mx.float32)
    np.testing.assert_allclose(in_numpy(decay), expected, atol=1e-7, rtol=2e-5)
    np.testing.assert_allclose(in_numpy(beta), 1 / (1 + np.exp(-in_numpy(b))), rtol=1e-5)


@each_dtype
def test_the_output_is_gated_in_fp32_and_rounded_once(dtype: mx.Dtype) -> None:
    """To the dtype of what gates, whatever that of the norm."""
    rng = np.random.default_rng(5)
    normed = mx.array(rng.standard_normal((1, 3, 2, 4))).astype(dtype)
    z = mx.array(rng.standard_normal((1, 3, 2, 4))).astype(mx.bfloat16)
    gated = gate_output(normed, z)
    gate = in_numpy(z).astype(np.float64)
    expected = in_numpy(normed) * gate / (1 + np.exp(-gate))
    assert gated.dtype == mx.bfloat16
    np.testing.assert_allclose(in_numpy(gated), expected, rtol=2.0**-8 + 1e-6)
