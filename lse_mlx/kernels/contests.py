"""What races on a device: operations of the project at the shapes of a loaded model."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import mlx.core as mx

from lse_mlx.kernels import topk, verify_attention
from lse_mlx.kernels.race import Contest
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.skinny_qmm import MAX_ROWS, QuantizedProduct, own_forms
from lse_mlx.kernels.skinny_qmm import NAME as PRODUCT

WEIGHTS = 4
"""How many weights or caches of one shape a chain goes through."""

PRODUCT_ROWS = range(1, MAX_ROWS + 1)
TOPK_CALLS = 3
CACHE_ROWS, CACHE_LENGTH = 2304, 2048
"""Of the attention that races: a cache of a few thousand tokens, as in a conversation."""


def product_contests(
    products: Iterable[QuantizedProduct], dtype: mx.Dtype, row_counts: Sequence[int] = PRODUCT_ROWS
) -> Iterator[Contest]:
    """Products of so many rows of `dtype`, for each kind of which there is a matrix."""
    kinds: dict[str, list[QuantizedProduct]] = {}
    for product in products:
        if product.has_form(dtype):
            kinds.setdefault(product.shape_name(1, dtype), []).append(product)
    for alike in kinds.values():
        start = _random((max(row_counts), alike[0].in_width), dtype)
        for rows in row_counts:
            yield Contest(
                operation=PRODUCT,
                shape=alike[0].shape_name(rows, dtype),
                own=own_forms(alike[0].registry),
                start=start[:rows],
                steps=alike[:WEIGHTS],
                tolerance=_tolerance(dtype),
            )


def attention_contests(
    registry: Registry, heads: int, kv_heads: int, head_dim: int, dtype: mx.Dtype
) -> Iterator[Contest]:
    """Attention of 1 to 8 rows at the end of a long cache."""
    shape = (1, kv_heads, CACHE_ROWS, head_dim)
    caches = [
        (_random(shape, dtype, 2 * n + 1), _random(shape, dtype, 2 * n + 2)) for n in range(WEIGHTS)
    ]
    scale = head_dim**-0.5

    def step(keys: mx.array, values: mx.array) -> Callable[[mx.array], mx.array]:
        return lambda queries: verify_attention.verify_attention(
            registry, queries, keys, values, CACHE_LENGTH, scale
        )

    queries = _random((1, heads, verify_attention.PASS_ROWS, head_dim), dtype)
    for rows in range(1, verify_attention.PASS_ROWS + 1):
        start = mx.contiguous(queries[:, :, :rows])
        mx.eval(start)
        yield Contest(
            operation=verify_attention.KERNEL.name,
            shape=verify_attention.shape_name(rows, heads, kv_heads, head_dim, dtype),
            own=verify_attention.FORMS,
            start=start,
            steps=[step(keys, values) for keys, values in caches],
            tolerance=_tolerance(dtype),
        )


def topk_contest(registry: Registry, rows: int, width: int, k: int) -> Contest:
    """The `k` best of `rows` rows; values and ids must be stock's exactly."""

    def step(logits: mx.array) -> mx.array:
        values, ids = topk.topk(registry, logits, k)
        return mx.concatenate([values, ids.astype(mx.float32)])

    start = _random((rows, width), mx.float32)
    shape = topk.shape_name(start, k)
    steps = [step] * TOPK_CALLS
    return Contest("topk", shape, topk.FORMS, start, steps, 0.0, stock_is_exact=True)


def _tolerance(dtype: mx.Dtype) -> float:
    """Relative to the largest value: two roundings of 16-bit floats, or another order of fp32."""
    return 1e-3 if dtype == mx.float32 else 2e-2


def _random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    x = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
    mx.eval(x)
    return x
