"""What a replay reports: the first difference with its place, and nothing after it."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from lse_mlx.protocol.native import NativeStart, NativeStep
from lse_mlx.protocol.replay import ReplayReport, replay
from lse_mlx.protocol.trace import Trace
from tests.golden.cases import CASES
from tests.golden.generate import trace_of
from tests.protocol.native_table import NativeTable

CASE = {case.name: case for case in CASES}
GREEDY = trace_of(CASE["greedy"])


class Otherwise(NativeTable):
    """Says something else of one field of one step."""

    step = 4
    field: str
    value: Any

    def verify(self, record):
        told = super().verify(record)
        at = self.calls.count("verify")
        return replace(told, **{self.field: self.value}) if at == self.step else told


WRONG: dict[str, Any] = {
    "sequence_position": 9,
    "anchor_token": 0,
    "hidden_shape": (4, 9),
    "hidden_digest": "0" * 64,
    "target_token_ids": ((1,),),
    "target_token_probabilities": ((0.5,),),
    "target_rows_digest": "0" * 64,
    "accepted_prefix_length": 2,
    "bonus_token": 14,
    "committed_rows": 3,
    "routes": {1: ((0, 1),)},
    "stop_reason": "max_tokens",
}
TOLD_AS: dict[str, Any] = {
    "stop_reason": ("stop_reason", None, "max_tokens"),
    "routes": ("target_expert_ids_in_native_rank_order", {}, {1: [0, 1]}),
}
"""Of what a step has no field: how it is told, what was recorded, and what is native."""


def otherwise(field: str, step: int = 4) -> Otherwise:
    native = Otherwise()
    native.field, native.value, native.step = field, WRONG[field], step
    return native


@pytest.mark.parametrize("field", [field.name for field in fields(NativeStep)])
def test_every_field_is_compared(field: str) -> None:
    native = otherwise(field)
    report = replay(GREEDY, native)
    assert report.first is not None
    assert report.differences == (report.first,)
    found = report.first
    assert (found.step, found.sequence_position) == (4, 8)
    held = TOLD_AS.get(field) or (field, getattr(GREEDY.steps[3], field), WRONG[field])
    assert (found.field, found.recorded, found.native) == held
    assert native.calls == ["identity", "start", *["verify"] * 4]  # nothing after a difference
    assert (report.steps, report.state_compared) == (3, False)


def test_all_differences_of_the_step_are_told() -> None:
    class Two(Otherwise):
        def verify(self, record):
            return replace(super().verify(record), bonus_token=1, anchor_token=2)

    native = Two()
    native.field, native.value = "committed_rows", 4
    report = replay(GREEDY, native)
    assert [d.field for d in report.differences] == ["anchor_token", "bonus_token"]


@pytest.mark.parametrize("field", ["first_token", "stop_reason"])
def test_the_prompt_is_step_0(field: str) -> None:
    class OtherStart(NativeTable):
        def start(self, header):
            told = super().start(header)
            return replace(told, **({"first_token": 9} | {"stop_reason": "max_tokens"}))

    report = replay(GREEDY, OtherStart())
    found = {d.field: d for d in report.differences}
    assert set(found) == {"first_token", "stop_reason"}
    assert (found[field].step, found[field].sequence_position, report.steps) == (0, 3, 0)


def test_the_reason_of_the_end_is_the_target_s_own() -> None:
    report = replay(GREEDY, otherwise("stop_reason", 8))
    assert report.first is not None
    assert (report.first.recorded, report.first.native) == ("stop_token", "max_tokens")


def test_a_reply_of_one_token_is_replayed_too() -> None:
    trace = trace_of(CASE["one-token"])
    report = replay(trace, NativeTable())
    assert (report.steps, report.first, report.state_compared) == (0, None, True)

    class GoesOn(NativeTable):
        def start(self, header):
            return NativeStart(first_token=super().start(header).first_token, stop_reason=None)

    report = replay(trace, GoesOn())
    assert report.first is not None
    assert report.first.field == "stop_reason"


def test_what_ended_a_reply_from_outside_is_not_looked_for() -> None:
    """The table knows of no cancel and commits the whole block; everything before is compared."""
    trace = trace_of(CASE["cancelled"])
    assert replay(trace, NativeTable()).first is None
    other = Otherwise()
    other.field, other.value, other.step = "bonus_token", 0, 1
    report = replay(trace, other)
    assert report.first is not None
    assert report.first.field == "bonus_token"


def test_a_device_that_promises_no_bits_says_nothing_of_its_state() -> None:
    class Unsure(NativeTable):
        def cold_digest(self) -> None:
            return None

    report = replay(GREEDY, Unsure())
    assert (report.first, report.state_compared, report.steps) == (None, False, 8)


class OtherRouter(NativeTable):
    """Ranks the experts of one layer the other way round at the end of the second pass."""

    def experts(self, position, layer):
        chosen = super().experts(position, layer)
        return chosen[::-1] if (position, layer) == (6, 3) else chosen


def routed(native: type[NativeTable] = NativeTable, **changed: Any) -> ReplayReport:
    """The replay of the golden trace with routes, on a target of some kind."""
    return replay(trace_of(CASE["routes"]), native.of(CASE["routes"], **changed))


def test_another_expert_is_told_with_its_step_position_and_layer() -> None:
    [found] = routed(OtherRouter).differences
    assert (found.step, found.sequence_position) == (2, 6)
    assert (found.recorded, found.native) == ({3: [1, 4]}, {3: [4, 1]})
    assert str(found) == (
        "At step 2, position 6, target_expert_ids_in_native_rank_order was recorded as {3: [1, 4]} "
        "and is {3: [4, 1]} here."
    )
    assert routed(OtherRouter).steps == 1


@pytest.mark.parametrize("dropped", range(4, 12))
def test_a_route_that_was_not_recorded_is_missed(dropped: int) -> None:
    """Of rows that a pass committed; of the prompt, the first four, any may be there."""
    trace = trace_of(CASE["routes"])
    lost = trace.routes[dropped]
    routes = (*trace.routes[:dropped], *trace.routes[dropped + 1 :])
    header = replace(trace.header, route_count=len(routes))
    fewer = Trace(header, trace.steps, routes, trace.payloads)
    [found] = replay(fewer, NativeTable.of(CASE["routes"])).differences
    assert found.sequence_position == lost.sequence_position
    native = lost.target_expert_ids_in_native_rank_order
    assert (found.recorded, found.native) == ({}, {lost.target_route_layer: [*native]})


def test_a_target_without_experts_has_no_routes() -> None:
    report = replay(trace_of(CASE["routes"]), NativeTable())
    assert report.first is not None
    assert (report.first.step, report.first.native) == (1, {})


def test_routes_of_another_device_are_not_compared() -> None:
    report = routed(OtherRouter, device="abacus")
    assert (report.first, report.compared) == (None, "tokens")


def test_the_report_is_json() -> None:
    report = replay(GREEDY, otherwise("target_token_ids"))
    held = json.loads(json.dumps(report.as_dict()))
    assert held["first"] == held["differences"][0]
    assert held["first"] == {
        "step": 4,
        "sequence_position": 8,
        "field": "target_token_ids",
        "recorded": [list(row) for row in GREEDY.steps[3].target_token_ids],
        "native": [[1]],
    }
    assert (held["steps"], held["compared"]) == (3, "every field")
    assert json.loads(json.dumps(replay(GREEDY, NativeTable()).as_dict()))["first"] is None


def told(trace: Trace, native: NativeTable) -> str:
    return str(replay(trace, native))


def test_the_report_in_words() -> None:
    assert told(GREEDY, NativeTable()) == "8 steps agree."
    assert told(GREEDY, otherwise("bonus_token")) == (
        "3 steps agree. At step 4, position 8, bonus_token was recorded as 15 and is 14 here."
    )
    report = replay(GREEDY, NativeTable.of(CASE["greedy"], device="abacus"))
    assert str(report) == (
        "8 steps agree in tokens; numbers were recorded on table and not compared with those of abacus."
    )
    assert isinstance(report, ReplayReport)
