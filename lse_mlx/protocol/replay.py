"""A trace replayed on a target: the target decides again, and the records are held to that.

The drafter is not needed. What it proposed is in the trace; what the target made of it has to follow
again, step by step, and no rejected proposal may have left anything behind.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from lse_mlx.errors import ProtocolError, shown
from lse_mlx.protocol.fields import as_json
from lse_mlx.protocol.native import Native, NativeIdentity, NativeStart, NativeStep
from lse_mlx.protocol.records import TraceHeader
from lse_mlx.protocol.trace import Trace

Compared = Literal["every field", "tokens"]

FROM_OUTSIDE = ("stop_string", "cancelled")
"""Reasons that no target can find again: what stopped the reply is not in the trace."""

ANY = object()

OF_ONE_DEVICE = (
    "hidden_digest",
    "target_token_ids",
    "target_token_probabilities",
    "target_rows_digest",
    "routes",
)
"""Fields that hang on the last bit of a number, which two devices need not share."""

_RECORD_AGAIN = "replay it on the target it was recorded from, or record it again on this one"
_OTHER_CAPTURE = "replay it with the drafter whose layers it captured, or record it again"
_OTHER_REQUEST = "replay a trace for the request that it belongs to"
WAYS_OUT = {
    "schema_version": "read it with the package that wrote it, or record it again",
    "target_model_revision": _RECORD_AGAIN,
    "tokenizer_revision": _RECORD_AGAIN,
    "vocab_size": _RECORD_AGAIN,
    "layer_count": _RECORD_AGAIN,
    "hidden_size": _RECORD_AGAIN,
    "hidden_dtype": _OTHER_CAPTURE,
    "captured_stage": _OTHER_CAPTURE,
    "captured_layer_ids": _OTHER_CAPTURE,
    "request_owner": _OTHER_REQUEST,
    "request_generation": _OTHER_REQUEST,
}
"""What has to be equal before a step is replayed, in this order, and what to do if it is not."""


@dataclass(frozen=True)
class Difference:
    """A field that the native target does not confirm.

    step: from 1, the line in steps.jsonl; 0 is the prompt
    """

    step: int
    sequence_position: int
    field: str
    recorded: Any
    native: Any

    def as_dict(self) -> dict[str, Any]:
        """Every field by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        """One sentence."""
        return (
            f"At step {self.step}, position {self.sequence_position}, {self.field} was recorded as "
            f"{shown(as_json(self.recorded))} and is {shown(as_json(self.native))} here."
        )


@dataclass(frozen=True)
class ReplayReport:
    """What a replay found.

    steps: how many of the trace's steps agree in all that was compared
    compared: "tokens" where the trace is of another device, whose numbers have other bits
    state_compared: whether the state at the end was held to a fresh reading
    differences: all of the first step that has any; the replay ends there
    """

    steps: int
    compared: Compared
    recorded_device: str
    native_device: str
    state_compared: bool
    differences: tuple[Difference, ...]

    @property
    def first(self) -> Difference | None:
        """The first difference, None if there is none."""
        return self.differences[0] if self.differences else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "steps": self.steps,
            "compared": self.compared,
            "recorded_device": self.recorded_device,
            "native_device": self.native_device,
            "state_compared": self.state_compared,
            "first": None if self.first is None else self.first.as_dict(),
            "differences": [difference.as_dict() for difference in self.differences],
        }

    def __str__(self) -> str:
        """One or two sentences."""
        told = "1 step agrees" if self.steps == 1 else f"{self.steps} steps agree"
        if self.compared == "tokens":
            told += (
                f" in tokens; numbers were recorded on {self.recorded_device} and not compared "
                f"with those of {self.native_device}"
            )
        return f"{told}." if self.first is None else f"{told}. {self.first}"


def replay(trace: Trace, native: Native) -> ReplayReport:
    """Let `native` decide every step of `trace` again, up to the first that differs.

    Raises ProtocolError before any step, naming the field, for a trace of another target, tokenizer,
    vocabulary, hidden shape or capture, or of another request than `native` serves.
    """
    header, identity = trace.header, native.identity()
    _refuse_foreign(header, identity)
    compared: Compared = "every field" if header.device == identity.device else "tokens"

    done, state_compared = 0, False
    found = _start_differences(trace, native.start(header))
    for number, record in enumerate(trace.steps, 1):
        if found:
            break
        found = _step_differences(trace, number, native.verify(record), compared)
        done += not found
    if not found and (cold := native.cold_digest()) is not None:
        state_compared, state = True, native.state_digest()
        if state != cold:
            found = [Difference(done, trace.end, "state_digest", cold, state)]
    return ReplayReport(
        done, compared, header.device, identity.device, state_compared, tuple(found)
    )


def _refuse_foreign(header: TraceHeader, identity: NativeIdentity) -> None:
    for name, way_out in WAYS_OUT.items():
        recorded, native = getattr(header, name), getattr(identity, name)
        if recorded != native:
            was, now = shown(as_json(recorded)), shown(as_json(native))
            raise ProtocolError(name, f"{name} is {was} in the trace and {now} here: {way_out}.")


def _start_differences(trace: Trace, start: NativeStart) -> list[Difference]:
    header = trace.header
    pairs: list[tuple[str, Any, Any]] = [("first_token", header.first_token, start.first_token)]
    if (expected := _reason(trace, 0)) is not ANY:
        pairs.append(("stop_reason", expected, start.stop_reason))
    at = len(header.prompt_token_ids)
    return [Difference(0, at, name, was, now) for name, was, now in pairs if was != now]


def _step_differences(
    trace: Trace, number: int, step: NativeStep, compared: Compared
) -> list[Difference]:
    record, reason = trace.steps[number - 1], _reason(trace, number)
    left_out = {"stop_reason"} | ({*OF_ONE_DEVICE} if compared == "tokens" else set())
    if reason is ANY:
        left_out.add("committed_rows")
    names = [field.name for field in fields(NativeStep) if field.name not in left_out]
    at, routes = record.sequence_position, "routes" in names
    triples = [(n, getattr(record, n), getattr(step, n)) for n in names if n != "routes"]
    if reason is not ANY:
        triples.append(("stop_reason", reason, step.stop_reason))
    found = [Difference(number, at, name, was, now) for name, was, now in triples if was != now]
    return [*found, *_route_difference(trace, number, step)] if routes else found


def _route_difference(trace: Trace, number: int, step: NativeStep) -> Iterator[Difference]:
    """The first committed row that took other experts than recorded, by each layer that differs."""
    record = trace.steps[number - 1]
    for row in range(record.committed_rows):
        at = record.sequence_position + row
        recorded = {
            route.target_route_layer: route.target_expert_ids_in_native_rank_order
            for route in trace.routes_at(at)
        }
        native = {layer: rows[row] for layer, rows in step.routes.items() if row < len(rows)}
        layers = sorted(recorded.keys() | native.keys())
        differ = [layer for layer in layers if recorded.get(layer) != native.get(layer)]
        if differ:
            was, now = (
                {layer: list(held[layer]) for layer in differ if layer in held}
                for held in (recorded, native)
            )
            yield Difference(number, at, "target_expert_ids_in_native_rank_order", was, now)
            return


def _reason(trace: Trace, number: int) -> Any:
    """The reason that the target has to find after step `number`, ANY where it came from outside."""
    if number < len(trace.steps):
        return None
    reason = trace.header.stop_reason
    return ANY if reason in FROM_OUTSIDE else reason
