"""Checks of values: every kernel, and its plain-MLX reference, against its definition in float64.

A variant of a kernel takes a second to compile on some devices, so the cases share variants, and
those are the ones that real models use as far as kernels are told apart by a model's shapes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.errors import counted
from lse_mlx.kernels import gated_delta_verify as delta
from lse_mlx.kernels.dynamic_conv import dynamic_conv
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.selector import select
from lse_mlx.kernels.skinny_qmm import QuantizedProduct, own_forms
from lse_mlx.kernels.sliding_attention import RingView, sliding_attention
from lse_mlx.kernels.topk import topk
from lse_mlx.kernels.verify_attention import verify_attention
from lse_mlx.selftest import definitions
from lse_mlx.selftest.checks import Check

Arrays = list[mx.array]

HALF_LIMIT = 1e-2
"""Of an error relative to the largest value, where results are rounded to 16 bits."""


def value_checks(registry: Registry, half: mx.Dtype = mx.bfloat16) -> Iterator[Check]:
    """For each kernel its cases, in the forms that it has with `registry`.

    half: the dtype of 16 bits beside fp32
    """
    yield from _topk()
    yield from _selector()
    yield from _sliding_attention()
    yield from _verify_attention(half)
    yield from _dynamic_conv()
    yield from _gated_delta(half)
    yield from _products(registry, half)


def floats(seed: int, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    """Normal random numbers."""
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def rounded(x: NDArray[np.float32], dtype: mx.Dtype) -> tuple[mx.array, NDArray[np.float32]]:
    """`x` in `dtype`, and what that holds."""
    stored = mx.array(x).astype(dtype)
    return stored, as_numpy(stored)


def as_numpy(x: mx.array) -> NDArray[Any]:
    """An array as NumPy has it; bf16 as fp32."""
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


def dtype_name(dtype: mx.Dtype) -> str:
    """A dtype as people write it."""
    return str(dtype).removeprefix("mlx.core.")


def distance(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest value wanted; what is NaN differs."""
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    if found.shape != wanted.shape:
        raise ValueError(f"the shape is {list(found.shape)} instead of {list(wanted.shape)}")
    difference = np.abs(found - wanted)
    worst = float(np.where(np.isnan(difference), np.inf, difference).max())
    return worst / max(float(np.abs(wanted).max()), 1e-30)


def _by_products(limit: float) -> float:
    """The limit of a reference that multiplies matrices: some GPUs round fp32 factors to 10 bits."""
    return limit if mx.default_device() == mx.cpu else 5e-3


def _topk() -> Iterator[Check]:
    special = floats(1, 4, 4097)
    special[0, [73, 513]], special[0, [17, 514]] = np.inf, -np.inf
    special[1, [511, 512, 4096]], special[1, 1023] = np.nan, np.inf
    special[2] = -np.inf
    special[3] = 0.0
    special[3, [0, 511, 512, 1025, 4096]] = 7.0
    special[3, 100:200] = -0.0
    cases = (
        ("NaN, infinities, zeros and ties", special, 16, mx.float32),
        ("ties of bfloat16", floats(2, 3, 4097), 16, mx.bfloat16),
        ("the widest list", floats(2, 2, 1500), 32, mx.float32),
        ("the vocabulary of a 27B model", floats(3, 7, 248_320), 16, mx.float32),
    )
    for name, logits, k, dtype in cases:
        yield _topk_check(name, logits, k, dtype)


def _topk_check(name: str, logits: NDArray[np.float32], k: int, dtype: mx.Dtype) -> Check:
    def run(registry: Registry) -> Arrays:
        return list(topk(registry, mx.array(logits).astype(dtype), k))

    def error(found: Arrays) -> float:
        values, columns = definitions.best(rounded(logits, dtype)[1], k)
        same = np.array_equal(np.array(found[0]), values, equal_nan=True)
        return float(not same or not np.array_equal(np.array(found[1]), columns))

    return Check("topk", name, run, error, 0.0, ("chunks",), 0.0)


def _selector() -> Iterator[Check]:
    positions, k, rank, vocab = 7, 16, 256, 1000
    before, after = floats(4, positions, k, rank), floats(5, positions, k, rank, scale=0.1)
    gates, logits = floats(6, positions, rank), floats(7, positions, k)
    ids = np.random.default_rng(8).permutation(vocab)[: positions * k].astype(np.int32)
    ids = ids.reshape(positions, k)
    broken_logits, broken_ids = logits.copy(), ids.copy()
    broken_logits[3], broken_ids[5, 2] = np.nan, vocab

    def selecting(logits: Any, ids: Any) -> Callable[[Registry], Arrays]:
        def run(registry: Registry) -> Arrays:
            arrays = [mx.array(x) for x in (logits, ids, before, gates, after)]
            selection = select(registry, *arrays, vocab_size=vocab)
            return [selection.scores, selection.path]

        return run

    def scores(found: Arrays) -> float:
        return distance(found[0], definitions.selector_scores(logits, before, gates, after))

    def path(found: Arrays) -> float:
        return float(definitions.walk(np.array(found[0]), ids, vocab) != found[1].tolist())

    def broken_path(found: Arrays) -> float:
        wanted = definitions.walk(np.array(found[0]), broken_ids, vocab)
        return float(wanted != found[1].tolist())

    run, broken = selecting(logits, ids), selecting(broken_logits, broken_ids)
    name = "the path is the best one through its scores"
    yield Check("selector", "scores", run, scores, 1e-5, reference_limit=1e-5)
    yield Check("selector", name, run, path, 0.0, reference_limit=0.0)
    name = "a NaN and an id out of range are said"
    yield Check("selector", name, broken, broken_path, 0.0, reference_limit=0.0)


def _sliding_attention() -> Iterator[Check]:
    for live, position in ((17, 17), (515, 900)):
        yield _sliding_check(live, position)


def _sliding_check(live: int, position: int) -> Check:
    """In heads as a 27B drafter has them, but fewer, and a shorter ring."""
    rows, heads, kv, width, slots, window = 8, 8, 2, 128, 515, 508
    queries, ring = floats(9, rows, heads, width), floats(10, 2, kv, slots, width)
    block = floats(11, 2, kv, rows, width)
    # Which rows are live and in the window, by their absolute positions alone.
    held = {s % slots: s for s in range(position - live, position)}
    seen = np.ones((rows, slots + rows), bool)
    for slot in range(slots):
        for row in range(rows):
            seen[row, slot] = slot in held and position + row - held[slot] < window
        if slot not in held:
            ring[:, :, slot] = np.nan

    def run(registry: Registry) -> Arrays:
        arrays = [mx.array(x) for x in (queries, ring, block)]
        view = RingView(position, live, window, slots, rows)
        return [sliding_attention(registry, *arrays, view=view)]

    def error(found: Arrays) -> float:
        keys, values = np.concatenate([ring, block], axis=2)
        wanted = definitions.attention(queries, keys, values, seen)
        return distance(found[0], wanted.reshape(rows, -1))

    name = f"{counted(live, 'row')} live, {position} before the block"
    return Check("sliding_attention", name, run, error, 2e-5, reference_limit=_by_products(2e-5))


def _verify_attention(half: mx.Dtype) -> Iterator[Check]:
    """In heads as a 27B target has them, but fewer."""
    for rows, length, kv, dtype in (
        (1, 1, 2, half),
        (8, 300, 2, half),
        (5, 2100, 1, half),
        (8, 300, 2, mx.float32),
        (8, 2100, 1, mx.float32),
    ):
        yield _verify_check(rows, length, kv, dtype)


def _verify_check(rows: int, length: int, kv: int, dtype: mx.Dtype) -> Check:
    heads, width = 6 * kv, 256
    capacity = -(-length // 256) * 256
    q = floats(12, 1, heads, rows, width)
    k, v = floats(13, 1, kv, capacity, width), floats(14, 1, kv, capacity, width)
    k[:, :, length:] = v[:, :, length:] = np.nan

    def run(registry: Registry) -> Arrays:
        queries, keys, values = (rounded(x, dtype)[0] for x in (q, k, v))
        return [verify_attention(registry, queries, keys, values, length, width**-0.5)]

    def error(found: Arrays) -> float:
        queries, keys, values = (rounded(x, dtype)[1][0] for x in (q, k, v))
        seen = np.arange(capacity) <= length - rows + np.arange(rows)[:, None]
        wanted = definitions.attention(queries.swapaxes(0, 1), keys, values, seen)
        return distance(as_numpy(found[0])[0].swapaxes(0, 1), wanted)

    name = f"{counted(rows, 'row')} at the end of {counted(length, 'key')} in {dtype_name(dtype)}"
    fp32 = dtype == mx.float32
    limit, of_reference = (2e-5, _by_products(2e-5)) if fp32 else (HALF_LIMIT, 3e-2)
    return Check("verify_attention", name, run, error, limit, ("split",), of_reference)


def _dynamic_conv() -> Iterator[Check]:
    for rows, hidden in ((1, 32), (7, 336), (8, 5120)):
        for side in (0, 1):
            yield _convolution_check(rows, hidden, side)


def _convolution_check(rows: int, hidden: int, side: int) -> Check:
    x, groups = floats(15, rows, hidden), hidden // 16
    base, dynamic = floats(16, 2, 2, groups, 16), floats(17, rows, 4 * groups)

    def run(registry: Registry) -> Arrays:
        return [dynamic_conv(registry, *(mx.array(a) for a in (x, base, dynamic)), side=side)]

    def error(found: Arrays) -> float:
        return distance(found[0], definitions.convolution(x, base, dynamic, side))

    name = f"{counted(rows, 'row')} of {hidden}, side {side}"
    return Check("dynamic_conv", name, run, error, 1e-6, reference_limit=1e-6)


def delta_rows(rows: int, seed: int, width: int, dtype: mx.Dtype) -> delta.DeltaRows:
    """Rows for 2 key heads and 8 value heads of `width`."""
    rng = np.random.default_rng(seed)
    mixed = rounded(floats(seed, 1, rows, (2 * 2 + 8) * width), dtype)[0]
    decay = mx.array(rng.uniform(0.2, 1, (1, rows, 8)).astype(np.float32))
    beta = mx.array(rng.uniform(0, 1, (1, rows, 8)).astype(np.float32))
    return delta.DeltaRows(mixed, decay, beta)


def delta_state(width: int) -> mx.array:
    """A state for `delta_rows`."""
    return mx.array(floats(18, 1, 8, width, width))


def _gated_delta(half: mx.Dtype) -> Iterator[Check]:
    """Heads of 128 are those of real models."""
    for dtype, width, limit in ((mx.float32, 32, 1e-5), (half, 128, HALF_LIMIT)):
        for n_pending, rows, whole in ((0, 1, True), (3, 8, False), (8, 5, True), (0, 21, True)):
            yield _delta_check(dtype, width, limit, n_pending, rows, whole)
        yield _fold_check(dtype, width)


def _delta_check(
    dtype: mx.Dtype, width: int, limit: float, n_pending: int, rows: int, whole: bool
) -> Check:
    def run(registry: Registry) -> Arrays:
        pending = delta_rows(8, 22, width, dtype) if n_pending else None
        new, state = delta_rows(rows, 19, width, dtype), delta_state(width)
        return list(delta.gated_delta_verify(registry, new, pending, n_pending, state, whole))

    def error(found: Arrays) -> float:
        before = _after_rows(8, 22, n_pending, width, dtype, as_numpy(delta_state(width))[0])[1]
        outputs, after = _after_rows(rows, 19, rows, width, dtype, before)
        wanted = after if whole else before
        return max(
            distance(as_numpy(found[0])[0], outputs), distance(as_numpy(found[1])[0], wanted)
        )

    name = f"{counted(rows, 'row')} behind {n_pending} pending ones, {dtype_name(dtype)}"
    return Check("gated_delta_verify", name, run, error, limit, reference_limit=limit)


def _fold_check(dtype: mx.Dtype, width: int) -> Check:
    def run(registry: Registry) -> Arrays:
        rows = delta_rows(8, 22, width, dtype)
        return [delta.fold_rows(registry, rows, 2, delta_state(width))]

    def error(found: Arrays) -> float:
        state = as_numpy(delta_state(width))[0]
        return distance(as_numpy(found[0])[0], _after_rows(8, 22, 2, width, dtype, state)[1])

    name = f"2 pending rows alone, {dtype_name(dtype)}"
    return Check("gated_delta_verify", name, run, error, 1e-5, reference_limit=1e-5)


def _after_rows(
    rows: int, seed: int, count: int, width: int, dtype: mx.Dtype, state: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Outputs of the first `count` rows, and the state after them."""
    arrays = (as_numpy(a)[0, :count] for a in delta_rows(rows, seed, width, dtype).arrays())
    return definitions.delta_rule(*arrays, state=state, eps=delta.NORM_EPS)


def product_cases(half: mx.Dtype) -> tuple[tuple[int, int, mx.Dtype, mx.Dtype], ...]:
    """Bits, group size, dtypes of x and of scales: a target's, a drafter's, and all others."""
    return (4, 64, half, half), (4, 64, mx.float32, half), (8, 32, mx.float32, mx.float32)


def _products(registry: Registry, half: mx.Dtype) -> Iterator[Check]:
    for bits, group, dtype, of_scales in product_cases(half):
        yield _product_check(registry, bits, group, dtype, of_scales)


def _product_check(
    registry: Registry, bits: int, group: int, dtype: mx.Dtype, of_scales: mx.Dtype
) -> Check:
    def run(registry: Registry) -> Arrays:
        x, _ = rounded(floats(20, 8, 512), dtype)
        return [random_product(registry, 21, bits, group, of_scales)(x)]

    def error(found: Arrays) -> float:
        _, held = rounded(floats(20, 8, 512), dtype)
        product = random_product(registry, 21, bits, group, of_scales)
        scales, biases = as_numpy(product.scales), as_numpy(product.biases)
        codes = np.array(product.weight)
        matrix = definitions.affine_matrix(codes, scales, biases, bits, group)
        return distance(as_numpy(found[0]), held.astype(np.float64) @ matrix.T)

    name = f"8 rows in {dtype_name(dtype)}, {bits} bits in groups of {group}"
    fp32 = dtype == mx.float32
    # In 16 bits, MLX on a CPU also adds up in 16 bits.
    limit, of_reference = (1e-5, _by_products(1e-5)) if fp32 else (HALF_LIMIT, 1e-1)
    return Check("skinny_qmm", name, run, error, limit, own_forms(registry), of_reference)


def random_product(
    registry: Registry, seed: int, bits: int, group: int, dtype: mx.Dtype
) -> QuantizedProduct:
    """A matrix of 300 outputs, which fill no tile, and 512 inputs; scales in `dtype`.

    Made by NumPy alone: what a device's own quantizer rounds differently is not the question.
    """
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**32, (300, 512 * bits // 32), np.uint32)
    # Weights around zero, of the size that a trained matrix has.
    scales = rng.uniform(1, 3, (300, 512 // group)) / np.sqrt(512) / (1 << bits)
    biases = -scales * (1 << bits) * rng.uniform(0.4, 0.6, scales.shape)
    held = [mx.array(x.astype(np.float32)).astype(dtype) for x in (scales, biases)]
    return QuantizedProduct(registry, mx.array(codes), held[0], held[1], bits, group)
