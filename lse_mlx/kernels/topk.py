"""The k best of each row of logits, in an order that depends on nothing but the logits.

NaN comes first, so that it is seen and refused; then values descending, +inf first and -inf last.
What is equal, all NaN among themselves and both zeros, comes by the smaller column.
"""

import math

import mlx.core as mx

from lse_mlx.kernels.choices import STOCK, dtype_name
from lse_mlx.kernels.registry import Kernel, Registry

CHUNK = 512
"""Candidates of one threadgroup: columns at first, then pairs of what was left."""

MAX_K = 32
"""The kernels keep a list in the lanes of one SIMD-group."""

NO_ID = 16_777_215
"""The id of a place that no column filled, beside -inf. The kernels take rows up to this width."""

CHUNKS = Kernel("topk_chunk", ("logits",), ("values", "ids"))
MERGE = Kernel("topk_merge", ("values", "ids"), ("best_values", "best_ids"))
FORMS = ("chunks",)
_THREADS = 256


def topk(registry: Registry, logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The `k` best columns of each row, best first.

    logits: fp32 or bf16 [rows, width]. Returns their values as stored (bf16 widened), fp32
    [rows, k], and the columns, int32 [rows, k]. Raises ValueError for a `k` outside 1..width.
    """
    width = logits.shape[1]
    if not 1 <= k <= width:
        raise ValueError(f"The {k} best of {width} columns were asked for: ask for 1 to {width}.")
    served = k <= MAX_K and width <= NO_ID and logits.dtype in (mx.float32, mx.bfloat16)
    if (
        registry.on_device
        and served
        and registry.choices.form("topk", shape_name(logits, k), (*FORMS, STOCK)) == STOCK
    ):
        return topk_reference(logits, k)
    return registry.serve(
        "topk", served, lambda: _by_chunks(registry, logits, k), lambda: topk_reference(logits, k)
    )


def shape_name(logits: mx.array, k: int) -> str:
    """What tells a call from others in `Choices`."""
    rows, width = logits.shape
    return f"{rows}x{width} {dtype_name(logits.dtype)}, {k}"


def stage_chunks(width: int, k: int) -> tuple[int, ...]:
    """How many threadgroups a row takes at each stage; the last stage has one.

    The first stage is topk_chunk on 512 columns each, the others topk_merge, on as many lists of
    `k` as fit into 512 pairs. 248,320 columns at k = 16 take 485, 16 and 1.
    """
    stages = [-(-width // CHUNK)]
    while stages[-1] > 1:
        stages.append(-(-stages[-1] // (CHUNK // k)))
    return tuple(stages)


def topk_reference(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """`topk` in plain MLX, for any k and width.

    Two stages instead of one sort of the row: the k best columns lie in the k chunks with the best
    maxima, because each better chunk holds one better column (lower chunks hold lower columns, so
    ties agree). A maximum of MLX is NaN where anything is. A device that flushes subnormal numbers
    may order those among zeros.
    """
    rows, width = logits.shape
    chunk = 1 << max(0, math.ceil(math.log2(width / k) / 2))
    if width % chunk:
        logits = mx.pad(logits, [(0, 0), (0, -width % chunk)], constant_values=-mx.inf)
    chunks = logits.reshape(rows, -1, chunk)
    best_chunks = _first(chunks.max(axis=-1), k)
    # Back to ascending order, so that a smaller place below is a smaller column.
    best_chunks = mx.sort(best_chunks, axis=-1)
    finalists = mx.take_along_axis(chunks, best_chunks[:, :, None], axis=1).reshape(rows, -1)
    places = _first(finalists, k)
    values = mx.take_along_axis(finalists, places, axis=1).astype(mx.float32)
    return values, mx.take_along_axis(best_chunks, places // chunk, axis=1) * chunk + places % chunk


def _first(values: mx.array, k: int) -> mx.array:
    """The places (int32 [rows, k]) of the k first values in the order.

    MLX's sort is ascending and stable, and NaN comes last. So each row is sorted from its end, and
    the sorted row read from its end: NaN comes first, and of equal values the one at the smaller
    place.
    """
    order = mx.argsort(values[:, ::-1], axis=-1)[:, : -k - 1 : -1]
    return values.shape[1] - 1 - order.astype(mx.int32)


def _by_chunks(registry: Registry, logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    rows, width = logits.shape
    first, *merges = stage_chunks(width, k)
    values, ids = registry.launch(
        CHUNKS,
        inputs=[logits],
        outputs=[((rows, first * k), mx.float32), ((rows, first * k), mx.int32)],
        grid=(first * _THREADS, rows, 1),
        threadgroup=(_THREADS, 1, 1),
        template={"T": logits.dtype, "K": k},
    )
    for lists in merges:
        values, ids = registry.launch(
            MERGE,
            inputs=[values, ids],
            outputs=[((rows, lists * k), mx.float32), ((rows, lists * k), mx.int32)],
            grid=(lists * _THREADS, rows, 1),
            threadgroup=(_THREADS, 1, 1),
            template={"K": k},
        )
    return values, ids
