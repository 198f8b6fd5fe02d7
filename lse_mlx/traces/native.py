"""The engine's own decode cycle as what a replay drives: nothing is decided but by the target."""

from collections.abc import Iterator
from hashlib import sha256

from lse_mlx.decode.loop import PREFILL_ROWS, Request, Step, decode
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.decode.stopping import Limits
from lse_mlx.decode.timings import Timings
from lse_mlx.decode.values import room_after
from lse_mlx.drafters.base import Proposal
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import ProtocolError, RequestError
from lse_mlx.protocol.native import NativeIdentity, NativeStart, NativeStep
from lse_mlx.protocol.records import StepRecord, TraceHeader
from lse_mlx.protocol.replay import ReplayReport, replay
from lse_mlx.protocol.trace import Trace, rows_digest
from lse_mlx.target.model import Target
from lse_mlx.target.state import DeltaState, TargetState
from lse_mlx.traces.identity import TargetIdentity, device_of
from lse_mlx.traces.steps import (
    DTYPE,
    LIKELIEST,
    STAGE,
    first_token,
    in_float32,
    native_step,
    proposal_of,
)


def replay_on(
    target: Target,
    identity: TargetIdentity,
    trace: Trace,
    *,
    layers: tuple[int, ...] | None = None,
    owner: str | None = None,
    generation: int | None = None,
) -> ReplayReport:
    """Replay `trace` on `target`; no drafter is needed.

    identity: of the target, by `identify`
    layers: what a trace has to have captured; owner, generation: the request that it has to be of.
    Where one is None, the trace's own word is taken

    Raises ProtocolError before any step, naming the field, for a trace of anything else.
    """
    header = trace.header
    depth = max((len(step.selected_candidate_path) for step in trace.steps), default=0)
    native = LoopNative(
        target,
        identity,
        depth=depth,
        layers=header.captured_layer_ids if layers is None else layers,
        owner=header.request_owner if owner is None else owner,
        generation=header.request_generation if generation is None else generation,
    )
    return replay(trace, native)


class LoopNative:
    """A loaded target as `protocol.native.Native`, for one replay of one request.

    The decode cycle runs as ever, with a drafter that proposes the recorded paths with the recorded q.
    """

    def __init__(
        self,
        target: Target,
        identity: TargetIdentity,
        *,
        depth: int,
        layers: tuple[int, ...],
        owner: str,
        generation: int,
    ):
        """depth: the longest path of the trace; layers: whose outputs are captured, in order."""
        self._target = target
        self._identity = identity
        self._layers = layers
        self._owner = owner
        self._generation = generation
        self._proposals: list[Proposal] = []  # of every pass, which asks for it by its number
        self._drafter = ScriptedDrafter(lambda _, draft: self._proposals[draft], depth, layers)
        self._session = Session(target, self._drafter)
        self._steps: Iterator[Step] = iter(())
        self._greedy = True

    def identity(self) -> NativeIdentity:
        """What the target is and whom it serves."""
        return NativeIdentity(
            target_model_revision=self._identity.target_model_revision,
            tokenizer_revision=self._identity.tokenizer_revision,
            vocab_size=self._target.vocab_size,
            layer_count=self._target.layer_count,
            hidden_size=self._target.hidden_size,
            captured_stage=STAGE,
            captured_layer_ids=self._layers,
            hidden_dtype=DTYPE,
            request_owner=self._owner,
            request_generation=self._generation,
            device=device_of(self._target),
        )

    def start(self, header: TraceHeader) -> NativeStart:
        """Read the prompt into an empty state and choose the first token.

        Raises ProtocolError for a prompt that leaves no room in this target's context.
        """
        prompt = list(header.prompt_token_ids)
        try:
            room = room_after(prompt, self._target.context_length)
        except RequestError as error:
            raise ProtocolError("prompt_token_ids", f"prompt_token_ids: {error}") from error
        sampling = Sampling(header.temperature, header.top_k, header.top_p, header.min_p)
        limits = Limits(frozenset(header.stop_token_ids), header.max_tokens, room)
        request = Request(prompt, sampling, limits, header.seed, speculate=True, strict_draft=True)
        self._greedy = header.greedy
        timings = Timings(self._drafter.name, self._drafter.depth)
        self._steps = decode(self._session, request, timings)
        step = next(self._steps)
        return NativeStart(first_token=first_token(step), stop_reason=step.reason)

    def verify(self, record: StepRecord) -> NativeStep:
        """One pass over the native anchor and the recorded path."""
        self._proposals.append(proposal_of(record, self._greedy))
        step = next(self._steps, None)
        if step is None or step.cycle is None:
            raise ProtocolError(
                "step_count",
                f"step_count is larger than the reply: it ended before position "
                f"{record.sequence_position}; record it again.",
            )
        counts = [len(ids) for ids in record.target_token_ids]
        rows = len(step.cycle.rows)
        return native_step(step.cycle, (counts + [LIKELIEST] * rows)[:rows])

    def state_digest(self) -> str:
        """SHA-256 over every array of the state, settled."""
        return _digest(self._session.state)

    def cold_digest(self) -> str | None:
        """The same after reading the session's tokens in pieces of a prompt; None on a device."""
        if self._target.registry.on_device:
            return None  # there a row's bits may depend on how many rows are in the pass
        tokens, state = self._session.tokens, self._target.new_state()
        for at in range(0, len(tokens), PREFILL_ROWS):
            self._target.advance(tokens[at : at + PREFILL_ROWS], state, ())
        return _digest(state)


def _digest(state: TargetState) -> str:
    """Over the digests of each layer's arrays for the committed tokens, in order."""
    state.settle()
    digests: list[str] = []
    for layer in state.layers:
        if isinstance(layer, DeltaState):
            held = [layer.tail, layer.recurrent]
        elif layer.keys is None:
            held = []
        else:
            held = [kept[:, :, : layer.offset] for kept in (layer.keys, layer.values)]
        digests += [rows_digest(in_float32(array)) for array in held]
    return sha256("".join(digests).encode()).hexdigest()
