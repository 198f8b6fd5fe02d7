"""Causal attention of a pass's rows at the end of a cache, its keys read once for all rows."""

import mlx.core as mx

from lse_mlx.kernels.attention_merge import merge_partitions
from lse_mlx.kernels.choices import STOCK
from lse_mlx.kernels.registry import Kernel, Registry

FINE, FINE_KEYS, COARSE = 128, 2048, 512
"""Keys of a partition: FINE below key FINE_KEYS, COARSE from there on."""

KERNEL = Kernel(
    "verify_attention",
    ("queries", "keys", "values", "length", "scale"),
    ("accumulators", "stats"),
)
FORMS = ("split",)
PASS_ROWS = 8
"""The most rows of a verify pass; more are a piece of a prompt."""

_PIECE_ROWS = 64  # of a launch: bounds what partitions of a long prompt take
_SIMD_GROUPS = (8, 12)  # of a threadgroup: the fewest that hold the vectors of a tile
_MOST_FLOATS = 32  # of queries, and as many of accumulators, that a thread holds


def attention_form(registry: Registry, rows: int, heads: int, kv_heads: int, head_dim: int) -> str:
    """Which form serves such a pass: one of `FORMS`, or "stock"; counted if no kernel can.

    Longer passes than a verify pass are left to stock MLX, which is made for them, unless results
    must not depend on how rows are cut into passes.
    """
    if not (registry.on_device and _tile_rows(heads // kv_heads, head_dim)):
        registry.reference(KERNEL.name)
        return STOCK
    if rows > PASS_ROWS and not registry.choices.exact:
        return STOCK
    shape = f"{rows} rows, {heads}/{kv_heads} heads of {head_dim}"
    return registry.choices.form(KERNEL.name, shape, FORMS)


def verify_attention(
    registry: Registry,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    length: int,
    scale: float,
) -> mx.array:
    """softmax(scale q k^T) v, row i seeing keys 0..length - rows + i.

    queries: T [1, heads, rows, D], fp32, fp16 or bf16; head h reads key/value head h // (heads / kv)
    keys, values: T [1, kv, capacity, D], the whole buffers of a cache: what is not in use may hold
    anything, NaN too
    length: keys in use, the last `rows` of them those of the queries themselves
    Returns T [1, heads, rows, D]. In the own form a row's bits depend on nothing behind it.
    """
    _, heads, rows, head_dim = queries.shape
    form = attention_form(registry, rows, heads, keys.shape[1], head_dim)
    if form == STOCK:
        return stock_attention(queries, keys, values, length, scale)
    if rows <= _PIECE_ROWS:
        return _split_over_keys(registry, queries, keys, values, length, scale)
    pieces = []
    for first in range(0, rows, _PIECE_ROWS):
        piece = queries[:, :, first : first + _PIECE_ROWS]
        end = length - rows + first + piece.shape[2]
        pieces.append(_split_over_keys(registry, piece, keys, values, end, scale))
    return mx.concatenate(pieces, axis=2)


def stock_attention(
    queries: mx.array, keys: mx.array, values: mx.array, length: int, scale: float
) -> mx.array:
    """`verify_attention` in plain MLX, as mlx-lm calls it: the form without a kernel."""
    return mx.fast.scaled_dot_product_attention(
        queries,
        keys[:, :, :length],
        values[:, :, :length],
        scale=scale,
        mask="causal" if queries.shape[2] > 1 else None,
    )


def partition_count(length: int) -> int:
    """How many partitions `length` keys lie in."""
    return -(-min(length, FINE_KEYS) // FINE) + -(-max(0, length - FINE_KEYS) // COARSE)


def _most_vectors(head_dim: int) -> int:
    """How many vectors (a query head of a row each) a SIMD group holds."""
    return _MOST_FLOATS * 32 // head_dim


def _tile_rows(group: int, head_dim: int) -> int:
    """How many rows a threadgroup serves; 0 where the kernel does not."""
    if head_dim % 32 or head_dim > 256:
        return 0
    return min(PASS_ROWS, _SIMD_GROUPS[-1] * _most_vectors(head_dim) // group)


def _split_over_keys(
    registry: Registry,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    length: int,
    scale: float,
) -> mx.array:
    _, heads, rows, head_dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    tile = _tile_rows(group, head_dim)
    held = min(rows, tile) * group
    most = _most_vectors(head_dim)
    simd_groups = next(n for n in _SIMD_GROUPS if held <= n * most)
    partitions, vectors = partition_count(length), heads * rows
    accumulators, stats = registry.launch(
        KERNEL,
        inputs=[queries, keys, values, length, scale],
        outputs=[
            ((partitions, vectors, head_dim), mx.float32),
            # Never fewer than eight elements, which would be another variant of the merge.
            ((max(8, 2 * partitions * vectors),), mx.float32),
        ],
        grid=(32 * simd_groups, partitions, kv_heads * -(-rows // tile)),
        threadgroup=(32 * simd_groups, 1, 1),
        template={
            "T": queries.dtype,
            "D": head_dim,
            "G": group,
            "R": tile,
            "S": simd_groups,
            "C": -(-held // simd_groups),
            "FINE": FINE,
            "FINE_KEYS": FINE_KEYS,
            "COARSE": COARSE,
        },
    )
    merged = merge_partitions(registry, accumulators, stats, scale, queries.dtype)
    return merged.reshape(1, heads, rows, head_dim)
