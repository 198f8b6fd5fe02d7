"""What each kernel is asked when its text has a defect: small calls, and what they ought to give."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import mlx.core as mx
import numpy as np

from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.dynamic_conv import dynamic_conv
from lse_mlx.kernels.gated_delta_verify import fold_rows, gated_delta_verify
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.selector import select
from lse_mlx.kernels.skinny_qmm import skinny_qmm
from lse_mlx.kernels.sliding_attention import sliding_attention
from lse_mlx.kernels.topk import topk
from lse_mlx.kernels.verify_attention import verify_attention
from lse_mlx.selftest.definitions import best
from tests.kernels.affine import Codes
from tests.kernels.attention_in_float64 import as_float64, causal, random_window
from tests.kernels.delta_rows import Heads, random_rows
from tests.kernels.mutations import Check
from tests.kernels.sorted_rows import Rows, edges, planted
from tests.kernels.variants import LastForm

Run = Callable[[Registry], Sequence[mx.array]]


def checks_of(kernel: str) -> list[Check]:
    """The checks of the kernel `kernel`, in metal_kernels/<kernel>.metal."""
    if kernel not in _CHECKS:
        raise LookupError(
            f"The kernel {kernel} has no check that its mutants could fail: add small calls of it to "
            "_CHECKS in tests/kernels/mutation_checks.py."
        )
    return _CHECKS[kernel]()


def by_reference(run: Run, tolerance: float) -> Check:
    """The arrays of `run` against what plain MLX gives for the same call."""
    wanted = cache(lambda: list(run(Registry("reference"))))
    return Check(run, wanted, tolerance)


def normal(seed: int, *shape: int) -> mx.array:
    """Seeded normal numbers, fp32."""
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


# ---- top-k


def top_k() -> list[Check]:
    """Rows with everything that is hard to order; one chunk, one merge, two merges."""
    few_columns = np.array([[3, np.nan, -np.inf, 3, np.inf, 0, -0.0]], np.float32)
    return [
        _best(planted(2, 1100, 0), 16),
        _best(few_columns, 3),
        _best(planted(1, 512 * 17 + 5, 1), 32),
        _best(edges(), 16),
        _best(planted(2, 700, 2), 16, mx.bfloat16),
        _best(np.full((1, 600), -np.inf, np.float32), 1),
        _best(_neighbours(), 32),
        _best(_all_in_one_chunk(), 16),
        _best(_one_a_chunk(), 8),
        _best(np.arange(700, dtype=np.float32)[None], 3),
    ]


def _neighbours() -> Rows:
    """31 and 32 neighbouring columns above all others, which the bound must not leave out.

    And one more, in the row behind and so next in memory to the row before.
    """
    rows = -np.arange(800, dtype=np.float32) * np.ones((2, 1), np.float32)
    rows[0, 2:33] = 10
    rows[1, 256:288] = 10 + np.arange(32)
    rows[1, 0] = 100
    return rows


def _all_in_one_chunk() -> Rows:
    """The best are in the first of six chunks, and all other columns are alike."""
    row = np.ones((1, 6 * 512), np.float32)
    row[0, :16] = 100 - np.arange(16)
    return row


def _one_a_chunk() -> Rows:
    """One good column in each of seven chunks, where eight are asked for."""
    row = -np.arange(39 * 512, dtype=np.float32)[None] - 1
    row[0, 32 * 512 :: 512] = 10
    return row


def _best(logits: Rows, k: int, dtype: mx.Dtype = mx.float32) -> Check:
    given = mx.array(logits).astype(dtype)
    stored = np.array(given.astype(mx.float32))
    return Check(lambda registry: topk(registry, given, k), cache(lambda: best(stored, k)))


# ---- selector

VOCAB = 500


def selector() -> list[Check]:
    """A random block, and blocks whose path is known beforehand."""
    makes = (_random_block, _ordered_block, _block_outside, _block_of_ties, _infinite_block)
    return [by_reference(partial(_select, make), 1e-4) for make in makes]


Block = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Logits and ids [positions, k], and how much the gates of each position weigh."""


def _random_block(rng: np.random.Generator) -> Block:
    ids = rng.permutation(3 * 16).reshape(3, 16)
    return rng.standard_normal((3, 16)), ids, np.ones(3)


def _ordered_block(rng: np.random.Generator) -> Block:
    """As top-k gives it, the first one best, but at position 1: all depends on what was before it.

    Before it comes token 0, from another place than the first; the winner of 2 stands before a
    candidate that is no token, and that of 3 before a smaller one.
    """
    ids = rng.permutation(np.arange(1, 33)).reshape(4, 8)
    logits = -5.0 * np.arange(8) * np.ones((4, 1))
    logits[0, 5], ids[0, 5], logits[1] = 9, 0, 0
    ids[2, 1], ids[3, :2] = -1, (40, 39)
    return logits, ids, np.array([0.01, 1.0, 0.01, 0.01])


def _block_outside(rng: np.random.Generator) -> Block:
    """One token just outside of the vocabulary, and one just inside; neither is chosen."""
    logits, ids, weights = _ordered_block(rng)
    ids[2, 1], ids[2, 5], ids[3, 5] = 50, VOCAB, VOCAB - 1
    return logits, ids, weights


def _block_of_ties(rng: np.random.Generator) -> Block:
    """The best twice with one token, and three times with tokens up and down."""
    logits, ids, weights = _ordered_block(rng)
    logits[0, 4:6], ids[0, 4:6] = 11, 3
    logits[2, 2:5], ids[2, 2:5] = 7, (13, 11, 12)
    logits[3, 5:], ids[3, 5:] = 7, (60, 62, 61)
    weights[[0, 2, 3]] = 0
    return logits, ids, weights


def _infinite_block(rng: np.random.Generator) -> Block:
    logits, ids, weights = _ordered_block(rng)
    logits[1, 3], logits[3, 0] = np.inf, np.nan
    ids[2] = VOCAB
    return logits, ids, weights


def _select(make: Callable[[np.random.Generator], Block], registry: Registry) -> list[mx.array]:
    logits, ids, weights = make(np.random.default_rng(5))
    positions, k = ids.shape
    rank = 70 if k == 16 else 64
    gates = np.array(normal(6, positions, rank)) * weights[:, None]
    selection = select(
        registry,
        mx.array(logits.astype(np.float32)),
        mx.array(ids.astype(np.int32)),
        normal(7, positions, k, rank),
        mx.array(gates.astype(np.float32)),
        normal(8, positions, k, rank),
        VOCAB,
    )
    return [selection.scores, selection.path]


# ---- dynamic_conv


def convolution() -> list[Check]:
    """Fewer and more channels than threads, both sides, one row."""
    shapes = ((3, 20, 16, 1), (2, 6, 16, 0), (1, 3, 8, 1))
    return [by_reference(partial(_convolve, *shape), 1e-5) for shape in shapes]


def _convolve(
    rows: int, groups: int, channels: int, side: int, registry: Registry
) -> list[mx.array]:
    x, base = normal(1, rows, groups * channels), normal(2, 2, 2, groups, channels)
    dynamic = normal(3, rows, 4 * groups)
    return [dynamic_conv(registry, x, base, dynamic, side)]


# ---- attention


def ring_attention() -> list[Check]:
    """A ring that has wrapped, one with empty slots, a window that cuts, several partitions.

    Once with scores so large that a softmax overflows that does not subtract the largest.
    """
    return [
        _slide(rows=8, group=3, head_dim=32, live=20, position=30, window=17, slots=24),
        _slide(rows=3, group=2, head_dim=64, live=30, position=50, window=34, slots=40, size=30),
        _slide(rows=5, group=4, head_dim=32, live=280, position=300, window=286, slots=290),
        _slide(rows=1, group=1, head_dim=128, live=7, position=7, window=16, slots=16),
    ]


def _slide(*, group: int, size: float = 1, **shape: int) -> Check:
    block = random_window(1, heads=2 * group, kv_heads=2, **shape)
    block = replace(block, queries=(size * block.queries).astype(np.float32).astype(np.float64))

    def run(registry: Registry) -> list[mx.array]:
        return [sliding_attention(registry, *block.arrays(), block.view())]

    return Check(run, cache(lambda: [block.expected()]), 2e-5 * size)


def cache_attention() -> list[Check]:
    """Rows of a verify pass, more than a tile of rows, head sizes, partitions of both sizes.

    What lies behind the keys in use is NaN. Once the last row's own value is, too, which no other
    row may see; and once scores are large, as above.
    """
    return [
        _verify(rows=5, heads=4, kv_heads=2, head_dim=32, length=40),
        _verify(rows=8, heads=6, kv_heads=1, head_dim=256, length=21, last=np.nan),
        _verify(rows=11, heads=2, kv_heads=1, head_dim=64, length=140, size=30),
        _verify(rows=1, heads=2, kv_heads=2, head_dim=128, length=33, free=0),
        _verify(rows=1, heads=1, kv_heads=1, head_dim=32, length=2200),
    ]


def _verify(
    *,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    length: int,
    free: int = 9,
    size: float = 1,
    last: float = 0.0,
) -> Check:
    queries = size * normal(2, heads, rows, head_dim)
    buffers = np.array(normal(1, 2, kv_heads, length + free, head_dim))
    buffers[1, :, length - 1] += last
    keys, values = (as_float64(mx.array(b)) for b in buffers[:, :, :length])
    buffers[:, :, length:] = np.nan

    def run(registry: Registry) -> list[mx.array]:
        registry.choices = Choices(mode="own", exact=True)  # for more rows than a verify pass has
        all_keys, all_values = (mx.array(b)[None] for b in buffers)
        scale = head_dim**-0.5
        return [verify_attention(registry, queries[None], all_keys, all_values, length, scale)[0]]

    def wanted() -> list[np.ndarray]:
        return [causal(as_float64(queries), keys, values, length)]

    return Check(run, cache(wanted), 2e-5 * size)


# ---- gated delta


def gated_delta() -> list[Check]:
    """Nothing pending and some, new rows and none, both states that may be kept."""
    return [
        by_reference(partial(_delta, *shape), 2e-5)
        for shape in ((0, 3, True), (2, 3, False), (3, 1, True), (2, 0, False))
    ]


def _delta(n_pending: int, n_rows: int, whole: bool, registry: Registry) -> list[mx.array]:
    heads = Heads(hk=4, hv=8, dk=64, dv=8)
    pending, state = random_rows(4, heads, seed=1)
    if n_rows == 0:
        return [fold_rows(registry, pending, n_pending, state)]
    new, _ = random_rows(n_rows, heads, seed=2)
    y, kept = gated_delta_verify(registry, new, pending, n_pending, state, whole)
    return [y, kept]


# ---- products


def products(choices: Callable[[], Choices]) -> list[Check]:
    """Outputs that fill no tile, K that ends inside a run, more rows than a tile has."""
    return [
        _product(choices, *shape)
        for shape in (
            (3, 37, 320, 4, 64),  # rows, out, in, bits, group
            (8, 70, 256, 8, 32),
            (11, 130, 192, 4, 64),
        )
    ]


def _product(
    choices: Callable[[], Choices], rows: int, out: int, width: int, bits: int, group: int
) -> Check:
    codes = Codes.random(out, width, bits, group)
    x = normal(4, rows, width)

    def run(registry: Registry) -> list[mx.array]:
        registry.choices = choices()
        return [skinny_qmm(registry, x, codes.weight, codes.scales, codes.biases, bits, group)]

    return Check(run, cache(lambda: [np.array(x).astype(np.float64) @ codes.dense().T]), 1e-5)


def _simd_in_tiles() -> Choices:
    return Choices(exact=True)


def _matrix_in_tiles() -> Choices:
    return LastForm(exact=True)


_CHECKS: dict[str, Callable[[], list[Check]]] = {
    "attention_merge": lambda: [*ring_attention()[2:], *cache_attention()[2:]],
    "dynamic_conv": convolution,
    "gated_delta_verify": gated_delta,
    "selector": selector,
    "skinny_qmm": partial(products, _simd_in_tiles),
    "skinny_qmm_matrix": partial(products, _matrix_in_tiles),
    "sliding_attention": ring_attention,
    "topk_chunk": top_k,
    "topk_merge": top_k,
    "verify_attention": cache_attention,
}
