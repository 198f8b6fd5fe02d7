"""The candidate selector: how well each candidate follows each candidate of the position before."""

from dataclasses import dataclass

import mlx.core as mx

from lse_mlx.drafters.dflash2.operations import Array, Operations
from lse_mlx.drafters.dflash2.projections import Projection
from lse_mlx.drafters.dflash2.weights import Matrix
from lse_mlx.kernels.selector import KERNEL, scores_reference, select


@dataclass(frozen=True)
class Lattice:
    """The candidates of a drafted block and how well each follows each.

    scores: fp32 [positions, k, k]; [p, a, b] of candidate b of position p after candidate a of the
            position before. Before position 0 stands the anchor, so all k rows of [0] are the same.
    ids:    int32 [positions, k], the candidates' tokens, best first
    path:   where a device has walked: int32 [positions + 1], the greedy tokens and a status, which
            is 0 where nothing is wrong; None where the walk is the caller's
    """

    scores: mx.array
    ids: mx.array
    path: mx.array | None


@dataclass(frozen=True)
class Selector:
    """Scores S[p, a, b] = logit[p, b] + sum over r of pred[a, r] * gate[p, r] * succ[b, r].

    gate:        projects a block row to the rank.
    predecessor: codebook [vocab, rank]; row of the token before.
    successor:   codebook [vocab, rank]; row of the candidate.
    Source: DFlash2, selector.
    """

    operations: Operations
    gate: Projection
    predecessor: Matrix
    successor: Matrix
    vocab_size: int

    def lattice(self, hidden: Array, logits: mx.array, ids: mx.array, anchor: int) -> Lattice:
        """Scores of all pairs, and on a device the greedy path.

        hidden: fp32 [positions, hidden], the rows the head has read.
        logits: fp32 [positions, k], the head's values for the candidates.
        ids:    int32 [positions, k].
        """
        registry = self.operations.registry
        before = mx.concatenate([mx.full((1, ids.shape[1]), anchor, ids.dtype), ids[:-1]])
        predecessors = self.predecessor.rows(before)
        gates = mx.array(self.gate(hidden))
        successors = self.successor.rows(ids)
        if self.operations.on_host:
            # The walk is done with NumPy: in MLX it is sixty small operations.
            registry.reference(KERNEL.name)
            return Lattice(scores_reference(logits, predecessors, gates, successors), ids, None)
        chosen = select(registry, logits, ids, predecessors, gates, successors, self.vocab_size)
        return Lattice(chosen.scores, ids, chosen.path)
