"""What races on a device: operations of the project at the shapes of a loaded model."""

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from lse_mlx.kernels.race import Contest
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.skinny_qmm import MAX_ROWS, QuantizedProduct, has_form, own_forms, shape_name
from lse_mlx.kernels.skinny_qmm import NAME as PRODUCT
from lse_mlx.kernels.topk import topk
from lse_mlx.kernels.verify_attention import FORMS, PASS_ROWS, verify_attention

WEIGHTS = 4
"""How many weights or caches of one shape a chain goes through."""

TOPK_CALLS = 3
CACHE_ROWS, CACHE_LENGTH = 2304, 2048
"""Of the attention that races: a cache of a few thousand tokens, as in a conversation."""


def product_contests(products: Sequence[QuantizedProduct], dtype: mx.Dtype) -> Iterator[Contest]:
    """Products of 1 to 8 rows, for each shape of which there is a matrix in `products`."""
    by_shape: dict[tuple[int, int, int], list[QuantizedProduct]] = {}
    for product in products:
        key = (product.in_width, product.out_width, product.bits)
        by_shape.setdefault(key, []).append(product)
    for (in_width, out_width, bits), alike in by_shape.items():
        first = alike[0]
        start = _random((MAX_ROWS, in_width), dtype)
        if not has_form(start, first.scales, first.biases, bits, first.group_size):
            continue
        for rows in range(1, MAX_ROWS + 1):
            yield Contest(
                operation=PRODUCT,
                shape=shape_name(rows, in_width, out_width, bits),
                own=own_forms(first.registry),
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
        return lambda queries: verify_attention(
            registry, queries, keys, values, CACHE_LENGTH, scale
        )

    queries = _random((1, heads, PASS_ROWS, head_dim), dtype)
    for rows in range(1, PASS_ROWS + 1):
        start = mx.contiguous(queries[:, :, :rows])
        mx.eval(start)
        yield Contest(
            operation="verify_attention",
            shape=f"{rows} rows, {heads}/{kv_heads} heads of {head_dim}",
            own=FORMS,
            start=start,
            steps=[step(keys, values) for keys, values in caches],
            tolerance=_tolerance(dtype),
        )


def topk_contest(registry: Registry, rows: int, width: int, k: int) -> Contest:
    """The `k` best of `rows` rows; values and ids must be stock's exactly."""

    def step(logits: mx.array) -> mx.array:
        values, ids = topk(registry, logits, k)
        return mx.concatenate([values, ids.astype(mx.float32)])

    start = _random((rows, width), mx.float32)
    return Contest("topk", f"{rows}x{width}, {k}", ("chunks",), start, [step] * TOPK_CALLS, 0.0)


def _tolerance(dtype: mx.Dtype) -> float:
    """Relative to the largest value: two roundings of 16-bit floats, or another order of fp32."""
    return 1e-3 if dtype == mx.float32 else 2e-2


def _random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    x = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
    mx.eval(x)
    return x
