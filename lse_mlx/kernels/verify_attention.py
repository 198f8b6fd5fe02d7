"""Causal attention of a pass's rows at the end of a cache, its keys read once for all rows."""

import mlx.core as mx

from lse_mlx.errors import KernelError
from lse_mlx.kernels.attention_merge import merge_partitions, most_vectors, part_shapes
from lse_mlx.kernels.choices import STOCK, dtype_name
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

MOST_ROWS, MOST_BYTES = 64, 64 * 2**20
"""Of a launch: rows, and bytes of partitions where it has more rows than a verify pass."""

_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_SIMD_GROUPS = (8, 12)  # of a threadgroup: the fewest that hold the vectors of a tile


def shape_name(rows: int, heads: int, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> str:
    """What `Choices` calls such a pass; dtype: of queries, keys and values."""
    return f"{rows} rows, {heads}/{kv_heads} heads of {head_dim}, {dtype_name(dtype)}"


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

    Longer passes than a verify pass are left to stock MLX, which is made for them, unless results
    must not depend on how rows are cut into passes. Where they must not and a device has no own
    form, nothing stands in for it: raises KernelError.
    """
    exact = registry.on_device and registry.choices.exact
    fits = _fits(queries, keys, values)
    if exact and not fits:
        raise _no_exact_form(queries, keys)
    if registry.on_device and fits and _form(registry, queries, keys) == STOCK:
        return stock_attention(queries, keys, values, length, scale)

    def own() -> mx.array:
        return _split_over_keys(registry, queries, keys, values, length, scale)

    if exact:
        return own()
    return registry.serve(
        KERNEL.name, fits, own, lambda: stock_attention(queries, keys, values, length, scale)
    )


def stock_attention(
    queries: mx.array, keys: mx.array, values: mx.array, length: int, scale: float
) -> mx.array:
    """`verify_attention` in plain MLX, as mlx-lm's layers call it: stock, and the reference."""
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


def launch_rows(length: int, heads: int, head_dim: int) -> int:
    """How many rows of a long pass are one launch: as many whole passes as `MOST_BYTES` hold.

    A row's partitions are fp32 [partitions, heads, head_dim]: 12.9 MB of 24 heads of 256 behind
    262,144 keys.
    """
    bytes_of_row = 4 * partition_count(length) * heads * head_dim
    most = min(MOST_ROWS, MOST_BYTES // bytes_of_row)
    return max(1, most // PASS_ROWS) * PASS_ROWS


def _tile_rows(group: int, head_dim: int) -> int:
    """How many rows a threadgroup serves; 0 where the kernel does not."""
    if head_dim % 32 or head_dim > 256:
        return 0
    return min(PASS_ROWS, _SIMD_GROUPS[-1] * most_vectors(head_dim) // group)


def _fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernel takes these shapes and dtypes."""
    _, heads, _, head_dim = queries.shape
    alike = queries.dtype == keys.dtype == values.dtype
    return alike and queries.dtype in _DTYPES and _tile_rows(heads // keys.shape[1], head_dim) > 0


def _form(registry: Registry, queries: mx.array, keys: mx.array) -> str:
    """Which of the forms serves where both could: one of `FORMS`, or "stock"."""
    _, heads, rows, head_dim = queries.shape
    if rows > PASS_ROWS and not registry.choices.exact:
        return STOCK
    shape = shape_name(rows, heads, keys.shape[1], head_dim, queries.dtype)
    return registry.choices.form(KERNEL.name, shape, FORMS)


def _no_exact_form(queries: mx.array, keys: mx.array) -> KernelError:
    _, heads, rows, head_dim = queries.shape
    shape = shape_name(rows, heads, keys.shape[1], head_dim, queries.dtype)
    return KernelError(
        f"Exact decoding has no attention for {shape} on this device: leave it out, or use another "
        "checkpoint."
    )


def _split_over_keys(
    registry: Registry,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    length: int,
    scale: float,
) -> mx.array:
    """The own form, a long pass in several launches."""
    _, heads, rows, head_dim = queries.shape
    step = launch_rows(length, heads, head_dim)
    if rows <= step:
        return _launch(registry, queries, keys, values, length, scale)
    pieces = []
    for first in range(0, rows, step):
        piece = queries[:, :, first : first + step]
        end = length - rows + first + piece.shape[2]
        pieces.append(_launch(registry, piece, keys, values, end, scale))
    return mx.concatenate(pieces, axis=2)


def _launch(
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
    simd_groups = next(n for n in _SIMD_GROUPS if held <= n * most_vectors(head_dim))
    partitions = partition_count(length)
    accumulators, stats = registry.launch(
        KERNEL,
        inputs=[queries, keys, values, length, scale],
        outputs=part_shapes(partitions, heads * rows, head_dim),
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
