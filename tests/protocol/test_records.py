"""Records hold what they may and refuse the rest by the field's name."""

import json
import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lse_mlx.errors import ProtocolError
from lse_mlx.protocol.fields import Record, field_digests
from lse_mlx.protocol.records import RouteRecord, StepRecord, TraceHeader
from tests.golden.cases import CASES
from tests.golden.generate import trace_of

BY_NAME = {case.name: trace_of(case) for case in CASES}
HEADER = BY_NAME["greedy"].header
STEP = BY_NAME["greedy"].steps[2]  # three proposed, two accepted, all rows committed
ROUTE = BY_NAME["routes"].routes[1]

# The seed's minimum contract, and what was added to it.
CONTRACT = {
    "schema_version",
    "target_model_revision",
    "tokenizer_revision",
    "request_owner",
    "request_generation",
    "sequence_position",
    "captured_stage",
    "captured_layer_ids",
    "hidden_dtype",
    "hidden_shape",
    "hidden_payload",
    "hidden_digest",
    "candidate_token_ids",
    "candidate_probabilities",
    "selected_candidate_path",
    "target_token_probabilities",
    "target_rows_digest",
    "accepted_prefix_length",
    "bonus_token",
}
ROUTE_CONTRACT = {
    "target_route_layer",
    "target_top_k",
    "target_expert_ids_in_native_rank_order",
    "predicted_expert_ids",
    "prediction_confidence",
    "prefetch_ticket_owner",
    "prefetch_ticket_generation",
}


def refused(make: Any) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        make()
    error = caught.value
    assert error.field in str(error)
    assert str(error).endswith(".") and "\n" not in str(error)
    return error


def test_the_minimum_contract_is_there() -> None:
    names = {field.name for field in fields(StepRecord)}
    assert names == CONTRACT | {"anchor_token", "committed_rows", "target_token_ids"}
    assert {field.name for field in fields(RouteRecord)} >= ROUTE_CONTRACT


@pytest.mark.parametrize("record", [HEADER, STEP, ROUTE], ids=["header", "step", "route"])
def test_json_and_back(record: Record) -> None:
    held = json.loads(json.dumps(record.as_dict()))
    assert type(record).from_dict(held) == record


@given(st.lists(st.floats(2.0**-1074, 1), min_size=2, max_size=8))
def test_probabilities_come_back_to_the_bit(weights: list[float]) -> None:
    shares = sorted((w / math.fsum(weights) for w in weights), reverse=True)
    path = STEP.selected_candidate_path[:1]
    ids = tuple(t for t in range(len(shares) + 1) if t != path[0])[: len(shares) - 1]
    record = replace(
        STEP,
        candidate_token_ids=((*ids, path[0]), *STEP.candidate_token_ids[1:]),
        candidate_probabilities=(tuple(shares), *STEP.candidate_probabilities[1:]),
    )
    again = StepRecord.from_dict(json.loads(json.dumps(record.as_dict())))
    assert [p.hex() for p in again.candidate_probabilities[0]] == [p.hex() for p in shares]


RECORDS = [HEADER, STEP, ROUTE]
NAMES = [(record, field.name) for record in RECORDS for field in fields(record)]
ids = [f"{type(record).__name__}.{name}" for record, name in NAMES]


@pytest.mark.parametrize(("record", "name"), NAMES, ids=ids)
def test_a_missing_field_is_named(record: Record, name: str) -> None:
    held = record.as_dict()
    del held[name]
    error = refused(lambda: type(record).from_dict(held))
    assert error.field == name and "missing" in str(error)


NO_SENSE: list[Any] = [
    True, math.nan, math.inf, -1, 1.5, "", "\ud800", "a\nb", "x" * 201, {}, {"a": 1}, [None],
    [[True]], [{}], [math.nan], 1 << 80, -(1 << 80), [1 << 80],
]  # fmt: skip
MAKES_SENSE = [("seed", 1 << 80), ("temperature", 1.5)]
HALF_A_TICKET = {"prefetch_ticket_generation": "prefetch_ticket_owner"}


@pytest.mark.parametrize(("record", "name"), NAMES, ids=ids)
def test_a_value_of_no_sense_is_named(record: Record, name: str) -> None:
    for value in NO_SENSE:
        if (name, value) not in MAKES_SENSE:
            held = {**record.as_dict(), name: value}
            error = refused(partial(type(record).from_dict, held))
            assert error.field in (name, HALF_A_TICKET.get(name)), value


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_an_unknown_field_is_named(record: Record) -> None:
    error = refused(lambda: type(record).from_dict({**record.as_dict(), "mood": 1}))
    assert error.field == "mood"


@pytest.mark.parametrize("version", [0, 2, -1, 1.0, True, "1", None, [1]])
def test_another_version_is_refused_before_its_other_fields(version: Any) -> None:
    error = refused(lambda: StepRecord.from_dict({"schema_version": version, "new": 1}))
    assert error.field == "schema_version"


@pytest.mark.parametrize("held", [None, [], "record", 1])
def test_what_is_no_object_is_no_record(held: Any) -> None:
    with pytest.raises(ProtocolError, match="give a JSON object"):
        StepRecord.from_dict(held)


CONTRADICTIONS = {
    "a layer twice": (STEP, "captured_layer_ids", {"captured_layer_ids": (1, 1)}),
    "rows for another path": (STEP, "hidden_shape", {"hidden_shape": (5, 8)}),
    "two rows less": (STEP, "hidden_shape", {"hidden_shape": (2, 8)}),
    "a width that layers cannot share": (STEP, "hidden_shape", {"hidden_shape": (4, 7)}),
    "no width": (STEP, "hidden_shape", {"hidden_shape": (4, 0)}),
    "a width of no layer": (STEP, "hidden_shape", {"captured_layer_ids": ()}),
    "a digest too short": (STEP, "hidden_digest", {"hidden_digest": "a" * 63}),
    "a digest in capitals": (STEP, "target_rows_digest", {"target_rows_digest": "A" * 64}),
    "a path too long": (
        STEP,
        "selected_candidate_path",
        {"selected_candidate_path": (9, 10, 15, 0)},
    ),
    "a path of others": (
        STEP,
        "selected_candidate_path",
        {"selected_candidate_path": (9, 10, 14)},
    ),
    "no candidate": (
        STEP,
        "candidate_token_ids",
        {"candidate_token_ids": ((9,), (10,), ()), "candidate_probabilities": ((1.0,), (1.0,), ())},
    ),
    "a probability too few": (
        STEP,
        "candidate_probabilities",
        {"candidate_probabilities": ((0.5, 0.25), *STEP.candidate_probabilities[1:])},
    ),
    "more than a whole": (
        STEP,
        "candidate_probabilities",
        {"candidate_probabilities": ((0.5, 0.25, 0.250002), *STEP.candidate_probabilities[1:])},
    ),
    "a row too few": (
        STEP,
        "target_token_ids",
        {
            "target_token_ids": STEP.target_token_ids[1:],
            "target_token_probabilities": STEP.target_token_probabilities[1:],
        },
    ),
    "the less likely first": (
        STEP,
        "target_token_probabilities",
        {
            "target_token_probabilities": (
                (0.25, 0.625, 0.125),
                *STEP.target_token_probabilities[1:],
            )
        },
    ),
    "more accepted than proposed": (STEP, "accepted_prefix_length", {"accepted_prefix_length": 4}),
    "no bonus though a row is there": (STEP, "bonus_token", {"bonus_token": None}),
    "a bonus without a row": (
        BY_NAME["no-bonus-row"].steps[0],
        "bonus_token",
        {"bonus_token": 5},
    ),
    "more committed than answered": (STEP, "committed_rows", {"committed_rows": 4}),
    "nothing committed": (STEP, "committed_rows", {"committed_rows": 0}),
    "position before a prompt": (STEP, "sequence_position", {"sequence_position": 0}),
    "a layer too many": (HEADER, "captured_layer_ids", {"captured_layer_ids": (1, 4)}),
    "a prompt of nothing": (HEADER, "prompt_token_ids", {"prompt_token_ids": ()}),
    "a prompt outside": (HEADER, "prompt_token_ids", {"prompt_token_ids": (16,)}),
    "a first token outside": (HEADER, "first_token", {"first_token": 16}),
    "a stop token outside": (HEADER, "stop_token_ids", {"stop_token_ids": (16,)}),
    "an expert too few": (
        ROUTE,
        "target_expert_ids_in_native_rank_order",
        {"target_expert_ids_in_native_rank_order": (3,)},
    ),
    "a confidence too many": (
        ROUTE,
        "prediction_confidence",
        {"prediction_confidence": (1.0, 0.5, 0.5)},
    ),
    "another owner's ticket": (
        ROUTE,
        "prefetch_ticket_owner",
        {"prefetch_ticket_owner": "silver"},
    ),
    "another generation's ticket": (
        ROUTE,
        "prefetch_ticket_generation",
        {"prefetch_ticket_generation": 2},
    ),
    "half a ticket": (ROUTE, "prefetch_ticket_generation", {"prefetch_ticket_generation": None}),
    "a ticket for nothing": (
        ROUTE,
        "prefetch_ticket_owner",
        {"predicted_expert_ids": (), "prediction_confidence": ()},
    ),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_contradiction_is_named(what: str) -> None:
    record, field, changes = CONTRADICTIONS[what]
    assert refused(lambda: replace(record, **changes)).field == field


def test_field_digests_are_of_the_values_by_name() -> None:
    """The first digits of SHA-256 as `sha256sum` gives them for 1, null and []; then of those."""
    digits = field_digests({"b": None, "a": 1, "c": ()})
    assert digits == "6b86b273" + "74234e98" + "4f53cda1" + "366d025d"


@pytest.mark.parametrize("deep", [3, 100, 900])
@pytest.mark.parametrize(("record", "name"), NAMES, ids=ids)
def test_a_value_nested_without_end_is_named(record: Record, name: str, deep: int) -> None:
    value = json.loads("[" * deep + "]" * deep)
    held = {**record.as_dict(), name: value}
    digests = field_digests(record.as_dict())
    for more in ({}, {"field_digests": digests}):
        error = refused(partial(type(record).from_dict, held | more))
        assert error.field in (name, HALF_A_TICKET.get(name))


def test_a_list_where_a_tuple_belongs_is_refused() -> None:
    """Frozen means frozen: nothing in a record can be changed behind its checks."""
    changes: Any = {"selected_candidate_path": [9, 10, 15]}
    assert refused(lambda: replace(STEP, **changes)).field == "selected_candidate_path"


def test_json_may_spell_a_whole_number_as_an_integer_where_a_float_belongs() -> None:
    held = {**HEADER.as_dict(), "temperature": 0, "top_p": 1}
    assert TraceHeader.from_dict(held) == HEADER
    held["top_k"] = 0.0
    assert refused(lambda: TraceHeader.from_dict(held)).field == "top_k"


@pytest.mark.parametrize(
    "seed", [1 << 1024, 1 << 100_000, -(1 << 100_000)], ids=["just", "far", "under"]
)
def test_a_seed_that_no_line_holds_is_refused(seed: int) -> None:
    assert refused(lambda: replace(HEADER, seed=seed)).field == "seed"
    whole = replace(HEADER, seed=(1 << 1024) - 1)
    assert TraceHeader.from_dict(json.loads(json.dumps(whole.as_dict()))) == whole
