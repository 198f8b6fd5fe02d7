"""Calls of every kernel on small shapes: what the device tests run, and the compile check compiles.

Each gives the same arrays through a registry of any form, so that a device, the host harness and
the plain-MLX reference can be compared. Data is seeded; shapes are small, since a reference may be
slow, but every kernel meets each dtype, several row counts and the edges of its tiles.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.kernels.dynamic_conv import dynamic_conv
from lse_mlx.kernels.gated_delta_verify import DeltaRows, fold_rows, gated_delta_verify
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.selector import select
from lse_mlx.kernels.skinny_qmm import skinny_qmm
from lse_mlx.kernels.sliding_attention import sliding_attention
from lse_mlx.kernels.topk import topk
from lse_mlx.kernels.verify_attention import stock_attention, verify_attention

FLOATS = (mx.float32, mx.bfloat16, mx.float16)


@dataclass(frozen=True)
class Case:
    """One call of a kernel.

    run:       the arrays it gives through a registry
    wanted:    what it is compared with, if not with what it gives by its reference
    tolerance: largest difference from the reference, beside the largest value of the reference
    same_bits: the kernel does nothing but exact fma, sums, products, divisions and roots in a fixed
               order, so the host harness gives the same bits
    """

    kernel: str
    label: str
    run: Callable[[Registry], list[mx.array]]
    tolerance: float
    same_bits: bool = False
    wanted: Callable[[], list[mx.array]] | None = None

    def expected(self) -> list[mx.array]:
        """What the kernel ought to give; to be called with the CPU as the default device."""
        return self.wanted() if self.wanted else self.run(Registry("reference"))

    def __str__(self) -> str:
        return f"{self.kernel}: {self.label}"


def cases() -> list[Case]:
    """All of them."""
    return [
        *topk_cases(),
        *selector_cases(),
        *convolution_cases(),
        *sliding_attention_cases(),
        *verify_attention_cases(),
        *gated_delta_cases(),
        *skinny_qmm_cases(),
    ]


def name(dtype: mx.Dtype) -> str:
    """A dtype as people write it."""
    return str(dtype).removeprefix("mlx.core.")


def rounding(dtype: mx.Dtype) -> float:
    """Half the distance between neighbours near 1: what one rounding to `dtype` may add."""
    return {mx.float32: 2.0**-24, mx.bfloat16: 2.0**-9, mx.float16: 2.0**-12}[dtype]


def normal(seed: int, shape: tuple[int, ...], dtype: mx.Dtype, scale: float = 1.0) -> mx.array:
    """Seeded normal numbers, made by NumPy and so the same on every device."""
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return mx.array(values.astype(np.float32)).astype(dtype)


def uniform(seed: int, shape: tuple[int, ...], low: float, high: float) -> mx.array:
    """Seeded fp32 numbers between two bounds."""
    return mx.array(np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32))


# --------------------------------------------------------------------------------- topk
def topk_cases() -> Iterator[Case]:
    """One chunk, some, and the vocabulary of a 27B model; NaN, infinities, zeros and ties planted."""
    for dtype in (mx.float32, mx.bfloat16):
        for rows, width, k in (
            (1, 32, 1),
            (3, 512, 16),
            (4, 4097, 16),
            (2, 9000, 32),
            (1, 70000, 5),
        ):
            yield _topk_case(dtype, rows, width, k)
    yield _topk_case(mx.float32, 7, 248_320, 16)


def _topk_case(dtype: mx.Dtype, rows: int, width: int, k: int) -> Case:
    def run(registry: Registry) -> list[mx.array]:
        return list(topk(registry, _logits(rows, width).astype(dtype), k))

    # Values are copied and columns counted, so nothing may differ.
    return Case("topk", f"{name(dtype)}, {k} of {rows} x {width}", run, 0.0, same_bits=True)


def _logits(rows: int, width: int) -> mx.array:
    rng = np.random.default_rng(width)
    values = np.round(rng.normal(size=(rows, width)) * 8, 1).astype(np.float32)  # with many ties
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
    for row in values[1:]:
        row[rng.choice(width, 5, replace=False)] = special
    if rows > 2:
        values[2] = -np.inf
    return mx.array(values)


# ----------------------------------------------------------------------------- selector
def selector_cases() -> Iterator[Case]:
    """The waves that the reference engine checks itself with, smaller blocks, and broken rows."""
    for positions, k, rank in ((7, 16, 256), (3, 16, 40), (2, 4, 5)):
        yield Case(
            "selector",
            f"{positions} positions, {k} candidates, rank {rank}",
            partial(_select, positions, k, rank, False),
            tolerance=2e-6,
            same_bits=True,
        )
    yield Case(
        "selector",
        "a NaN on the way and an id out of range",
        partial(_select, 7, 16, 256, True),
        tolerance=2e-6,
        same_bits=True,
    )


def _select(positions: int, k: int, rank: int, broken: bool, registry: Registry) -> list[mx.array]:
    logits = wave(np.cos, 0.017, 0.23, (positions, k))
    ids = np.arange(positions * k, dtype=np.int32).reshape(positions, k)[:, ::-1].copy()
    if broken:
        logits[3] = np.nan
        ids[5, 2] = 1000
    selection = select(
        registry,
        mx.array(logits),
        mx.array(ids),
        mx.array(wave(np.sin, 0.013, 0.31, (positions, k, rank))),
        mx.array(wave(np.sin, 0.037, 0.41, (positions, rank))),
        mx.array(wave(np.cos, 0.021, 0.29, (positions, k, rank))),
        1000,
    )
    return [selection.scores, selection.path]


def wave(
    function: np.ufunc, step: float, scale: float, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """scale * function(step * i) over the elements in their order."""
    values = function(step * np.arange(np.prod(shape))) * scale
    return values.astype(np.float32).reshape(shape)


# ------------------------------------------------------------------------- dynamic_conv
def convolution_cases() -> Iterator[Case]:
    """One row, odd channels, and the drafter's own width; both sides of a sublayer."""
    for rows, channels, group in ((1, 20, 4), (7, 20, 4), (8, 5120, 16)):
        for side in (0, 1):
            yield Case(
                "dynamic_conv",
                f"{rows} x {channels}, groups of {group}, side {side}",
                partial(_convolve, rows, channels, group, side),
                tolerance=1e-6,
                same_bits=True,
            )


def _convolve(
    rows: int, channels: int, group: int, side: int, registry: Registry
) -> list[mx.array]:
    groups = channels // group
    x = normal(1, (rows, channels), mx.float32)
    base = normal(2, (2, 2, groups, group), mx.float32)
    dynamic = normal(3, (rows, 4 * groups), mx.float32)
    return [dynamic_conv(registry, x, base, dynamic, side)]


# -------------------------------------------------------------------- sliding_attention
def sliding_attention_cases() -> Iterator[Case]:
    """The waves that the reference engine checks itself with: a short ring, a full one, turned ones."""
    for heads, position, live in (
        ((4, 2), 17, 17),
        ((4, 2), 2055, 2055),
        ((4, 2), 3000, 2052),
        ((32, 8), 5000, 2055),
    ):
        yield Case(
            "sliding_attention",
            f"{heads} heads of 128, {live} live rows before {position}",
            partial(_slide, heads, position, live),
            tolerance=2e-6,
        )


def _slide(heads: tuple[int, int], position: int, live: int, registry: Registry) -> list[mx.array]:
    rows, head_dim, capacity, window = 8, 128, 2055, 2048
    queries = wave(np.sin, 0.013, 0.35, (rows, heads[0], head_dim))
    keys = wave(np.cos, 0.019, 0.2, (heads[1], capacity + rows, head_dim))
    values = wave(np.sin, 0.017, 0.2, (heads[1], capacity + rows, head_dim))
    both = np.stack([keys, values])
    ring, block = mx.array(both[:, :, :capacity]), mx.array(both[:, :, capacity:])
    return [sliding_attention(registry, mx.array(queries), ring, block, position, live, window)]


# --------------------------------------------------------------------- verify_attention
def verify_attention_cases() -> Iterator[Case]:
    """Short and long caches, one row and eight, every dtype; what is not in use is NaN."""
    for dtype, heads, head_dim, row_counts, length in (
        (mx.bfloat16, (24, 4), 256, (1, 8), 2600),
        (mx.float32, (12, 2), 256, (8,), 300),
        (mx.float16, (4, 2), 64, (5,), 40),
        (mx.bfloat16, (8, 8), 128, (3,), 3),
    ):
        for rows in row_counts:
            yield Case(
                "verify_attention",
                f"{name(dtype)}, {rows} rows of {length}, {heads} heads of {head_dim}",
                partial(_verify, heads, head_dim, rows, length, dtype),
                tolerance=2e-6 + 2 * rounding(dtype),
                # Stock MLX may accumulate in the inputs' dtype on a CPU.
                wanted=partial(_attend, heads, head_dim, rows, length, dtype),
            )


def _cache(
    heads: tuple[int, int], head_dim: int, rows: int, length: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    used = mx.arange(length + 5)[:, None] < length
    keys, values = (
        mx.where(used, normal(seed, (1, heads[1], length + 5, head_dim), dtype), mx.nan)
        for seed in (2, 3)
    )
    queries = normal(1, (1, heads[0], rows, head_dim), dtype)
    return queries, keys.astype(dtype), values.astype(dtype)


def _verify(
    heads: tuple[int, int],
    head_dim: int,
    rows: int,
    length: int,
    dtype: mx.Dtype,
    registry: Registry,
) -> list[mx.array]:
    cache = _cache(heads, head_dim, rows, length, dtype)
    return [verify_attention(registry, *cache, length, head_dim**-0.5)]


def _attend(
    heads: tuple[int, int], head_dim: int, rows: int, length: int, dtype: mx.Dtype
) -> list[mx.array]:
    cache = _cache(heads, head_dim, rows, length, dtype)
    queries, keys, values = (array.astype(mx.float32) for array in cache)
    return [stock_attention(queries, keys, values, length, head_dim**-0.5)]


# ------------------------------------------------------------------- gated_delta_verify
def gated_delta_cases() -> Iterator[Case]:
    """Passes of several widths behind several pending rows, and a fold alone."""
    for dtype in FLOATS:
        for heads, width in (((4, 8), 32), ((2, 8), 128)):
            for n_pending, rows, whole in ((0, 1, True), (3, 8, False), (8, 5, True)):
                yield Case(
                    "gated_delta_verify",
                    f"{name(dtype)}, {heads} heads of {width}, {n_pending} pending, {rows} rows",
                    _delta_pass(dtype, heads, width, n_pending, rows, whole),
                    tolerance=2e-6 + 2 * rounding(dtype),
                    same_bits=True,
                )
        yield Case(
            "gated_delta_verify",
            f"{name(dtype)}, fold 2 rows",
            _delta_fold(dtype, (4, 8), 64, 2),
            tolerance=2e-6,
            same_bits=True,
        )


def _delta_rows(seed: int, rows: int, heads: tuple[int, int], width: int, dtype: mx.Dtype):
    key_heads, value_heads = heads
    return DeltaRows(
        normal(seed, (1, rows, (2 * key_heads + value_heads) * width), dtype),
        uniform(seed + 1, (1, rows, value_heads), 0.9, 1.0),
        uniform(seed + 2, (1, rows, value_heads), 0.0, 1.0),
    )


def _delta_pass(
    dtype: mx.Dtype, heads: tuple[int, int], width: int, n_pending: int, rows: int, whole: bool
) -> Callable[[Registry], list[mx.array]]:
    def run(registry: Registry) -> list[mx.array]:
        state = normal(0, (1, heads[1], width, width), mx.float32, 0.1)
        pending = _delta_rows(10, 8, heads, width, dtype)
        new = _delta_rows(20, rows, heads, width, dtype)
        return list(gated_delta_verify(registry, new, pending, n_pending, state, whole))

    return run


def _delta_fold(
    dtype: mx.Dtype, heads: tuple[int, int], width: int, rows: int
) -> Callable[[Registry], list[mx.array]]:
    def run(registry: Registry) -> list[mx.array]:
        state = normal(0, (1, heads[1], width, width), mx.float32, 0.1)
        return [fold_rows(registry, _delta_rows(30, 4, heads, width, dtype), rows, state)]

    return run


# --------------------------------------------------------------------------- skinny_qmm
def skinny_qmm_cases() -> Iterator[Case]:
    """Every bit width and group size, outputs that fill no tile, and matrices of two dtypes."""
    for x_dtype, s_dtype, bits, group, row_counts in (
        (mx.bfloat16, mx.bfloat16, 4, 64, (1, 2, 3, 8)),
        (mx.bfloat16, mx.bfloat16, 8, 64, (1, 5)),
        (mx.float32, mx.bfloat16, 4, 64, (8,)),
        (mx.float32, mx.float32, 8, 32, (7,)),
        (mx.float16, mx.float16, 4, 128, (4,)),
    ):
        product = Product(512, 200, s_dtype, bits, group)
        for rows in row_counts:
            x = normal(3, (rows, product.width), x_dtype)
            yield Case(
                "skinny_qmm",
                f"{name(x_dtype)}, {bits}-bit {name(s_dtype)} groups of {group}, {rows} rows",
                partial(multiply, product, x),
                tolerance=1e-5 + 2 * rounding(x_dtype),
                same_bits=True,
                # Stock MLX accumulates in x's dtype on a CPU.
                wanted=partial(multiply, product, x.astype(mx.float32), Registry("reference")),
            )


@dataclass(frozen=True)
class Product:
    """A random matrix of affine codes."""

    width: int
    outs: int
    dtype: mx.Dtype
    bits: int
    group: int


def multiply(product: Product, x: mx.array, registry: Registry) -> list[mx.array]:
    """x @ W.T; by stock MLX in fp32 where x is fp32 and no device kernel runs."""
    rng = np.random.default_rng(product.bits)
    codes = rng.integers(0, 2**32, (product.outs, product.width * product.bits // 32), np.uint32)
    groups = (product.outs, product.width // product.group)
    scales = uniform(1, groups, 0.01, 0.02).astype(product.dtype)
    biases = uniform(2, groups, -0.2, 0.0).astype(product.dtype)
    if x.dtype == mx.float32 and registry.form == "reference":
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return [skinny_qmm(registry, x, mx.array(codes), scales, biases, product.bits, product.group)]
