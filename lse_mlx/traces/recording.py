"""Recording a generation: the engine's own decode cycle, watched."""

import secrets
from collections.abc import Iterable
from contextlib import nullcontext
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
from lse_mlx.decode.values import room_after
from lse_mlx.errors import RequestError, shown
from lse_mlx.protocol.fields import LARGEST_SEED, check_text
from lse_mlx.protocol.records import RouteRecord, StepRecord, TraceHeader
from lse_mlx.protocol.trace import Trace, payload_name
from lse_mlx.protocol.trace_files import write_trace
from lse_mlx.routes.sidecar import RouteSidecar, in_numpy, sidecar_of
from lse_mlx.traces.identity import TargetIdentity, device_of
from lse_mlx.traces.steps import DTYPE, STAGE, Origin, first_token, in_float32


@dataclass
class Recording:
    """The records of a request so far.

    keep_hidden: keep the hidden rows too, besides their digests
    sidecar: what predicts routes; it is told of each pass
    """

    origin: Origin
    keep_hidden: bool
    sidecar: RouteSidecar | None = None
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
        self.routes += self.origin.routes(cycle, self.sidecar)
        if self.sidecar is not None:
            self.sidecar.settle(cycle.position, in_numpy(cycle.answer.routes), cycle.cut.rows)


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

    session: of an engine, or of a sidecar, whose predictions are then in the routes
    identity: of the session's target
    prompt: token ids, at least one; stop_tokens: ids that end the reply, those of the vocabulary
    sampling: greedy if None; seed: a fresh one if None; max_tokens: as in `Limits`
    owner: who asks, at most 200 characters; the session's own random name if None
    keep_hidden: False keeps the digests of hidden rows alone

    The generation is the session's turn, which is 1 in its first reply and grows with every other one,
    recorded or not. So an owner that is given should be given to one session alone.

    Raises what `decode` raises, and DraftError where the drafter fails; RequestError for a prompt that
    leaves no room for a reply and for a seed that no record holds; ProtocolError for another owner,
    and for what a sidecar refuses.
    """
    owner = session.owner if owner is None else owner
    check_text("request_owner", owner)
    sampling = sampling or Sampling()
    target, drafter = session.target, session.drafter
    room = room_after(prompt, target.context_length)
    ends = frozenset(token for token in stop_tokens if token < target.vocab_size)
    limits = Limits(ends, max_tokens, room)
    if seed is None:  # of a greedy reply nothing is drawn
        seed = secrets.randbits(32) if sampling.temperature > 0 else 0
    request = Request(prompt, sampling, limits, seed, speculate=True, strict_draft=True)
    if seed >= LARGEST_SEED:
        raise RequestError(f"seed is {shown(seed)}: give one below 2 to the power of 1024.")
    timings = Timings() if drafter is None else Timings(drafter.name, drafter.depth)
    layers = () if drafter is None else drafter.taps
    steps = decode(session, request, timings)
    opening = next(steps)
    sidecar, generation = sidecar_of(session), session.turn
    origin = Origin(identity, owner, generation, layers)
    recording, reason = Recording(origin, keep_hidden, sidecar), opening.reason
    with nullcontext() if sidecar is None else sidecar.request(owner, generation):
        for step in steps:
            assert step.cycle is not None  # nobody cancels
            recording.add(step.cycle)
            reason = step.reason
    return _trace(session, recording, request, first_token(opening), reason)


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
    most = request.limits.max_tokens
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
        max_tokens=None if most is None else int(most),
        stop_token_ids=tuple(sorted(request.limits.stop_tokens)),
        stop_reason=reason,
        step_count=len(recording.steps),
        route_count=len(recording.routes),
        drafter=None if session.drafter is None else session.drafter.name,
        device=device_of(target),
        package_version=version("lse-mlx"),
    )
    return Trace(header, tuple(recording.steps), tuple(recording.routes), dict(recording.payloads))
