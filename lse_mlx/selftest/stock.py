"""Checks of what exact decoding takes from MLX as it is: that rows do not depend on each other."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.row_tiles import in_tiles
from lse_mlx.selftest.checks import STOCK_OPERATIONS, Check
from lse_mlx.selftest.contracts import ROWS, pairs_differ
from lse_mlx.selftest.values import Arrays, dtype_name, floats
from lse_mlx.target.delta_layer import gate_output, gates, short_convolution

HEADS, HEAD_DIM = 24, 256
VALUE_HEADS, VALUE_DIM = 48, 128
"""Of a 27B target."""

OfRows = Callable[[Registry, int, int], mx.array]
"""What rows `first` to `last` become, [1, last - first, ...]."""


def stock_checks(half: mx.Dtype = mx.bfloat16) -> Iterator[Check]:
    """The error of each is the share of numbers that have other bits where fewer rows are run.

    half: the dtype of 16 bits; rotations and norms are also run in fp32, where less is rounded away
    """
    for dtype in (half, mx.float32):
        yield _check("rope", dtype, _rope(dtype))
        yield _check("rms_norm", dtype, _rms_norm(dtype))
    yield _check("swiglu", half, _swiglu(half))
    yield _check("an output gate", half, _sigmoid_gate(half))
    yield _check("short_convolution", half, _short_convolution(half))
    yield _check("gates", half, _gates(half))
    yield _check("gate_output", half, _gate_output(half))
    yield _check("a dense product in tiles", half, _dense_product(half))


def _check(name: str, dtype: mx.Dtype, of_rows: OfRows) -> Check:
    def run(registry: Registry) -> Arrays:
        alone = mx.concatenate([of_rows(registry, n, n + 1) for n in range(ROWS)], axis=1)
        together = [(of_rows(registry, 0, n), alone[:, :n]) for n in range(1, ROWS + 1)]
        return [array for pair in together for array in pair]

    name = f"{name}: 1 to 8 rows have the same bits, {dtype_name(dtype)}"
    return Check(STOCK_OPERATIONS, name, run, pairs_differ, 0.0)


def _random(seed: int, dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.array(floats(seed, *shape)).astype(dtype)


def _rope(dtype: mx.Dtype) -> OfRows:
    """Rows go behind heads, and one row is rotated as the first of two, as in an exact engine."""
    rope = nn.RoPE(HEAD_DIM // 4, base=1e7)

    def of_rows(registry: Registry, first: int, last: int) -> mx.array:
        x = _random(40, dtype, 1, ROWS, HEADS, HEAD_DIM)[:, first:last]
        if last - first == 1:
            x = mx.concatenate([x, x], axis=1)
        rotated = rope(x.transpose(0, 2, 1, 3), offset=1000 + first)
        return rotated[:, :, : last - first].transpose(0, 2, 1, 3)

    return of_rows


def _rms_norm(dtype: mx.Dtype) -> OfRows:
    """Of a whole row, and of each of its heads."""

    def of_rows(registry: Registry, first: int, last: int) -> mx.array:
        x = _random(41, dtype, 1, ROWS, HEADS * HEAD_DIM)[:, first:last]
        weight = _random(42, dtype, HEADS * HEAD_DIM)
        by_head = x.reshape(1, last - first, HEADS, HEAD_DIM)
        normed = mx.fast.rms_norm(by_head, weight[:HEAD_DIM], 1e-6).reshape(x.shape)
        return mx.concatenate([mx.fast.rms_norm(x, weight, 1e-6), normed], axis=-1)

    return of_rows


def _swiglu(dtype: mx.Dtype) -> OfRows:
    def of_rows(registry: Registry, first: int, last: int) -> mx.array:
        gate, x = _random(43, dtype, 2, 1, ROWS, 17_408)[:, :, first:last]
        return swiglu(gate, x)

    return of_rows


def _sigmoid_gate(dtype: mx.Dtype) -> OfRows:
    """Of an attention layer, and the sum with what went around it."""

    def of_rows(registry: Registry, first: int, last: int) -> mx.array:
        mixed, gate, x = _random(44, dtype, 3, 1, ROWS, HEADS * HEAD_DIM)[:, :, first:last]
        return x + mixed * mx.sigmoid(gate)

    return of_rows


def _short_convolution(dtype: mx.Dtype) -> OfRows:
    taps, channels = 4, (2 * 16 + VALUE_HEADS) * VALUE_DIM

    def of_rows(registry: Registry, first: int, last: int) -> mx.array:
        inputs = _random(45, dtype, 1, ROWS + taps - 1, channels)
        windows = [inputs[:, tap + first : tap + last] for tap in range(taps)]
        return registry.compiled(short_convolution)(*windows, *_random(46, dtype, taps, channels))

    return of_rows


def _gates(dtype: mx.Dtype) -> OfRows:
    def of_rows(registry: Registry, first: int, last: int) -> mx.array:
        a, b = _random(47, dtype, 2, 1, ROWS, VALUE_HEADS)[:, :, first:last]
        a_log, dt_bias = _random(48, mx.float32, 2, VALUE_HEADS)
        return mx.concatenate(registry.compiled(gates)(a, b, a_log, dt_bias), axis=-1)

    return of_rows


def _gate_output(dtype: mx.Dtype) -> OfRows:
    def of_rows(registry: Registry, first: int, last: int) -> mx.array:
        pair = _random(49, dtype, 2, 1, ROWS, VALUE_HEADS, VALUE_DIM)
        normed, z = pair[:, :, first:last]
        return registry.compiled(gate_output)(normed, z)

    return of_rows


def _dense_product(dtype: mx.Dtype) -> OfRows:
    def of_rows(registry: Registry, first: int, last: int) -> mx.array:
        x = _random(50, dtype, 1, ROWS, 1024)[:, first:last]
        weight = _random(51, dtype, 520, 1024)
        return in_tiles(lambda rows: rows @ weight.T, x)

    return of_rows
