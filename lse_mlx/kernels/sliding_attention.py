"""Attention of a drafted block over the ring of committed rows and over the block itself.

What a query sees goes by absolute position, never by slot. The ring is read where it lies, in one
array that nothing else is joined to.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.kernels.attention_merge import merge_partitions, most_vectors, part_shapes
from lse_mlx.kernels.registry import Kernel, Registry

PARTITION = 256
"""Keys that one threadgroup folds; the partitions of a head are merged afterwards."""

MAX_ROWS = 8
"""The most rows of a block; what each query sees is worked out for so many."""

KERNEL = Kernel(
    "sliding_attention",
    ("queries", "ring", "block", "position", "live", "window", "slots", "scale"),
    ("accumulators", "stats"),
)
_SIMD_GROUPS = 8


@dataclass(frozen=True)
class RingView:
    """What a block at `position` may see of a ring.

    position: absolute position of the block's first row, one after the last committed row
    live:     how many committed rows before it are held
    window:   a committed row at s is seen by query i where position + i - s < window
    slots:    the row at s lies in slot s mod slots
    block:    rows of the block, all of which see all of them
    """

    position: int
    live: int
    window: int
    slots: int
    block: int

    @cached_property
    def slot_positions(self) -> NDArray[np.int64]:
        """The absolute position in each slot, int64 [slots]; -1 where none is live."""
        last = self.position - 1
        held = last - (last - np.arange(self.slots)) % self.slots
        return np.where(held >= self.position - self.live, held, -1)

    @cached_property
    def seen(self) -> NDArray[np.bool_]:
        """Which slot each query sees, bool [block, slots]."""
        held = self.slot_positions
        queries = self.position + np.arange(self.block)
        return (held >= 0) & (queries[:, None] - held < self.window)

    @cached_property
    def seen_with_block(self) -> NDArray[np.bool_]:
        """`seen`, and behind it the block's own rows, which all see: bool [block, slots + block]."""
        return np.pad(self.seen, [(0, 0), (0, self.block)], constant_values=True)


def sliding_attention(
    registry: Registry, queries: mx.array, ring: mx.array, block: mx.array, view: RingView
) -> mx.array:
    """softmax(q k^T / sqrt(head_dim)) v over what each query sees of the ring, and over the block.

    queries: fp32 [rows, query heads, head_dim]; head h reads key/value head h // (heads / kv)
    ring:    fp32 [2, kv heads, capacity, head_dim], keys and values; a slot where no row is live
             may hold anything, NaN too
    block:   fp32 [2, kv heads, rows, head_dim], keys and values of the rows themselves
    Returns fp32 [rows, query heads * head_dim]. Source: DFlash2, draft pass.
    """
    rows, heads, head_dim = queries.shape
    fits = head_dim % 32 == 0 and rows <= MAX_ROWS
    fits = fits and _vectors(queries, ring) <= most_vectors(head_dim)

    def launch() -> mx.array:
        scale = head_dim**-0.5
        accumulators, stats = _launch(registry, queries, ring, block, view, scale)
        merged = merge_partitions(registry, accumulators, stats, scale, mx.float32)
        return merged.reshape(rows, heads * head_dim)

    return registry.serve(
        KERNEL.name,
        fits,
        launch,
        lambda: sliding_attention_reference(queries, ring, block, view),
    )


def sliding_attention_reference(
    queries: mx.array, ring: mx.array, block: mx.array, view: RingView
) -> mx.array:
    """`sliding_attention` in plain MLX, for any head size and any number of rows."""
    rows, heads, head_dim = queries.shape
    kv_heads = ring.shape[1]
    keys, values = ring[0, :, : view.slots], ring[1, :, : view.slots]
    # [kv, group * rows, D]: query heads of one key/value head become rows of one product.
    grouped = queries.transpose(1, 0, 2).reshape(kv_heads, -1, head_dim) * head_dim**-0.5
    by_slot: Any = view.seen  # which MLX takes, though its stub knows no NumPy array of bool
    seen = mx.array(by_slot)
    in_ring = grouped @ keys.swapaxes(1, 2)
    in_ring = mx.where(mx.tile(seen, (heads // kv_heads, 1)), in_ring, -mx.inf)
    scores = mx.concatenate([in_ring, grouped @ block[0].swapaxes(1, 2)], axis=-1)
    weights = mx.softmax(scores, axis=-1)
    # What nobody sees may be NaN, which a weight of zero would not stop.
    values = mx.where(mx.any(seen, axis=0)[:, None], values, 0)
    mixed = weights[..., : view.slots] @ values + weights[..., view.slots :] @ block[1]
    return mixed.reshape(heads, rows, head_dim).transpose(1, 0, 2).reshape(rows, -1)


def _vectors(queries: mx.array, ring: mx.array) -> int:
    """How many vectors (a query head of a row each) a SIMD group gets."""
    rows, heads, _ = queries.shape
    return -(-rows * (heads // ring.shape[1]) // _SIMD_GROUPS)


def _launch(
    registry: Registry,
    queries: mx.array,
    ring: mx.array,
    block: mx.array,
    view: RingView,
    scale: float,
) -> list[mx.array]:
    """The partitions: accumulators and stats, see attention_merge."""
    rows, heads, head_dim = queries.shape
    kv_heads = ring.shape[1]
    partitions = -(-(view.live + rows) // PARTITION)
    return registry.launch(
        KERNEL,
        inputs=[
            queries,
            ring,
            block,
            view.position,
            view.live,
            view.window,
            view.slots,
            scale,
        ],
        outputs=part_shapes(partitions, rows * heads, head_dim),
        grid=(32 * _SIMD_GROUPS, partitions, kv_heads),
        threadgroup=(32 * _SIMD_GROUPS, 1, 1),
        template={
            "D": head_dim,
            "G": heads // kv_heads,
            "C": _vectors(queries, ring),
            "PARTITION": PARTITION,
        },
    )
