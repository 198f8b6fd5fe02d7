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
    "stop_reason": "max_tokens",
}


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
    assert (found.step, found.sequence_position, found.field) == (4, 8, field)
    recorded = None if field == "stop_reason" else getattr(GREEDY.steps[3], field)
    assert (found.recorded, found.native) == (recorded, WRONG[field])
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
