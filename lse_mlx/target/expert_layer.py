"""A mixture-of-experts layer run by the project: mlx-lm's weights, and the routes kept."""

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock as SparseMoeBlock


@dataclass(frozen=True)
class ExpertSizes:
    """A layer's routed experts, as a store of them would count.

    experts: how many there are; top_k: how many a row chooses
    expert_bytes: of one expert's gate, up and down projections, as the checkpoint stores them
    """

    experts: int
    top_k: int
    expert_bytes: int

    @classmethod
    def of(cls, block: SparseMoeBlock) -> "ExpertSizes":
        """Of a block as it was loaded, before its weights take another form."""
        arrays: Any = tree_flatten(block.switch_mlp.parameters())
        stored = sum(array.nbytes for _, array in arrays)
        return cls(block.num_experts, block.top_k, stored // block.num_experts)


class ExpertMixer(Protocol):
    """A mixture-of-experts layer, in the form that suits the device."""

    @property
    def sizes(self) -> ExpertSizes:
        """How many experts there are, how many a row chooses, and how large one is."""
        ...

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The layer's output for the rows of a pass, and its routes.

        x: [1, T, hidden], already normed. Returns [1, T, hidden] and int32 [T, top_k], the experts
        that each row chose in native rank order: the highest score first, of equal ones the lowest
        id.
        """
        ...


@dataclass(frozen=True)
class ExpertLayer:
    """The layer in MLX, as mlx-lm's own block computes it.

    Of equal scores that compete for the last place the lowest id is chosen, where mlx-lm's partition
    leaves that open. Its stock products depend on how many rows are in a pass.
    """

    block: SparseMoeBlock
    sizes: ExpertSizes

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """See `ExpertMixer`."""
        block = self.block
        gates = mx.softmax(block.gate(x), axis=-1, precise=True)
        # MLX's sort is stable, so equal scores stay in the order of their ids.
        chosen = mx.argsort(-gates, axis=-1)[..., : block.top_k]
        scores = mx.take_along_axis(gates, chosen, axis=-1)
        if block.norm_topk_prob:
            scores = scores / scores.sum(axis=-1, keepdims=True)
        y = (block.switch_mlp(x, chosen) * scores[..., None]).sum(axis=-2)
        y = y + mx.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
        return y, chosen[0].astype(mx.int32)
