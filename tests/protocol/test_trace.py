"""What has to hold between the records of a trace, whatever the target."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lse_mlx.errors import ProtocolError
from lse_mlx.protocol.trace import SHARED, Trace
from tests.golden.cases import CASES
from tests.golden.generate import trace_of
from tests.golden.table import hidden

BY_NAME = {case.name: trace_of(case) for case in CASES}
OTHER: dict[str, Any] = {
    "target_model_revision": "table:2",
    "tokenizer_revision": "table:letters",
    "request_owner": "silver",
    "request_generation": 4,
    "captured_stage": "block_input",
    "captured_layer_ids": (3, 1),
    "hidden_dtype": "float32",
}


def trace_with(name: str, step: int | None = None, **changes: Any) -> Trace:
    """The golden trace with changes in a step (from 1), or in the header."""
    trace = BY_NAME[name]
    steps = [replace(held, hidden_payload=None) for held in trace.steps]
    header = trace.header
    if step is None:
        header = replace(header, **changes)
    else:
        steps[step - 1] = replace(steps[step - 1], **changes)
    return Trace(header, tuple(steps), trace.routes)


def refused(name: str, step: int | None = None, **changes: Any) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        trace_with(name, step, **changes)
    assert caught.value.field in str(caught.value)
    if step is not None:
        assert str(caught.value).startswith(f"steps.jsonl, line {step}: ")
    return caught.value


@pytest.mark.parametrize("field", [name for name in SHARED if name != "hidden_dtype"])
@pytest.mark.parametrize("step", [1, 4, 8])
def test_every_step_is_of_the_header_s_request(field: str, step: int) -> None:
    assert refused("greedy", step, **{field: OTHER[field]}).field == field


@pytest.mark.parametrize("step", range(1, 9))
def test_positions_and_anchors_chain(step: int) -> None:
    held = BY_NAME["greedy"].steps[step - 1]
    position = held.sequence_position
    for wrong in (position - 1, position + 1):
        assert refused("greedy", step, sequence_position=wrong).field == "sequence_position"
    assert (
        refused("greedy", step, anchor_token=(held.anchor_token + 1) % 16).field == "anchor_token"
    )


@pytest.mark.parametrize("step", [3, 4, 5])
def test_greedy_acceptance_follows_from_the_likeliest_tokens(step: int) -> None:
    held = BY_NAME["greedy"].steps[step - 1]
    for accepted in range(len(held.selected_candidate_path) + 1):
        if accepted == held.accepted_prefix_length:
            continue
        error = refused("greedy", step, accepted_prefix_length=accepted, committed_rows=1)
        assert error.field == "accepted_prefix_length"
    assert refused("greedy", step, bonus_token=0).field == "bonus_token"


@pytest.mark.parametrize("step", [3, 4, 5, 7])
def test_all_of_an_answer_is_committed_while_the_reply_goes_on(step: int) -> None:
    assert refused("greedy", step, committed_rows=1).field == "committed_rows"


def test_a_reply_does_not_go_on_after_a_stop_token() -> None:
    assert refused("greedy", None, stop_token_ids=(5, 10)).field == "stop_token_ids"
    assert refused("greedy", None, stop_token_ids=(5, 7)).field == "stop_token_ids"


def test_a_reply_that_a_stop_token_ended_ends_with_one() -> None:
    assert refused("greedy", None, stop_token_ids=(4,)).field == "stop_reason"
    assert refused("greedy", None, stop_token_ids=()).field == "stop_reason"
    assert refused("one-token", None, stop_token_ids=(9,)).field == "stop_reason"
    assert refused("one-token", None, stop_reason="cancelled").field == "first_token"
    assert refused("limit", None, stop_reason="stop_token").field == "stop_reason"


@pytest.mark.parametrize(
    ("most", "reason", "field"),
    [
        (3, "max_tokens", "max_tokens"),
        (5, "max_tokens", "stop_reason"),
        (None, "max_tokens", "stop_reason"),
        (4, "context_full", "stop_reason"),
    ],
)
def test_the_length_is_as_the_reason_says(most: int | None, reason: str, field: str) -> None:
    assert refused("limit", None, max_tokens=most, stop_reason=reason).field == field


@pytest.mark.parametrize(
    ("most", "reason"),
    [(4, "max_tokens"), (None, "context_full"), (9, "context_full"), (4, "stop_string"),
     (9, "cancelled")],
)  # fmt: skip
def test_reasons_that_fit_are_taken(most: int | None, reason: str) -> None:
    trace = trace_with("limit", None, max_tokens=most, stop_reason=reason)
    assert trace.tokens == [1, 2, 3, 4]


def test_a_sampled_proposal_brings_all_that_it_was_drawn_from() -> None:
    """Acceptance divides by it; in a greedy trace it is told and not used."""
    step = BY_NAME["sampled"].steps[0]
    shares = ((0.5, 0.499), step.candidate_probabilities[1])
    assert refused("sampled", 1, candidate_probabilities=shares).field == "candidate_probabilities"
    shares = ((1.0, 0.0), step.candidate_probabilities[1])
    assert refused("sampled", 1, candidate_probabilities=shares).field == "selected_candidate_path"


def test_a_width_is_wrong_in_the_step_or_in_the_header() -> None:
    """Of one step among several it is the step's; where all agree on another, the header's."""
    assert refused("greedy", 2, hidden_shape=(4, 16)).field == "hidden_shape"
    assert refused("greedy", None, hidden_size=8).field == "hidden_size"


@pytest.mark.parametrize("field", ["vocab_size", "layer_count"])
def test_ids_lie_in_the_header_s_ranges(field: str) -> None:
    error = refused("greedy", None, **{field: 3})
    named = "captured_layer_ids" if field == "layer_count" else "prompt_token_ids"
    assert error.field == named


def test_an_outside_token_is_found_wherever_it_stands() -> None:
    step = BY_NAME["greedy"].steps[0]
    ids = ((16, *step.candidate_token_ids[0][1:]), *step.candidate_token_ids[1:])
    path = (16, *step.selected_candidate_path[1:])
    error = refused("greedy", 1, candidate_token_ids=ids, selected_candidate_path=path)
    assert error.field == "candidate_token_ids"
    assert refused("greedy", 1, anchor_token=16).field == "anchor_token"
    assert refused("sampled", 3, bonus_token=16).field == "bonus_token"


@pytest.mark.parametrize(
    ("order", "field"),
    [((1, 0), "target_route_layer"), ((0, 0), "target_route_layer"), ((2, 0), "sequence_position")],
)
def test_routes_stand_in_order_and_once(order: tuple[int, int], field: str) -> None:
    trace = BY_NAME["routes"]
    routes = tuple(trace.routes[at] for at in order)
    with pytest.raises(ProtocolError) as caught:
        Trace(replace(trace.header, route_count=2), trace.steps, routes, trace.payloads)
    assert caught.value.field == field
    assert str(caught.value).startswith("routes.jsonl, line 2: ")


def test_routes_are_of_rows_that_were_committed() -> None:
    trace = BY_NAME["routes"]
    route = replace(trace.routes[-1], sequence_position=trace.end)
    with pytest.raises(ProtocolError) as caught:
        Trace(replace(trace.header, route_count=1), trace.steps, (route,), trace.payloads)
    assert caught.value.field == "sequence_position"


def payload_refused(name: str, rows: NDArray[Any]) -> str:
    """The field that is named where a golden trace in memory has other rows of that name."""
    trace = BY_NAME["greedy"]
    with pytest.raises(ProtocolError) as caught:
        Trace(trace.header, trace.steps, (), {**trace.payloads, name: rows})
    return caught.value.field


def test_payloads_are_of_the_step_s_type_and_shape() -> None:
    """Also where their bytes would come out the same."""
    name, rows = next(iter(BY_NAME["greedy"].payloads.items()))
    for other in (rows.astype(np.float64), rows.reshape(8, 4), rows[:-1]):
        assert payload_refused(name, other) == "hidden_payload"
    assert payload_refused(name, rows + 1) == "hidden_digest"


def test_each_payload_is_of_one_step() -> None:
    assert payload_refused("more", np.zeros((1, 8), np.float32)) == "hidden_payload"
    # Two steps with the same rows: no table gives them, and a trace alone cannot know that.
    header = replace(BY_NAME["limit"].header, step_count=2, max_tokens=7)
    first = replace(BY_NAME["limit"].steps[0], hidden_payload="rows")
    rows = np.stack([hidden([0, 1]), hidden([0, 1, 2]), hidden([0, 1, 2, 3])])
    second = replace(first, sequence_position=4, anchor_token=4)
    with pytest.raises(ProtocolError, match="a step before has the same") as caught:
        Trace(header, (first, second), (), {"rows": rows})
    assert caught.value.field == "hidden_payload"
