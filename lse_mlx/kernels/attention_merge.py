"""What attention that is split over keys has in common: its second half, and what a thread holds."""

import mlx.core as mx

from lse_mlx.kernels.registry import Kernel, Registry

MOST_FLOATS = 32
"""Elements of queries, and as many of accumulators, that a thread holds at most (attention.h)."""

KERNEL = Kernel("attention_merge", ("accumulators", "stats", "scale"), ("out",))


def most_vectors(head_dim: int) -> int:
    """How many vectors (a query head of a row each) a SIMD group holds at most."""
    return MOST_FLOATS * 32 // head_dim


def part_shapes(
    partitions: int, vectors: int, head_dim: int
) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Shape and dtype of what the first half writes and `merge_partitions` reads.

    The second is never of fewer than eight elements, which would be another variant of the merge.
    """
    return [
        ((partitions, vectors, head_dim), mx.float32),
        ((max(8, 2 * partitions * vectors),), mx.float32),
    ]


def merge_partitions(
    registry: Registry, accumulators: mx.array, stats: mx.array, scale: float, dtype: mx.Dtype
) -> mx.array:
    """sum_p w_p accumulators_p / sum_p w_p sum_p with w_p = exp(scale * (max_p - max)), p ascending.

    accumulators: fp32 [partitions, vectors, D], head sizes that are a multiple of 32; stats: fp32
    [partitions, vectors, 2] of (largest dot product, sum), before the scale. A partition whose sum
    is 0 saw nothing and changes nothing, and a vector without any other is 0.
    Returns [vectors, D] in `dtype`. Only where device kernels run.
    """
    _, vectors, head_dim = accumulators.shape
    [out] = registry.launch(
        KERNEL,
        inputs=[accumulators, stats, scale],
        outputs=[((vectors, head_dim), dtype)],
        grid=(head_dim, vectors, 1),
        threadgroup=(head_dim, 1, 1),
        template={"T": dtype},
    )
    return out
