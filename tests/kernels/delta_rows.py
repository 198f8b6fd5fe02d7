"""Random rows for the gated delta rule, and what comes of them in float64."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.kernels.gated_delta_verify import DeltaRows
from lse_mlx.selftest.definitions import delta_rule
from tests.states import in_numpy

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Heads:
    """Key and value heads, and their sizes."""

    hk: int
    hv: int
    dk: int
    dv: int


SMALL = Heads(hk=2, hv=4, dk=32, dv=8)
TARGET_27B = Heads(hk=16, hv=48, dk=128, dv=128)


def random_rows(
    n: int, heads: Heads = SMALL, dtype: mx.Dtype = mx.float32, seed: int = 0
) -> tuple[DeltaRows, mx.array]:
    """`n` rows and a state: values around one, decays in (0.2, 1), writes in (0, 1)."""
    rng = np.random.default_rng([seed, n, heads.hk, heads.hv])

    def as_mx(x: F64) -> mx.array:
        return mx.array(x.astype(np.float32))

    mixed = rng.standard_normal((1, n, 2 * heads.hk * heads.dk + heads.hv * heads.dv))
    rows = DeltaRows(
        as_mx(mixed).astype(dtype),
        as_mx(rng.uniform(0.2, 1.0, (1, n, heads.hv))),
        as_mx(rng.uniform(0.0, 1.0, (1, n, heads.hv))),
    )
    return rows, as_mx(rng.standard_normal((1, heads.hv, heads.dv, heads.dk)))


def cut(rows: DeltaRows, start: int, stop: int) -> DeltaRows:
    """Rows `start` to `stop` of `rows`."""
    return DeltaRows(*(a[:, start:stop] for a in rows.arrays()))


def in_float64(rows: DeltaRows, state: mx.array) -> tuple[F64, F64]:
    """Outputs [rows, Hv, Dv] and the state [Hv, Dv, Dk] after `rows`."""
    arrays = [in_numpy(a)[0] for a in (*rows.arrays(), state)]
    return delta_rule(*arrays, eps=1e-6)  # as mlx-lm has it
