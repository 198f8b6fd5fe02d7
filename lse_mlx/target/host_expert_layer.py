"""A mixture-of-experts layer on a CPU: mlx-lm's weights, everything in fp32 and in NumPy.

A row's bits depend on the row alone: each expert's products are done in tiles of eight rows
(`HostLinear`), and a row's chosen experts are summed one after the other in the order of their
ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.kernels.host_arithmetic import Rows, host_sigmoid
from lse_mlx.kernels.host_linear import HostLinear, host_tiles, row_count
from lse_mlx.target.expert_layer import ExpertSizes
from lse_mlx.target.host_form import HostGatedMLP

Routes = NDArray[np.int64]


@dataclass(frozen=True)
class HostExpertLayer:
    """The same layer as `ExpertLayer`, in fp32.

    router: [hidden] to a logit for each expert; experts: by id
    shared: the expert of every row, shared_gate: [hidden] to the logit of its weight
    normed: whether the scores of the chosen experts are scaled to sum to one
    """

    sizes: ExpertSizes
    router: HostLinear
    experts: Sequence[HostGatedMLP]
    shared: HostGatedMLP
    shared_gate: HostLinear
    normed: bool

    @classmethod
    def of(cls, block: Any, sizes: ExpertSizes) -> "HostExpertLayer":
        """From a SparseMoeBlock in its host form, with the sizes that it had as it was loaded."""
        return cls(
            sizes=sizes,
            router=block.gate,
            experts=block.switch_mlp.experts,
            shared=block.shared_expert,
            shared_gate=block.shared_expert_gate,
            normed=block.norm_topk_prob,
        )

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """See `ExpertMixer`."""
        count, tiles = row_count(x), host_tiles(x)
        chosen, scores = self._routes(self.router.product(tiles)[:count])
        y = self._routed(tiles[:count], chosen, scores)
        y += (host_sigmoid(self.shared_gate.product(tiles)) * self.shared.product(tiles))[:count]
        return mx.array(y).reshape(x.shape), mx.array(chosen.astype(np.int32))

    def _routes(self, logits: Rows) -> tuple[Routes, Rows]:
        """Ids and scores of each row's experts, [rows, top_k], the highest score first."""
        with np.errstate(invalid="ignore"):  # of rows that are not finite, which are refused later
            odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
        gates = odds / odds.sum(axis=-1, keepdims=True)
        # Stable, so equal scores stay in the order of their ids.
        chosen = np.argsort(-gates, axis=-1, kind="stable")[:, : self.sizes.top_k]
        scores = np.take_along_axis(gates, chosen, axis=-1)
        return chosen, scores / scores.sum(axis=-1, keepdims=True) if self.normed else scores

    def _routed(self, rows: Rows, chosen: Routes, scores: Rows) -> Rows:
        """The sum over each row's experts of score times output, [rows, hidden]."""
        outputs = np.empty((*chosen.shape, rows.shape[-1]), np.float32)
        for expert in np.unique(chosen):
            at, rank = np.nonzero(chosen == expert)
            outputs[at, rank] = self.experts[expert].product(host_tiles(rows[at]))[: len(at)]
        y = outputs[:, 0] * scores[:, :1]
        for rank in range(1, chosen.shape[1]):
            y += outputs[:, rank] * scores[:, rank : rank + 1]
        return y
