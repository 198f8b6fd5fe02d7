"""The gated delta rule over a few rows: S <- g S + beta (v - g S k) k^T, y = S q.

The decay g, the state and the arithmetic on it are fp32. Rows are folded in one after the other, so
the state and outputs of T rows are those of T calls with one row, bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops
from numpy.typing import NDArray

Array = Any
"""An mx.array on a device, a NumPy array on a CPU; never both in one state."""


@dataclass(frozen=True)
class DeltaRows:
    """What T rows put into the recurrence (batch of one, value heads Hv, key heads Hk dividing Hv).

    k:    [1, T, Hk, Dk], L2-normalized
    v:    [1, T, Hv, Dv]
    g:    fp32 [1, T, Hv], the decay, in (0, 1]
    beta: [1, T, Hv], the write strength
    """

    k: Array
    v: Array
    g: Array
    beta: Array

    def first(self, n: int) -> "DeltaRows":
        """The first `n` rows."""
        return DeltaRows(self.k[:, :n], self.v[:, :n], self.g[:, :n], self.beta[:, :n])

    def arrays(self) -> list[Array]:
        """All arrays, for evaluation and for counting bytes."""
        return [self.k, self.v, self.g, self.beta]


def read_rows(q: mx.array, rows: DeltaRows, state: mx.array) -> tuple[mx.array, mx.array]:
    """Fold `rows` into `state` and read every row's output.

    q: [1, T, Hk, Dk], normalized and scaled; state: fp32 [1, Hv, Dv, Dk].
    Returns y [1, T, Hv, Dv] in q's dtype and the state after the last row. `state` is not changed.
    """
    metal = mx.default_device() == mx.gpu and mx.metal.is_available() and q.shape[-1] % 32 == 0
    recurrence = gated_delta_kernel if metal else gated_delta_ops
    return recurrence(q, rows.k, rows.v, rows.g, rows.beta, state)


def fold_rows(rows: DeltaRows, state: mx.array) -> mx.array:
    """The state after `rows`, without their outputs. Shapes as in `read_rows`."""
    return read_rows(rows.k, rows, state)[1]


def host_read_rows(
    q: NDArray[np.float32], rows: DeltaRows, state: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """`read_rows` in NumPy, four times as fast on a CPU as MLX's operations; all arrays fp32."""
    return _host_recurrence(q, rows, state)


def host_fold_rows(rows: DeltaRows, state: NDArray[np.float32]) -> NDArray[np.float32]:
    """`fold_rows` in NumPy."""
    return _host_recurrence(None, rows, state)[1]


def _host_recurrence(
    q: NDArray[np.float32] | None, rows: DeltaRows, state: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Row by row on one state that stays in cache; no outputs where `q` is None."""
    k, v, g, beta = (array[0] for array in rows.arrays())
    repeat = v.shape[1] // k.shape[1]  # each key head serves so many value heads
    k = np.repeat(k, repeat, axis=1)
    queries = None if q is None else np.repeat(q[0], repeat, axis=1)
    s = state[0].copy()
    flat = s.reshape(len(s), -1)
    write = np.empty_like(s)
    y = np.empty(v.shape if q is not None else (0,), np.float32)
    for t in range(len(v)):
        flat *= g[t][:, None]
        memory = np.matmul(s, k[t][:, :, None])[..., 0]
        delta = (v[t] - memory) * beta[t][:, None]
        np.einsum("hv,hk->hvk", delta, k[t], out=write)
        s += write
        if queries is not None:
            np.matmul(s, queries[t][:, :, None], out=y[t][:, :, None])
    return y[None], s[None]
