"""The candidate selector: how well each candidate follows each candidate of the position before."""

from dataclasses import dataclass

import mlx.core as mx

from lse_mlx.drafters.dflash2.operations import Array
from lse_mlx.drafters.dflash2.projections import Projection
from lse_mlx.drafters.dflash2.weights import Matrix


@dataclass(frozen=True)
class Selector:
    """Scores S[p, a, b] = logit[p, b] + sum over r of pred[a, r] * gate[p, r] * succ[b, r].

    gate:        projects a block row to the rank.
    predecessor: codebook [vocab, rank]; row of the token before.
    successor:   codebook [vocab, rank]; row of the candidate.
    Source: DFlash2, selector.
    """

    gate: Projection
    predecessor: Matrix
    successor: Matrix

    def scores(self, hidden: Array, logits: mx.array, ids: mx.array, anchor: int) -> mx.array:
        """Scores of all pairs, fp32 [positions, k, k].

        hidden: fp32 [positions, hidden], the rows the head has read.
        logits: fp32 [positions, k], the head's values for the candidates.
        ids:    int32 [positions, k]. Before position 0 stands the anchor, so all k rows of
                S[0] are the same.
        """
        before = mx.concatenate([mx.full((1, ids.shape[1]), anchor, ids.dtype), ids[:-1]])
        asked = self.predecessor.rows(before) * mx.array(self.gate(hidden))[:, None]
        offered = self.successor.rows(ids)
        # Not a matrix product: too small to gain by one, and some devices would round its inputs.
        follows = (asked[:, :, None] * offered[:, None]).sum(axis=-1)
        return follows + logits[:, None]
