"""A trace in memory, and what has to hold between its records whatever the target is."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from lse_mlx.errors import ProtocolError, printable, shown
from lse_mlx.protocol.fields import ROUNDING, refuse
from lse_mlx.protocol.records import RouteRecord, StepRecord, TraceHeader, check_in_vocabulary

HEADER, STEPS, ROUTES = "trace.json", "steps.jsonl", "routes.jsonl"
PAYLOADS = "payloads.safetensors"

SHARED = (
    "target_model_revision",
    "tokenizer_revision",
    "request_owner",
    "request_generation",
    "captured_stage",
    "captured_layer_ids",
    "hidden_dtype",
)
"""Fields that every step repeats, so that a step can be read alone."""


@dataclass(frozen=True, eq=False)
class Trace:
    """One request, recorded: made only if its records fit together.

    steps: one a verify pass, in order; a step's number is its line in steps.jsonl, from 1
    routes: by position and then by layer; none for a target without sparse layers
    payloads: fp32 hidden rows by the name that their step gives

    Raises ProtocolError, which names the line and the field, for records that contradict the header
    or each other.
    """

    header: TraceHeader
    steps: tuple[StepRecord, ...]
    routes: tuple[RouteRecord, ...] = ()
    payloads: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with within(HEADER):
            _check_counts(self)
            _check_width(self)
            _check_first(self.header)
        for number, step in enumerate(self.steps, 1):
            with within(f"{STEPS}, line {number}"):
                _check_origin(self.header, step)
                _check_place(self, number)
                _check_proposal(self.header, step)
                _check_committed(self, number)
                _check_payload(self, number)
        with within(HEADER):
            _check_end(self)
        _check_routes(self)
        _check_names(self)

    @property
    def end(self) -> int:
        """How many tokens the target had read when the reply ended."""
        return len(self.header.prompt_token_ids) + sum(step.committed_rows for step in self.steps)

    @property
    def tokens(self) -> list[int]:
        """The reply: every emitted token."""
        seen = [self.header.first_token]
        for step in self.steps:
            seen += step.answer[: step.committed_rows]
        return seen[:-1] if self.header.stop_reason == "stop_token" else seen

    def routes_at(self, position: int) -> tuple[RouteRecord, ...]:
        """The routes of one token, by layer."""
        first = bisect_left(self.routes, position, key=_position)
        return self.routes[first : bisect_right(self.routes, position, lo=first, key=_position)]


def _position(route: RouteRecord) -> int:
    return route.sequence_position


def rows_digest(rows: NDArray[np.float32]) -> str:
    """SHA-256 of fp32 `rows` (any shape), row-major and little endian, as 64 hexadecimal digits."""
    return sha256(np.ascontiguousarray(rows, dtype="<f4").tobytes()).hexdigest()


def payload_name(step: int) -> str:
    """The tensor that holds the hidden rows of `step` (from 1)."""
    return f"step.{step:06d}.hidden"


@contextmanager
def within(place: str) -> Iterator[None]:
    """Put `place` before the sentence of a ProtocolError."""
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(error.field, f"{place}: {error}") from error


def _check_counts(trace: Trace) -> None:
    header = trace.header
    for name, held in (("step_count", trace.steps), ("route_count", trace.routes)):
        said = getattr(header, name)
        if said != len(held):
            refuse(name, said, f"the trace has {len(held)}, so it is not whole: record it again")


def _check_width(trace: Trace) -> None:
    """Hidden rows as wide as the header says; where all steps agree on another width, it is wrong."""
    header, layers = trace.header, len(trace.header.captured_layer_ids)
    captured = {step.captured_layer_ids for step in trace.steps} == {header.captured_layer_ids}
    widths = [step.hidden_shape[1] for step in trace.steps]
    if captured and layers and len({*widths}) == 1 and widths[0] != layers * header.hidden_size:
        refuse(
            "hidden_size",
            header.hidden_size,
            f"every step has {widths[0]} numbers a row for {layers} layers, so give their width",
        )


def _check_first(header: TraceHeader) -> None:
    """A reply that begins with a stop token also ends there."""
    stopped = header.first_token in header.stop_token_ids
    if stopped and (header.stop_reason != "stop_token" or header.step_count):
        refuse(
            "first_token",
            header.first_token,
            "it is a stop token, so give 'stop_token' as the reason and no step",
        )


def _check_origin(header: TraceHeader, step: StepRecord) -> None:
    """A step is of the header's request, target and capture; its ids are the target's."""
    for name in SHARED:
        held, said = getattr(step, name), getattr(header, name)
        if held != said:
            refuse(name, held, f"{HEADER} says {shown(said)}, so keep one trace to one request")
    width = len(header.captured_layer_ids) * header.hidden_size
    if step.hidden_shape[1] != width:
        refuse("hidden_shape", step.hidden_shape, f"the header's layers make {width} numbers a row")
    for name in ("candidate_token_ids", "target_token_ids"):
        for ids in getattr(step, name):
            check_in_vocabulary(name, ids, header.vocab_size)
    if step.bonus_token is not None:
        check_in_vocabulary("bonus_token", step.bonus_token, header.vocab_size)


def _check_place(trace: Trace, number: int) -> None:
    """A step begins where the one before ended, with the last token emitted as its anchor."""
    step = trace.steps[number - 1]
    if number == 1:
        position, anchor = len(trace.header.prompt_token_ids), trace.header.first_token
        before = ("the prompt has {} tokens", "first_token is {}")
    else:
        last = trace.steps[number - 2]
        position, anchor = last.sequence_position + last.committed_rows, last.answer[-1]
        before = ("the step before ended at {}", "the step before emitted {} last")
    if step.sequence_position != position:
        said = before[0].format(position)
        refuse("sequence_position", step.sequence_position, f"{said}, so give that")
    if step.anchor_token != anchor:
        said = before[1].format(anchor)
        refuse("anchor_token", step.anchor_token, f"{said}, so give that")


def _check_proposal(header: TraceHeader, step: StepRecord) -> None:
    path = step.selected_candidate_path
    if not header.greedy:
        ids_and_shares = zip(step.candidate_token_ids, step.candidate_probabilities, strict=True)
        for place, (ids, shares) in enumerate(ids_and_shares):
            if math.fsum(shares) < 1 - ROUNDING:
                wanted = f"those at position {place} are drawn from, so give all of them"
                refuse("candidate_probabilities", shares, wanted)
            if not shares[ids.index(path[place])] > 0:
                wanted = f"token {path[place]} at position {place} cannot be drawn from these"
                refuse("selected_candidate_path", path, wanted)
        return
    chosen = [ids[0] for ids in step.target_token_ids]
    agrees = [drafted == own for drafted, own in zip(path, chosen, strict=False)]
    accepted = (*agrees, False).index(False)
    if step.accepted_prefix_length != accepted:
        wanted = f"the target's likeliest tokens are {chosen}, so give {accepted}"
        refuse("accepted_prefix_length", step.accepted_prefix_length, wanted)
    if step.bonus_token is not None and step.bonus_token != chosen[accepted]:
        wanted = f"the likeliest token of row {accepted} is {chosen[accepted]}, so give that"
        refuse("bonus_token", step.bonus_token, wanted)


def _check_committed(trace: Trace, number: int) -> None:
    """All of the answer is looked at, unless the reply ends inside it."""
    header, step, last = trace.header, trace.steps[number - 1], number == len(trace.steps)
    if not last and step.committed_rows != len(step.answer):
        wanted = f"the reply goes on, so all {len(step.answer)} tokens of the answer are committed"
        refuse("committed_rows", step.committed_rows, wanted)
    looked_at = step.answer[: step.committed_rows]
    stops = [token in header.stop_token_ids for token in looked_at]
    if last and header.stop_reason == "stop_token":
        if not stops[-1]:
            wanted = f"the reply ends with {looked_at[-1]}, which is none of stop_token_ids"
            refuse("stop_reason", header.stop_reason, f"{wanted}: give the reason it had")
        stops = stops[:-1]
    if any(stops):
        token = looked_at[stops.index(True)]
        refuse("stop_token_ids", header.stop_token_ids, f"the reply goes on after {token}")


def _check_payload(trace: Trace, number: int) -> None:
    step = trace.steps[number - 1]
    if step.hidden_payload is None:
        return
    rows = trace.payloads.get(step.hidden_payload)
    if rows is None:
        wanted = f"no tensor of {PAYLOADS} has that name, so copy the whole folder"
        refuse("hidden_payload", step.hidden_payload, wanted)
    check_tensor(step, str(rows.dtype), rows.shape)
    if rows_digest(rows) != step.hidden_digest:
        wanted = f"the rows of {step.hidden_payload} have another digest: record the trace again"
        refuse("hidden_digest", step.hidden_digest, wanted)


def check_tensor(step: StepRecord, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise ProtocolError unless a payload of this type and shape can hold the step's rows."""
    if dtype != step.hidden_dtype or shape != step.hidden_shape:
        said = f"its tensor is {printable(dtype)} {list(shape)}"
        own = f"{step.hidden_dtype} {list(step.hidden_shape)}"
        refuse("hidden_payload", step.hidden_payload, f"{said} and the step's rows are {own}")


def _check_end(trace: Trace) -> None:
    """The reply is as long as the header's limit and reason say."""
    header, emitted = trace.header, len(trace.tokens)
    unstopped = not trace.steps and header.first_token not in header.stop_token_ids
    if unstopped and header.stop_reason == "stop_token":
        wanted = f"the reply ends with {header.first_token}, which is none of stop_token_ids"
        refuse("stop_reason", header.stop_reason, f"{wanted}: give the reason it had")
    most = header.max_tokens
    if most is not None and emitted > most:
        refuse("max_tokens", most, f"the reply has {emitted} tokens, so give at least that")
    full = most is not None and emitted == most
    if header.stop_reason == "context_full" and full:
        refuse("stop_reason", header.stop_reason, f"the reply has all {most} tokens of max_tokens")
    if header.stop_reason == "max_tokens" and not full:
        wanted = f"the reply has {emitted} tokens of {most}, so give the reason it had"
        refuse("stop_reason", header.stop_reason, wanted)


def _check_routes(trace: Trace) -> None:
    header, before = trace.header, (-1, -1)
    for number, route in enumerate(trace.routes, 1):
        with within(f"{ROUTES}, line {number}"):
            for name in ("request_owner", "request_generation"):
                held, said = getattr(route, name), getattr(header, name)
                if held != said:
                    refuse(name, held, f"{HEADER} says {shown(said)}, so keep to one request")
            place = (route.sequence_position, route.target_route_layer)
            if route.sequence_position >= trace.end:
                wanted = f"the target read {trace.end} tokens, so keep to those that were committed"
                refuse("sequence_position", route.sequence_position, wanted)
            if route.target_route_layer >= header.layer_count:
                wanted = f"the target has {header.layer_count} layers, so give one of those"
                refuse("target_route_layer", route.target_route_layer, wanted)
            if place <= before:
                name = "sequence_position" if place[0] < before[0] else "target_route_layer"
                wanted = f"position {before[0]} and layer {before[1]} came before: give each once, in order"
                refuse(name, getattr(route, name), wanted)
            before = place


def _check_names(trace: Trace) -> None:
    """Each payload belongs to exactly one step."""
    left = set(trace.payloads)
    for number, step in enumerate(trace.steps, 1):
        if step.hidden_payload is None:
            continue
        if step.hidden_payload not in left:
            with within(f"{STEPS}, line {number}"):
                wanted = "a step before has the same, so give each step a tensor of its own"
                refuse("hidden_payload", step.hidden_payload, wanted)
        left.remove(step.hidden_payload)
    if left:
        wanted = "no step has this name, so leave the tensor out"
        with within(PAYLOADS):
            refuse("hidden_payload", min(left), wanted)
