"""From a pass of the decode cycle to its records, the same way for a recording and for its replay."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import exp

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.decode.loop import Cycle, Step
from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import Proposal
from lse_mlx.errors import DraftError, reason
from lse_mlx.protocol.native import NativeStep
from lse_mlx.protocol.records import Ids, RouteRecord, StepRecord
from lse_mlx.protocol.trace import rows_digest
from lse_mlx.routes.sidecar import Asked, RouteSidecar
from lse_mlx.traces.identity import TargetIdentity

STAGE = "block_output"
"""What is captured of a layer: its output, with the residual, before the final norm."""
DTYPE = "float32"
LIKELIEST = 4
"""How many of a row's tokens a record names."""


@dataclass(frozen=True)
class Origin:
    """What every record of one request says alike.

    captured_layer_ids: zero-based target layers whose outputs are the hidden rows, in order
    """

    identity: TargetIdentity
    request_owner: str
    request_generation: int
    captured_layer_ids: tuple[int, ...]

    def step(self, cycle: Cycle, payload: str | None) -> StepRecord:
        """The record of one pass.

        payload: the tensor that will hold the hidden rows; None to keep their digest alone
        """
        candidates = candidates_of(cycle.proposal)
        found = asdict(native_step(cycle, [LIKELIEST] * len(cycle.rows)))
        del found["stop_reason"], found["routes"]
        return StepRecord(
            target_model_revision=self.identity.target_model_revision,
            tokenizer_revision=self.identity.tokenizer_revision,
            request_owner=self.request_owner,
            request_generation=self.request_generation,
            captured_stage=STAGE,
            captured_layer_ids=self.captured_layer_ids,
            hidden_dtype=DTYPE,
            hidden_payload=payload,
            candidate_token_ids=tuple(tuple(held.ids.tolist()) for held in candidates),
            candidate_probabilities=tuple(tuple(held.probs.tolist()) for held in candidates),
            selected_candidate_path=tuple(cycle.proposal.tokens),
            **found,
        )

    def routes(self, cycle: Cycle, sidecar: RouteSidecar | None) -> Iterator[RouteRecord]:
        """The experts of every committed row in every sparse layer, and what was predicted of them."""
        chosen = routes_of(cycle)
        for row in range(cycle.cut.rows):
            for layer, experts in chosen.items():
                place = layer, cycle.position + row
                asked = Asked() if sidecar is None else sidecar.asked(*place)
                yield RouteRecord(
                    request_owner=self.request_owner,
                    request_generation=self.request_generation,
                    sequence_position=cycle.position + row,
                    target_route_layer=layer,
                    target_top_k=len(experts[row]),
                    target_expert_ids_in_native_rank_order=experts[row],
                    predicted_expert_ids=asked.prediction.experts,
                    prediction_confidence=asked.prediction.confidence,
                    prefetch_ticket_owner=self.request_owner if asked.ticketed else None,
                    prefetch_ticket_generation=self.request_generation if asked.ticketed else None,
                )


def routes_of(cycle: Cycle) -> dict[int, tuple[Ids, ...]]:
    """For each sparse layer, in order, the experts of every row of the pass, in native rank order."""
    return {
        layer: tuple(tuple(row) for row in np.array(held).tolist())
        for layer, held in sorted(cycle.answer.routes.items())
    }


def native_step(cycle: Cycle, likeliest: Sequence[int]) -> NativeStep:
    """What the target made of one pass.

    likeliest: for each row, how many of its tokens to name; its digest covers all of them
    """
    verdict, features = cycle.verdict, in_float32(cycle.answer.features)
    rows = [cycle.rows.logprob(row, 0, count).top for row, count in enumerate(likeliest)]
    answered = verdict.accepted < len(verdict.tokens)
    return NativeStep(
        sequence_position=cycle.position,
        anchor_token=cycle.anchor,
        hidden_shape=(features.shape[0], features.shape[1]),
        hidden_digest=rows_digest(features),
        target_token_ids=tuple(tuple(token for token, _ in top) for top in rows),
        target_token_probabilities=tuple(tuple(exp(p) for _, p in top) for top in rows),
        target_rows_digest=rows_digest(in_float32(cycle.answer.logits)),
        accepted_prefix_length=verdict.accepted,
        bonus_token=verdict.tokens[-1] if answered else None,
        committed_rows=cycle.cut.rows,
        routes=routes_of(cycle),
        stop_reason=cycle.cut.reason,
    )


def candidates_of(proposal: Proposal) -> list[Distribution]:
    """What could have stood at each position: what a draft was drawn from, or scored by.

    Raises DraftError where the drafter cannot say.
    """
    if proposal.candidates is None:
        return proposal.q
    try:
        return proposal.candidates()
    except Exception as error:  # a drafter can be anybody's code
        raise DraftError(
            f"The drafter does not tell its candidates ({reason(error)}): "
            "mend it, or record without it."
        ) from error


def proposal_of(record: StepRecord, greedy: bool) -> Proposal:
    """The proposal that `record` is of, with the q that it was judged with."""
    candidates = [
        Distribution(np.array(ids, np.int64), np.array(probs, np.float64))
        for ids, probs in zip(
            record.candidate_token_ids, record.candidate_probabilities, strict=True
        )
    ]
    path = list(record.selected_candidate_path)
    q = Proposal.certain(path).q if greedy else candidates
    return Proposal(path, q, lambda: candidates)


def first_token(opening: Step) -> int:
    """The token chosen from the prompt's last row; `opening` is the first step, not cancelled."""
    [token] = opening.tokens or [opening.stop_token]
    assert token is not None  # a first token that is not emitted is a stop token
    return token


def in_float32(array: mx.array | NDArray[np.float32]) -> NDArray[np.float32]:
    """The numbers of an array of either kind, on the host; fp32 holds every value of bf16."""
    return np.array(array.astype(mx.float32) if isinstance(array, mx.array) else array)
