"""The gated delta rule over a few rows: S <- g S + beta (v - g S k) k^T, y = S q.

The decay g, the state and the arithmetic on it are fp32. Rows are folded in one after the other, so
the state and outputs of T rows are those of T calls with one row, bit for bit.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops
from numpy.typing import NDArray


@dataclass(frozen=True)
class DeltaRows:
    """What T rows put into the recurrence (batch of one, value heads Hv, key heads Hk dividing Hv).

    k:    [1, T, Hk, Dk], L2-normalized
    v:    [1, T, Hv, Dv]
    g:    fp32 [1, T, Hv], the decay, in (0, 1]
    beta: [1, T, Hv], the write strength
    """

    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array

    def first(self, n: int) -> "DeltaRows":
        """The first `n` rows."""
        return DeltaRows(self.k[:, :n], self.v[:, :n], self.g[:, :n], self.beta[:, :n])

    def arrays(self) -> list[mx.array]:
        """All arrays, for evaluation and for counting bytes."""
        return [self.k, self.v, self.g, self.beta]


def read_rows(q: mx.array, rows: DeltaRows, state: mx.array) -> tuple[mx.array, mx.array]:
    """Fold `rows` into `state` and read every row's output.

    q: [1, T, Hk, Dk], normalized and scaled; state: fp32 [1, Hv, Dv, Dk].
    Returns y [1, T, Hv, Dv] in q's dtype and the state after the last row. `state` is not changed.
    """
    if mx.default_device() == mx.cpu:
        y, after = _on_host(rows, state, q)
        return mx.array(y)[None].astype(q.dtype), mx.array(after)[None]
    return _on_device(q, rows, state)


def fold_rows(rows: DeltaRows, state: mx.array) -> mx.array:
    """The state after `rows`, without their outputs. Shapes as in `read_rows`."""
    if mx.default_device() == mx.cpu:
        return mx.array(_on_host(rows, state, None)[1])[None]
    return _on_device(rows.k, rows, state)[1]


def _on_device(q: mx.array, rows: DeltaRows, state: mx.array) -> tuple[mx.array, mx.array]:
    metal = mx.metal.is_available() and q.shape[-1] % 32 == 0
    recurrence = gated_delta_kernel if metal else gated_delta_ops
    return recurrence(q, rows.k, rows.v, rows.g, rows.beta, state)


def _on_host(
    rows: DeltaRows, state: mx.array, q: mx.array | None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The same in NumPy, four times as fast on a CPU as MLX's operations: one state, kept in cache.

    Returns y [T, Hv, Dv] (empty where q is None) and the state [Hv, Dv, Dk].
    """
    repeat = rows.v.shape[2] // rows.k.shape[2]
    inputs = [a.astype(mx.float32) for a in (*rows.arrays(), *([] if q is None else [q]))]
    mx.eval(inputs)  # once: each round trip to MLX's thread costs more than a row
    k, v, g, beta, *read = (np.asarray(a)[0] for a in inputs)
    k, queries = np.repeat(k, repeat, axis=1), [np.repeat(a, repeat, axis=1) for a in read]
    s = np.array(state)[0]
    flat = s.reshape(len(s), -1)
    write = np.empty_like(s)
    y = np.empty(v.shape if q is not None else (0,), np.float32)
    for t in range(len(v)):
        flat *= g[t][:, None]
        memory = np.matmul(s, k[t][:, :, None])[..., 0]
        delta = (v[t] - memory) * beta[t][:, None]
        np.einsum("hv,hk->hvk", delta, k[t], out=write)
        s += write
        if queries:
            np.matmul(s, queries[0][t][:, :, None], out=y[t][:, :, None])
    return y, s
