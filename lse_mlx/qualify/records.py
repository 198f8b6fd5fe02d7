"""Rungs about traces: their records hold, they replay without a difference, and a wrong one is seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.drafters.base import Drafter
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.engine import Engine
from lse_mlx.errors import ProtocolError, counted
from lse_mlx.protocol.records import StepRecord, TraceHeader
from lse_mlx.protocol.trace import SHARED, Trace
from lse_mlx.protocol.trace_files import read_trace, write_trace
from lse_mlx.qualify.ladder import Finding
from lse_mlx.target.model import Target
from lse_mlx.traces.identity import TargetIdentity
from lse_mlx.traces.native import replay_on
from lse_mlx.traces.recording import record

TOKENS = 24
DEPTH = 4
SETTINGS = (Sampling(), Sampling(temperature=1.0, top_p=0.95))

SCHEMA = (
    "the records of short traces are valid, and reading and writing them gives the same files to the "
    "byte"
)
REPLAY = (
    "traces of the pair, greedy and sampled, replay on the target without a difference, and each "
    "change of a single field of them is refused or reported"
)


def schema(engine: Engine, identity: TargetIdentity, prompt: str) -> Finding:
    """Traces of the target alone and of a scripted drafter that is right for some tokens a draft."""
    target, ids = engine.target, engine.tokenizer.encode(prompt)
    alone = _record(engine, identity, None, prompt, SETTINGS[0])
    known, last = [*ids, *alone.tokens], (target.layer_count - 1,)
    scripted = [
        ScriptedDrafter.right_for(known, right, target.vocab_size, DEPTH, last)
        for right in (0, DEPTH // 2, DEPTH)
    ]
    traces = [alone, *(_record(engine, identity, one, prompt, SETTINGS[0]) for one in scripted)]
    size = 0
    for trace in traces:
        with TemporaryDirectory(prefix="lse-mlx-") as place:
            before, after = Path(place, "before"), Path(place, "after")
            before.mkdir()
            after.mkdir()
            write_trace(before, trace)
            write_trace(after, read_trace(before))
            files = {path.name: path.read_bytes() for path in before.iterdir()}
            again = {path.name: path.read_bytes() for path in after.iterdir()}
        size += sum(map(len, files.values()))
        if files != again:
            changed = min(name for name in files if files[name] != again.get(name))
            return Finding("", failure=f"{changed} changed when it was read and written again.")
    records = sum(1 + len(trace.steps) + len(trace.routes) for trace in traces)
    says = f"{counted(records, 'record')} of {counted(len(traces), 'trace')}"
    return Finding(says, {"traces": len(traces), "records": records, "bytes": size})


def golden_replay(engine: Engine, identity: TargetIdentity, prompts: Sequence[str]) -> Finding:
    """Traces of the pair replayed as they are, and then with one field changed at a time."""
    traces = [
        _record(engine, identity, engine.drafter, prompt, sampling)
        for prompt in prompts
        for sampling in SETTINGS
    ]
    steps = 0
    for trace in traces:
        report = replay_on(engine.target, identity, trace)
        steps += report.steps
        if report.first is not None:
            return Finding("", failure=str(report.first))
    seen, by_name = 0, 0
    for trace in [trace for trace in traces if trace.steps][: len(SETTINGS)]:
        for change in CHANGES:
            name = seen_as(engine.target, identity, trace, change)
            if name is None:
                return Finding("", failure=f"A change of {change.field} was not seen.")
            seen += 1
            by_name += name == change.field
    says = f"{steps} steps of {counted(len(traces), 'trace')} agree; {seen} changes were all seen"
    figures = {"traces": len(traces), "steps": steps, "changes": seen, "by_name": by_name}
    return Finding(says, figures)


@dataclass(frozen=True)
class SingleChange:
    """Another value of one field: in the header, in the first step, or in all that share it."""

    field: str
    value: Callable[[Any], Any]

    def apply(self, trace: Trace) -> Trace:
        """The trace with it; raises ProtocolError where its records do not allow it."""
        header, steps = trace.header.as_dict(), [step.as_dict() for step in trace.steps]
        records = [header] if self.field in header else steps[:1]
        if self.field in SHARED:
            records = [header, *steps]
        for one in records:
            one[self.field] = self.value(one[self.field])
        return Trace(
            TraceHeader.from_dict(header),
            tuple(map(StepRecord.from_dict, steps)),
            trace.routes,
            trace.payloads,
        )


def _other_digest(digest: str) -> str:
    return ("1" if digest[0] == "0" else "0") + digest[1:]


def _other_layers(layers: list[int]) -> list[int]:
    return layers[::-1] if len(layers) > 1 else [max(layers, default=0) + 1]


def _other_order(rows: list[list[int]]) -> list[list[int]]:
    """The first row with its two least likely tokens, of those that it names, the other way round."""
    *likelier, one, another = rows[0]
    return [[*likelier, another, one], *rows[1:]]


CHANGES = (
    SingleChange("schema_version", lambda version: version + 1),
    SingleChange("target_model_revision", lambda said: f"{said}0"),
    SingleChange("tokenizer_revision", lambda said: f"{said}0"),
    SingleChange("vocab_size", lambda size: size + 1),
    SingleChange("layer_count", lambda count: count + 1),
    SingleChange("hidden_size", lambda size: size + 1),
    SingleChange("captured_layer_ids", _other_layers),
    SingleChange("captured_stage", lambda said: f"{said}s"),
    SingleChange("request_owner", lambda owner: f"{owner}0"),
    SingleChange("request_generation", lambda turn: turn + 1),
    SingleChange("first_token", lambda token: token ^ 1),
    SingleChange("sequence_position", lambda position: position + 1),
    SingleChange("anchor_token", lambda token: token ^ 1),
    SingleChange("hidden_shape", lambda shape: [shape[0] + 2, shape[1]]),
    SingleChange("hidden_digest", _other_digest),
    SingleChange("target_rows_digest", _other_digest),
    SingleChange("target_token_ids", _other_order),
    SingleChange("accepted_prefix_length", lambda length: length - 1 if length else length + 1),
    SingleChange("bonus_token", lambda token: (token or 0) ^ 1),
    SingleChange("committed_rows", lambda rows: rows - 1 or rows + 1),
)
"""Of fields that a target confirms or refuses, each to a value that is none of its own."""


def seen_as(
    target: Target, identity: TargetIdentity, trace: Trace, change: SingleChange
) -> str | None:
    """The field by which a replay of the changed trace is refused, or first differs."""
    header = trace.header
    try:
        report = replay_on(
            target,
            identity,
            change.apply(trace),
            layers=header.captured_layer_ids,
            owner=header.request_owner,
            generation=header.request_generation,
        )
    except ProtocolError as refused:
        return refused.field
    return None if report.first is None else report.first.field


def _record(
    engine: Engine,
    identity: TargetIdentity,
    drafter: Drafter | None,
    prompt: str,
    sampling: Sampling,
) -> Trace:
    return record(
        Session(engine.target, drafter),
        identity,
        engine.tokenizer.encode(prompt),
        stop_tokens=engine.tokenizer.stop_tokens,
        sampling=sampling,
        seed=0,
        max_tokens=TOKENS,
    )
