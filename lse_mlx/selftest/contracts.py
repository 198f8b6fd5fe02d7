"""Checks of bits: what the kernels promise to be equal to the last one."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.kernels import gated_delta_verify as delta
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.skinny_qmm import own_forms
from lse_mlx.kernels.verify_attention import verify_attention
from lse_mlx.selftest.checks import Check
from lse_mlx.selftest.values import (
    Arrays,
    as_numpy,
    delta_rows,
    delta_state,
    dtype_name,
    floats,
    product_cases,
    random_product,
    rounded,
)

ROWS = 8


def contract_checks(registry: Registry, half: mx.Dtype = mx.bfloat16) -> Iterator[Check]:
    """The error of each is the share of numbers with other bits; `half` as in `value_checks`."""
    of_target, _, others = product_cases(half)
    for bits, group, dtype, of_scales in (of_target, others):
        yield _product_rows(registry, bits, group, dtype, of_scales)
    yield _attention_rows(half)
    for dtype, width in ((mx.float32, 32), (half, 128)):
        yield _delta_passes(dtype, width)


def pairs_differ(arrays: Arrays) -> float:
    """Of arrays two by two, the largest share of numbers that differ from the other one's."""
    return max(different(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=True))


def different(found: mx.array, wanted: mx.array) -> float:
    """The share of numbers that differ in their bits; all do where the shapes differ."""
    a, b = _bits(found), _bits(wanted)
    return float(np.mean(a != b)) if a.shape == b.shape else 1.0


def _bits(x: mx.array) -> NDArray[Any]:
    held = np.ascontiguousarray(as_numpy(x))
    return held.view(np.uint16 if held.itemsize == 2 else np.uint32)


def _product_rows(
    registry: Registry, bits: int, group: int, dtype: mx.Dtype, of_scales: mx.Dtype
) -> Check:
    def run(registry: Registry) -> Arrays:
        x, _ = rounded(floats(30, ROWS, 512), dtype)
        product = random_product(registry, 31, bits, group, of_scales)
        alone = mx.concatenate([product(x[n : n + 1]) for n in range(ROWS)])
        together = [(product(x[:n]), alone[:n]) for n in range(1, ROWS + 1)]
        return [array for pair in together for array in pair]

    name = f"1 to 8 rows have the same bits, {bits} bits, {dtype_name(dtype)}"
    return Check("skinny_qmm", name, run, pairs_differ, 0.0, own_forms(registry))


def _attention_rows(dtype: mx.Dtype) -> Check:
    heads, kv, width, length = 6, 1, 256, 600

    def run(registry: Registry) -> Arrays:
        queries, _ = rounded(floats(32, 1, heads, ROWS, width), dtype)
        keys, _ = rounded(floats(33, 1, kv, 768, width), dtype)
        values, _ = rounded(floats(34, 1, kv, 768, width), dtype)

        def attended(first: int, last: int) -> mx.array:
            part = mx.contiguous(queries[:, :, first:last])
            seen = length - ROWS + last
            return verify_attention(registry, part, keys, values, seen, width**-0.5)

        alone = mx.concatenate([attended(n, n + 1) for n in range(ROWS)], axis=2)
        together = [(attended(0, n), alone[:, :, :n]) for n in range(1, ROWS + 1)]
        return [array for pair in together for array in pair]

    name = f"1 to 8 rows have the same bits, {dtype_name(dtype)}"
    return Check("verify_attention", name, run, pairs_differ, 0.0, ("split",))


def _delta_passes(dtype: mx.Dtype, width: int) -> Check:
    """For each number accepted of a pass of eight, and one, some and eight rows now."""

    def run(registry: Registry) -> Arrays:
        before, after = (delta_rows(ROWS, seed, width, dtype) for seed in (35, 36))
        state = delta_state(width)
        arrays: Arrays = []
        stepped = state
        for accepted in range(1, ROWS + 1):
            row = _rows(before, accepted - 1, accepted)
            stepped = delta.gated_delta_verify(registry, row, None, 0, stepped, True)[1]
            outputs = _steps(registry, after, stepped)
            for rows in sorted({1, accepted, ROWS}):
                now = _rows(after, 0, rows)
                y, kept = delta.gated_delta_verify(registry, now, before, accepted, state, False)
                arrays += [y, outputs[:, :rows], kept, stepped]
        return arrays

    name = f"any rows after any accepted ones are step-by-step decoding, {dtype_name(dtype)}"
    return Check("gated_delta_verify", name, run, pairs_differ, 0.0)


def _steps(registry: Registry, rows: delta.DeltaRows, state: mx.array) -> mx.array:
    """The outputs of one row at a time."""
    outputs = []
    for n in range(len(rows)):
        y, state = delta.gated_delta_verify(registry, _rows(rows, n, n + 1), None, 0, state, True)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1)


def _rows(rows: delta.DeltaRows, first: int, last: int) -> delta.DeltaRows:
    return delta.DeltaRows(*(mx.contiguous(a[:, first:last]) for a in rows.arrays()))
