"""Recording a generation: the engine's own decode cycle, watched."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lse_mlx.checkpoints.conversion.new_folder import new_folder
from lse_mlx.decode.loop import Cycle, Request, decode
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.decode.stopping import Limits, StopReason
from lse_mlx.decode.timings import Timings
from lse_mlx.errors import RequestError
from lse_mlx.protocol.digests import payload_name
from lse_mlx.protocol.records import StepRecord, TraceHeader
from lse_mlx.protocol.route_records import RouteRecord
from lse_mlx.protocol.trace import Trace
from lse_mlx.protocol.trace_files import write_trace
from lse_mlx.protocol.values import check_text
from lse_mlx.traces.identity import TargetIdentity, device_of
from lse_mlx.traces.steps import DTYPE, STAGE, Origin, in_float32, opening_token


@dataclass
class Recording:
    """The records of a request so far.

    keep_hidden: keep the hidden rows too, besides their digests
    """

    origin: Origin
    keep_hidden: bool
    steps: list[StepRecord] = field(default_factory=list)
    routes: list[RouteRecord] = field(default_factory=list)
    payloads: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def add(self, cycle: Cycle) -> None:
        """Take in one pass."""
        name = None
        if self.keep_hidden and self.origin.captured_layer_ids:
            name = payload_name(len(self.steps) + 1)
            self.payloads[name] = in_float32(cycle.answer.features)
        self.steps.append(self.origin.step(cycle, name))
        self.routes += self.origin.routes(cycle)


def record(
    session: Session,
    identity: TargetIdentity,
    prompt: list[int],
    *,
    stop_tokens: Iterable[int],
    sampling: Sampling | None = None,
    seed: int | None = None,
    max_tokens: int | None = None,
    owner: str | None = None,
    keep_hidden: bool = True,
) -> Trace:
    """Answer `prompt` in `session` and return the trace of it.

    identity: of the session's target
    prompt: token ids, at least one; stop_tokens: ids that end the reply
    sampling: greedy if None; seed: a fresh one if None; max_tokens: as in `Limits`
    owner: who asks, at most 200 characters; a fresh random name if None
    keep_hidden: False keeps the digests of hidden rows alone

    The generation is the session's turn. Raises what `decode` raises, and DraftError where the drafter
    fails; RequestError for a prompt that leaves no room for a reply; ProtocolError for another owner.
    """
    if owner is None:
        owner = secrets.token_hex(16)
    check_text("request_owner", owner)
    sampling = sampling or Sampling()
    target, drafter = session.target, session.drafter
    room = target.context_length - len(prompt)
    if room < 1:
        raise RequestError(
            f"The prompt has {len(prompt)} tokens and the context holds {target.context_length} "
            "with the reply: shorten the prompt."
        )
    limits = Limits(frozenset(stop_tokens), max_tokens, room)
    if seed is None:  # of a greedy reply nothing is drawn
        seed = secrets.randbits(32) if sampling.temperature > 0 else 0
    request = Request(prompt, sampling, limits, seed, speculate=True, strict_draft=True)
    timings = Timings() if drafter is None else Timings(drafter.name, drafter.depth)
    layers = () if drafter is None else drafter.taps
    steps = decode(session, request, timings)
    opening = next(steps)
    origin = Origin(identity, owner, session.turn, layers)
    recording, reason = Recording(origin, keep_hidden), opening.reason
    for step in steps:
        assert step.cycle is not None  # nobody cancels
        recording.add(step.cycle)
        reason = step.reason
    first = opening_token(target, request, opening)
    return _trace(session, recording, request, first, reason)


def write(trace: Trace, folder: Path) -> None:
    """Write the trace to `folder`, which appears whole or not at all.

    Raises CheckpointError where `folder` exists already or cannot be made.
    """
    with new_folder(folder) as place:
        write_trace(place, trace)


def _trace(
    session: Session, recording: Recording, request: Request, first: int, reason: StopReason | None
) -> Trace:
    target, sampling, origin = session.target, request.sampling, recording.origin
    assert reason is not None  # the last step has one
    header = TraceHeader(
        target_model_revision=origin.identity.target_model_revision,
        tokenizer_revision=origin.identity.tokenizer_revision,
        vocab_size=target.vocab_size,
        layer_count=target.layer_count,
        hidden_size=target.hidden_size,
        captured_stage=STAGE,
        captured_layer_ids=origin.captured_layer_ids,
        hidden_dtype=DTYPE,
        request_owner=origin.request_owner,
        request_generation=origin.request_generation,
        prompt_token_ids=tuple(request.prompt),
        first_token=first,
        temperature=float(sampling.temperature),
        top_k=int(sampling.top_k),
        top_p=float(sampling.top_p),
        min_p=float(sampling.min_p),
        seed=int(request.seed),
        max_tokens=request.limits.max_tokens,
        stop_token_ids=tuple(sorted(request.limits.stop_tokens)),
        stop_reason=reason,
        step_count=len(recording.steps),
        route_count=len(recording.routes),
        drafter=None if session.drafter is None else session.drafter.name,
        device=device_of(target),
        package_version=version("lse-mlx"),
    )
    return Trace(header, tuple(recording.steps), tuple(recording.routes), dict(recording.payloads))
