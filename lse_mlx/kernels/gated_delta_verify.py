"""The gated delta rule over the rows of a pass: S <- g S + beta (v - g S k) k^T, y = S q.

One call folds the accepted rows of the pass before into the state and runs the new ones. The state,
its decay and the arithmetic on it are fp32. Rows are folded in one after the other, so outputs and
state do not depend on how rows are cut into passes, bit for bit.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024); q and k as in mlx-lm's
`normalize_qk`.
"""

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops

from lse_mlx.kernels.registry import Kernel, Registry

NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key before its root is taken (mlx-lm's l2norm)."""

KERNEL = Kernel(
    "gated_delta_verify",
    inputs=(
        "mixed",
        "decay",
        "beta",
        "pending_mixed",
        "pending_decay",
        "pending_beta",
        "state",
        "n_rows",
        "n_pending",
        "keep",
    ),
    outputs=("y", "kept"),
)
KEEP_NONE, KEEP_PENDING, KEEP_ALL = 0, 1, 2
LANES, ROWS = 32, 4
"""A SIMD group: its lanes, and the rows of the state that it holds."""


@dataclass(frozen=True)
class DeltaRows:
    """What some rows of a pass put into the recurrence and ask of it (key heads Hk, value heads Hv).

    mixed: T [1, rows, 2 Hk Dk + Hv Dv], q, k and v of all heads side by side, as the short
           convolution leaves them: q and k are not normalized yet
    decay: fp32 [1, rows, Hv], g in [0, 1]
    beta:  fp32 [1, rows, Hv], the write strength
    """

    mixed: mx.array
    decay: mx.array
    beta: mx.array

    def __len__(self) -> int:
        return self.mixed.shape[1]

    def arrays(self) -> list[mx.array]:
        """All arrays, for evaluation and for counting bytes."""
        return [self.mixed, self.decay, self.beta]


def gated_delta_verify(
    registry: Registry,
    rows: DeltaRows,
    pending: DeltaRows | None,
    n_pending: int,
    state: mx.array,
    whole: bool,
) -> tuple[mx.array, mx.array]:
    """Fold the first `n_pending` rows of `pending` into `state`, then run `rows`.

    state: fp32 [1, Hv, Dv, Dk], before the pending rows; it is not changed.
    Returns y [1, rows, Hv, Dv] in the dtype of `rows.mixed`, and the state to keep: after all rows
    where the pass can only be committed whole, after the pending ones otherwise.
    """
    assert n_pending <= (0 if pending is None else len(pending))
    keep = KEEP_ALL if whole else KEEP_PENDING if n_pending else KEEP_NONE

    def launch() -> tuple[mx.array, mx.array]:
        # Where nothing is pending, the rows themselves stand there: no array of another kind.
        behind = rows if pending is None else pending
        y_shape = (1, len(rows), *state.shape[1:3])
        y, kept = _launch(registry, rows, len(rows), behind, n_pending, state, keep, y_shape)
        return y, (kept if keep else state)

    return registry.serve(
        KERNEL.name,
        _fits(state),
        launch,
        lambda: gated_delta_verify_reference(rows, pending, n_pending, state, whole),
    )


def fold_rows(registry: Registry, rows: DeltaRows, n: int, state: mx.array) -> mx.array:
    """The state after the first `n` of `rows`, without their outputs: the same kernel, no new rows.

    Shapes as in `gated_delta_verify`.
    """
    return registry.serve(
        KERNEL.name,
        _fits(state),
        lambda: _launch(registry, rows, 0, rows, n, state, KEEP_PENDING, (1,))[1],
        lambda: _run(rows, n, state)[1],
    )


def gated_delta_verify_reference(
    rows: DeltaRows, pending: DeltaRows | None, n_pending: int, state: mx.array, whole: bool
) -> tuple[mx.array, mx.array]:
    """`gated_delta_verify` in plain MLX, by mlx-lm's operations; as exact as the kernel, see `_run`."""
    before = _run(pending, n_pending, state)[1] if pending is not None and n_pending else state
    y, after = _run(rows, len(rows), before)
    return y, (after if whole else before)


def _fits(state: mx.array) -> bool:
    """Whether the kernel takes such a state."""
    _, _, dv, dk = state.shape
    return dk % LANES == 0 and dv % ROWS == 0 and state.dtype == mx.float32


def _launch(
    registry: Registry,
    rows: DeltaRows,
    n_rows: int,
    pending: DeltaRows,
    n_pending: int,
    state: mx.array,
    keep: int,
    y_shape: tuple[int, ...],
) -> tuple[mx.array, mx.array]:
    """One launch. Where a state or outputs are not asked for, an array of one element stands there."""
    _, hv, dv, dk = state.shape
    groups = next(n for n in (4, 2, 1) if dv % (ROWS * n) == 0)
    y, kept = registry.launch(
        KERNEL,
        inputs=[*rows.arrays(), *pending.arrays(), state, n_rows, n_pending, keep],
        outputs=[(y_shape, rows.mixed.dtype), (state.shape if keep else (1,), mx.float32)],
        grid=(LANES, dv // ROWS, hv),
        threadgroup=(LANES, groups, 1),
        template={
            "T": rows.mixed.dtype,
            "Dk": dk,
            "Dv": dv,
            "Hk": _key_heads(rows, state),
            "Hv": hv,
        },
    )
    return y, kept


def _key_heads(rows: DeltaRows, state: mx.array) -> int:
    _, hv, dv, dk = state.shape
    return (rows.mixed.shape[-1] - hv * dv) // (2 * dk)


def _run(rows: DeltaRows, n: int, state: mx.array) -> tuple[mx.array, mx.array]:
    """Outputs of the first `n` rows, and the state after them.

    Row by row, the same operations on arrays of the same shapes whatever `n` is: a device may pick a
    reduction, and with it an order of summation, by how many sums there are. So rows have the same
    bits however they are cut, and an exact engine may be served by this.
    """
    outputs: list[mx.array] = []
    for row in range(n):
        y, state = _run_one(rows, row, state)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1), state


def _run_one(rows: DeltaRows, row: int, state: mx.array) -> tuple[mx.array, mx.array]:
    """The output of one row, [1, 1, Hv, Dv], and the state after it."""
    hk, (_, hv, dv, dk) = _key_heads(rows, state), state.shape
    one = slice(row, row + 1)
    mixed = rows.mixed[:, one].astype(mx.float32)
    q, k, v = mx.split(mixed, [hk * dk, 2 * hk * dk], axis=-1)
    q = _unit(q.reshape(1, 1, hk, dk)) * dk**-0.5
    k = _unit(k.reshape(1, 1, hk, dk))
    v = v.reshape(1, 1, hv, dv)
    y, after = gated_delta_ops(q, k, v, rows.decay[:, one], rows.beta[:, one], state)
    return y.astype(rows.mixed.dtype), after


def _unit(x: mx.array) -> mx.array:
    return x / mx.sqrt(mx.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)
