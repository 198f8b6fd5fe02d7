"""Version 1 of the route sidecar: what was predicted of a sparse layer's routing, and what it was."""

from dataclasses import dataclass
from typing import ClassVar

from lse_mlx.protocol.record import Record
from lse_mlx.protocol.records import Ids, Probabilities
from lse_mlx.protocol.values import (
    check_id,
    check_ids,
    check_integer,
    check_number,
    check_text,
    check_tuple,
    refuse,
    shown,
)


@dataclass(frozen=True, kw_only=True)
class RouteRecord(Record):
    """The experts of one token in one sparse layer.

    sequence_position: of the token, from 0
    target_route_layer: the layer, zero-based among all layers of the target
    target_expert_ids_in_native_rank_order: the `target_top_k` experts that the target's own router
        chose, the highest score first, of equal scores the lowest id
    predicted_expert_ids: what was predicted, the likeliest first; may be empty
    prediction_confidence: one number from 0 to 1 for each of those
    prefetch_ticket_owner, prefetch_ticket_generation: of the ticket that the prediction was given,
        which is the request's own; both None where no ticket was issued

    Raises ProtocolError, which names the field, for a value out of range and for fields that
    contradict each other.
    """

    request_owner: str
    request_generation: int
    sequence_position: int
    target_route_layer: int
    target_top_k: int
    target_expert_ids_in_native_rank_order: Ids
    predicted_expert_ids: Ids
    prediction_confidence: Probabilities
    prefetch_ticket_owner: str | None
    prefetch_ticket_generation: int | None

    number_fields: ClassVar[frozenset[str]] = frozenset({"prediction_confidence"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text("request_owner", self.request_owner)
        check_integer("request_generation", self.request_generation, 0)
        check_integer("sequence_position", self.sequence_position, 0)
        check_id("target_route_layer", self.target_route_layer)
        check_integer("target_top_k", self.target_top_k, 1)
        self._check_experts()
        self._check_ticket()

    def _check_experts(self) -> None:
        native = self.target_expert_ids_in_native_rank_order
        check_ids("target_expert_ids_in_native_rank_order", native)
        if len(native) != self.target_top_k:
            refuse(
                "target_expert_ids_in_native_rank_order",
                native,
                f"target_top_k is {self.target_top_k}, so give as many",
            )
        check_ids("predicted_expert_ids", self.predicted_expert_ids)
        confidence, predicted = self.prediction_confidence, len(self.predicted_expert_ids)
        check_tuple(
            "prediction_confidence", confidence, lambda n, held: check_number(n, held, 0, 1)
        )
        if len(confidence) != predicted:
            refuse(
                "prediction_confidence",
                confidence,
                f"give one number for each of the {predicted} predicted experts",
            )

    def _check_ticket(self) -> None:
        owner, generation = self.prefetch_ticket_owner, self.prefetch_ticket_generation
        if owner is None and generation is None:
            return
        if owner != self.request_owner:
            refuse(
                "prefetch_ticket_owner",
                owner,
                f"request_owner is {shown(self.request_owner)}, so give that or no ticket",
            )
        if type(generation) is not int or generation != self.request_generation:
            refuse(
                "prefetch_ticket_generation",
                generation,
                f"request_generation is {self.request_generation}, so give that or no ticket",
            )
        if not self.predicted_expert_ids:
            refuse("prefetch_ticket_owner", owner, "nothing was predicted, so give no ticket")
