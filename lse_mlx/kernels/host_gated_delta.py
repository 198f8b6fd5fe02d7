"""The gated delta rule of `gated_delta_verify.py` on a CPU, in NumPy, all arrays fp32.

Four times as fast there as MLX's operations. As on a device, outputs and state do not depend on how
rows are cut into passes, bit for bit.
"""

from dataclasses import dataclass

import numpy as np

from lse_mlx.kernels.host_arithmetic import Rows


@dataclass(frozen=True)
class HostDeltaRows:
    """What some rows of a pass put into the recurrence (key heads Hk, value heads Hv).

    k:    [1, rows, Hk, Dk], of length one
    v:    [1, rows, Hv, Dv]
    g:    [1, rows, Hv], the decay, in [0, 1]
    beta: [1, rows, Hv], the write strength
    """

    k: Rows
    v: Rows
    g: Rows
    beta: Rows

    def arrays(self) -> list[Rows]:
        """All arrays, for counting bytes."""
        return [self.k, self.v, self.g, self.beta]


def host_gated_delta_verify(
    q: Rows,
    rows: HostDeltaRows,
    pending: HostDeltaRows | None,
    n_pending: int,
    state: Rows,
    whole: bool,
) -> tuple[Rows, Rows]:
    """Fold the first `n_pending` rows of `pending` into `state`, then run `rows`.

    q: [1, rows, Hk, Dk], of length Dk^-0.5; state: [1, Hv, Dv, Dk], which is not changed.
    Returns y [1, rows, Hv, Dv] and the state to keep: after all rows where the pass can only be
    committed whole, after the pending ones otherwise.
    """
    before = state if pending is None else host_fold_rows(pending, n_pending, state)
    after = before.copy()
    y = _run(q, rows, rows.v.shape[1], after)
    return y, (after if whole else before)


def host_fold_rows(rows: HostDeltaRows, n: int, state: Rows) -> Rows:
    """The state after the first `n` of `rows`, without their outputs."""
    after = state.copy()
    _run(None, rows, n, after)
    return after


def _run(q: Rows | None, rows: HostDeltaRows, n: int, state: Rows) -> Rows:
    """Row by row on one state that stays in cache, changing it; no outputs where `q` is None."""
    k, v, g, beta = (array[0, :n] for array in rows.arrays())
    repeat = v.shape[1] // k.shape[1]  # each key head serves so many value heads
    k = np.repeat(k, repeat, axis=1)
    queries = None if q is None else np.repeat(q[0], repeat, axis=1)
    s = state[0]
    flat = s.reshape(len(s), -1)
    write = np.empty_like(s)
    y = np.empty(v.shape if q is not None else (0,), np.float32)
    for t in range(n):
        flat *= g[t][:, None]
        memory = np.matmul(s, k[t][:, :, None])[..., 0]
        delta = (v[t] - memory) * beta[t][:, None]
        np.einsum("hv,hk->hvk", delta, k[t], out=write)
        s += write
        if queries is not None:
            np.matmul(s, queries[t][:, :, None], out=y[t][:, :, None])
    return y[None]
