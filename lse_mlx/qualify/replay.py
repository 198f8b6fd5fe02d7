"""Rungs about traces: their records hold, and the target decides them again as it did.

The traces are made here, by the same engine. What their replay shows is that every pass can be
repeated, that acceptance, limits and commits follow from the target alone, and that no rejected row
stays in its state: the rung about sampling runs each pass from a fresh state and could not see one.
For a comparison with another engine, or with an earlier one, keep a trace and replay that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.drafters.base import Drafter
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.engine import Engine
from lse_mlx.errors import counted
from lse_mlx.protocol.records import StepRecord, TraceHeader
from lse_mlx.protocol.trace import Trace
from lse_mlx.protocol.trace_files import read_trace, write_trace
from lse_mlx.qualify.rung import Finding
from lse_mlx.traces.identity import TargetIdentity
from lse_mlx.traces.native import replay_on
from lse_mlx.traces.recording import record

TOKENS = 24
DEPTH = 4
SETTINGS = (Sampling(), Sampling(temperature=1.0, top_p=0.95))

SCHEMA = (
    "the records of short traces made here are valid, and reading and writing them gives the same "
    "files to the byte"
)
REPLAY = (
    "traces that the pair made here, greedy and sampled, replay on its target without a difference, "
    "on a CPU its state included, and another value of a field that the target decides is reported "
    "by the name of that field"
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
    says = f"{counted(records, 'record')} of {counted(len(traces), 'trace')} made here"
    return Finding(says, {"traces": len(traces), "records": records, "bytes": size})


def golden_replay(engine: Engine, identity: TargetIdentity, prompts: Sequence[str]) -> Finding:
    """Traces of the pair replayed as they are, and those of one prompt with other values of fields."""
    traces = [
        _record(engine, identity, engine.drafter, prompt, sampling, keep_hidden=False)
        for prompt in prompts
        for sampling in SETTINGS
    ]
    steps = 0
    for trace in traces:
        report = replay_on(engine.target, identity, trace)
        steps += report.steps
        if report.first is not None:
            return Finding("", failure=str(report.first))
    changes = 0
    for name, changed in (one for trace in traces[: len(SETTINGS)] for one in altered(trace)):
        first = replay_on(engine.target, identity, changed).first
        if first is None or first.field != name:
            seen = "not reported" if first is None else f"reported as one of {first.field}"
            return Finding("", failure=f"Another value of {name} was {seen}.")
        changes += 1
    says = (
        f"{counted(steps, 'step')} of {counted(len(traces), 'trace')} made here agree; each of "
        f"{counted(changes, 'other value')} was reported by its field"
    )
    return Finding(says, {"traces": len(traces), "steps": steps, "changes": changes})


def altered(trace: Trace) -> Iterator[tuple[str, Trace]]:
    """The name of a field, and the trace with a value of it that its target did not give.

    The records of each fit together, so that nobody but the target can tell: they are those up to a
    step, as if the caller had cancelled there; of a greedy step they fix what is accepted. No trace
    where the reply does not go on after a step.
    """
    going_on = trace.steps[:-1]
    if not going_on:
        return
    number = next((n for n, step in enumerate(going_on) if step.accepted_prefix_length), 0)
    before, step = trace.steps[:number], trace.steps[number]
    header, kept = trace.header, step.accepted_prefix_length
    other = _another_token(header, header.first_token)
    first, *later = (*before, step)
    yield (
        "first_token",
        _up_to(trace, replace(first, anchor_token=other), *later, first_token=other),
    )
    for name in ("hidden_digest", "target_rows_digest"):
        digest = getattr(step, name)
        digest = ("1" if digest[0] == "0" else "0") + digest[1:]
        yield name, _up_to(trace, *before, replace(step, **{name: digest}))
    *rows, row = step.target_token_ids
    unlikely = max({*range(header.vocab_size - len(row) - 1, header.vocab_size)} - {*row})
    listed = (*rows, (*row[:-1], unlikely))
    yield "target_token_ids", _up_to(trace, *before, replace(step, target_token_ids=listed))
    if kept and not header.greedy:
        bonus = _another_token(header, step.bonus_token)
        for name, value in (("accepted_prefix_length", kept - 1), ("bonus_token", bonus)):
            changed = replace(step, committed_rows=1, **{name: value})
            yield name, _up_to(trace, *before, changed)
    if kept:
        changed = replace(step, committed_rows=kept)
        yield "committed_rows", _up_to(trace, *before, changed, stop_reason="context_full")


def _another_token(header: TraceHeader, token: int | None) -> int:
    """Another one, by which no reply ends."""
    taken = {token, *header.stop_token_ids}
    return next(one for one in range(header.vocab_size) if one not in taken)


def _up_to(trace: Trace, *steps: StepRecord, **header: Any) -> Trace:
    """A trace of `steps` with other values in the header."""
    held = len(trace.header.prompt_token_ids) + sum(step.committed_rows for step in steps)
    routes = tuple(route for route in trace.routes if route.sequence_position < held)
    values = {"stop_reason": "cancelled", "route_count": len(routes), **header}
    return Trace(replace(trace.header, step_count=len(steps), **values), steps, routes)


def _record(
    engine: Engine,
    identity: TargetIdentity,
    drafter: Drafter | None,
    prompt: str,
    sampling: Sampling,
    keep_hidden: bool = True,
) -> Trace:
    return record(
        Session(engine.target, drafter),
        identity,
        engine.tokenizer.encode(prompt),
        stop_tokens=engine.tokenizer.stop_tokens,
        sampling=sampling,
        seed=0,
        max_tokens=TOKENS,
        keep_hidden=keep_hidden,
    )
