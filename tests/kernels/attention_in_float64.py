"""Rows to attend to and what comes of them in float64, in arrays that hold NaN elsewhere."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.kernels.sliding_attention import RingView
from lse_mlx.selftest.definitions import attention

Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """A block's queries behind committed rows, rows by age and by position, never by slot.

    queries: [rows, heads, D]; keys, values: [kv, live + rows, D], oldest first, the block's own last
    """

    queries: Rows
    keys: Rows
    values: Rows
    position: int
    window: int
    slots: int

    @property
    def rows(self) -> int:
        return len(self.queries)

    @property
    def live(self) -> int:
        return self.keys.shape[1] - self.rows

    def view(self) -> RingView:
        """What the project's own functions are told of it."""
        return RingView(self.position, self.live, self.window, self.slots, self.rows)

    def expected(self) -> Rows:
        """[rows, heads * D], by the definition."""
        rows = self.rows
        at = self.position + np.arange(rows)
        committed = np.arange(self.position - self.live, self.position)
        in_window = at[:, None] - committed < self.window
        seen = np.concatenate([in_window, np.ones((rows, rows), bool)], axis=1)
        return attention(self.queries, self.keys, self.values, seen).reshape(rows, -1)

    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, ring and block, fp32. What is not live is NaN, the slots behind the ring too."""
        kv_heads, _, head_dim = self.keys.shape
        ring = np.full((2, kv_heads, self.slots + self.rows, head_dim), np.nan, np.float32)
        both = np.stack([self.keys, self.values])
        for age in range(self.live):
            ring[:, :, (self.position - self.live + age) % self.slots] = both[:, :, age]
        block = both[:, :, self.live :]
        return as_mx(self.queries), mx.array(ring), as_mx(block)


def random_window(
    seed: int,
    *,
    rows: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    live: int,
    position: int,
    window: int,
    slots: int,
) -> Window:
    """Queries and keys that prefer some keys by far, fp32 values."""
    rng = np.random.default_rng([seed, live, position])

    def draw(*shape: int) -> Rows:
        return rng.standard_normal(shape).astype(np.float32).astype(np.float64)

    return Window(
        2 * draw(rows, heads, head_dim),
        draw(kv_heads, live + rows, head_dim),
        draw(kv_heads, live + rows, head_dim),
        position,
        window,
        slots,
    )


def causal(
    queries: Rows, keys: Rows, values: Rows, length: int, scale: float | None = None
) -> Rows:
    """[heads, rows, D]: row i sees keys 0..length - rows + i. Shapes without the batch of one."""
    rows = queries.shape[1]
    seen = np.arange(keys.shape[1]) <= length - rows + np.arange(rows)[:, None]
    return attention(queries.swapaxes(0, 1), keys, values, seen, scale).swapaxes(0, 1)


def as_mx(x: Rows, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(x.astype(np.float32)).astype(dtype)


def as_float64(x: mx.array) -> Rows:
    return np.array(x.astype(mx.float32)).astype(np.float64)
