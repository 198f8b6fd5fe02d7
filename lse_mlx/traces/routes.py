"""The route sidecar: predicted experts are asked for ahead of a pass, and the target never knows.

The target's own router is the only authority. A predictor sees positions, tokens and what the router
chose before; what it says becomes prefetch tickets and nothing else. Whether it is right decides how
long a simulated store keeps passes waiting, and no bit of what they compute.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.decode.loop import Cycle, Request, decode
from lse_mlx.decode.session import Session
from lse_mlx.decode.stopping import StopReason
from lse_mlx.decode.timings import Timings
from lse_mlx.drafters.base import Drafter
from lse_mlx.errors import ProtocolError, RequestError
from lse_mlx.protocol.route_records import RouteRecord
from lse_mlx.protocol.tickets import RouteLedger
from lse_mlx.target.model import Pass, Target
from lse_mlx.target.state import TargetState
from lse_mlx.traces.expert_store import ExpertStore, StoreCosts
from lse_mlx.traces.route_predictors import Prediction, RoutePredictor, Routes
from lse_mlx.traces.route_report import Recall, RouteReport


class RouteSidecar:
    """Tickets, a simulated store and a predictor beside a target of experts, for request after request.

    ledger: the tickets; store: what they fetch from
    records: of every committed row of a verify pass, a record for each layer of experts
    """

    def __init__(
        self, target: Target, predictor: RoutePredictor | None, costs: StoreCosts | None = None
    ):
        """predictor: None asks for nothing ahead of time, which is what others are compared with.

        Raises RequestError for a target without experts.
        """
        self._sizes = target.expert_sizes
        if not self._sizes:
            raise RequestError(
                "The target has no layers of experts, so there are no routes to predict: "
                "load a qwen3_5_moe one."
            )
        self.ledger = RouteLedger()
        stored = {layer: sizes.expert_bytes for layer, sizes in self._sizes.items()}
        self.store = ExpertStore(costs or StoreCosts(), stored, self._arrived)
        self.records: list[RouteRecord] = []
        self._predictor = predictor
        self._layers = target.layer_count
        self._owner, self._generation = "", 0
        self._predicted: dict[tuple[int, int], tuple[Prediction, bool]] = {}
        self._recall = dict.fromkeys(sorted(self._sizes), Recall())
        self._passes = 0

    def begin(self, owner: str, generation: int) -> None:
        """A request begins; see `RouteLedger.open`."""
        self._withdraw([ticket.id for ticket in self.ledger.open(owner, generation)])
        self._owner, self._generation = owner, generation

    def end(self) -> None:
        """The request is over, finished or aborted. What is on its way may still fill the cache."""
        left = self.ledger.close(self._owner, self._generation)
        self._withdraw([ticket.id for ticket in left])

    def ask(self, position: int, tokens: list[int]) -> None:
        """Before a pass over `tokens` from `position` on: ask for what is predicted of each.

        Raises ProtocolError for a prediction that names no layer or expert of the target.
        """
        self._passes += 1
        self._predicted.clear()
        if self._predictor is not None:
            for row, token in enumerate(tokens):
                for layer, guess in self._predictor.predict(position + row, token).items():
                    self._check(layer, guess)
                    self._predicted[layer, position + row] = guess, False
        # By layer: what is needed first is fetched first.
        for (layer, place), (guess, _) in sorted(self._predicted.items(), key=lambda held: held[0]):
            missing = [e for e in guess.experts if not self.store.holds((layer, e))]
            for expert in missing:
                ticket = self.ledger.issue(
                    self._owner,
                    self._generation,
                    layer=layer,
                    expert=expert,
                    position=place,
                    deadline=self.ledger.now + 1,
                )
                self.store.prefetch((layer, expert), ticket.id)
            self._predicted[layer, place] = guess, bool(missing)
        self.store.advance(self.store.costs.draft_us)

    def demand(self, routes: Routes) -> None:
        """During the pass: layer by layer, the experts that the router chose for any of its rows."""
        for layer in range(self._layers):
            if layer in routes:
                chosen = dict.fromkeys(routes[layer].flatten().tolist())
                self.store.demand([(layer, expert) for expert in chosen])
            self.store.advance(self.store.costs.layer_us)

    def settle(self, position: int, routes: Routes, committed: int) -> None:
        """After the pass: its first `committed` rows stay, and the others were never there.

        The tickets of the others are cancelled. Those of the committed rows expire: their layers are
        computed.
        """
        left = self.ledger.cancel(self._owner, self._generation, position + committed)
        left += self.ledger.advance()
        self._withdraw([ticket.id for ticket in left])
        for row in range(committed):
            for layer, chosen in sorted(routes.items()):
                self._record(position + row, layer, tuple(chosen[row].tolist()))
        self.observe(position, {layer: chosen[:committed] for layer, chosen in routes.items()})

    def observe(self, position: int, routes: Routes) -> None:
        """Tell the predictor the routes of committed rows."""
        if self._predictor is not None:
            self._predictor.observe(position, {k: rows.copy() for k, rows in routes.items()})

    def report(self) -> RouteReport:
        """The numbers so far."""
        store = self.store
        layers = len(self._recall)
        return RouteReport(
            recall=dict(self._recall),
            passes=self._passes,
            committed_rows=len(self.records) // layers,
            bytes_early=store.early_bytes,
            bytes_used=store.used_bytes,
            bytes_on_demand=store.demand_bytes,
            bytes_demanded=store.demanded_bytes,
            exposed_wait_ms=store.exposed_us / 1000,
            tickets=self.ledger.counts(),
        )

    def _arrived(self, ticket: int) -> None:
        held = self.ledger.held(ticket)
        self.ledger.complete(ticket, held.owner, held.generation)

    def _withdraw(self, tickets: list[int]) -> None:
        for dropped in self.store.withdraw(tickets):
            self.ledger.call_off(dropped)

    def _record(self, position: int, layer: int, native: tuple[int, ...]) -> None:
        guess, asked = self._predicted.get((layer, position), (Prediction((), ()), False))
        hits = len(set(native) & set(guess.experts))
        self._recall[layer] += Recall(len(native), hits)
        self.records.append(
            RouteRecord(
                request_owner=self._owner,
                request_generation=self._generation,
                sequence_position=position,
                target_route_layer=layer,
                target_top_k=len(native),
                target_expert_ids_in_native_rank_order=native,
                predicted_expert_ids=guess.experts,
                prediction_confidence=guess.confidence,
                prefetch_ticket_owner=self._owner if asked else None,
                prefetch_ticket_generation=self._generation if asked else None,
            )
        )

    def _check(self, layer: int, guess: Prediction) -> None:
        sizes = self._sizes.get(layer)
        if sizes is None:
            raise ProtocolError(
                "target_route_layer",
                f"target_route_layer is {layer!r}, where the target has no experts: predict for "
                f"the layers {sorted(self._sizes)}.",
            )
        known = all(type(e) is int and 0 <= e < sizes.experts for e in guess.experts)
        if not known or len(set(guess.experts)) != len(guess.experts):
            raise ProtocolError(
                "predicted_expert_ids",
                f"predicted_expert_ids is {guess.experts!r}, and layer {layer} has experts 0 to "
                f"{sizes.experts - 1}: name each of those once at most.",
            )
        shares = all(type(c) is float and 0 <= c <= 1 for c in guess.confidence)
        if not shares or len(guess.confidence) != len(guess.experts):
            raise ProtocolError(
                "prediction_confidence",
                f"prediction_confidence is {guess.confidence!r}: give one number from 0 to 1 for "
                f"each of the {len(guess.experts)} predicted experts.",
            )


@dataclass(frozen=True)
class WatchedTarget(Target):
    """A target that says which tokens a pass is about to read, and which routes it took."""

    sidecar: RouteSidecar = field(kw_only=True, repr=False)

    @classmethod
    def of(cls, target: Target, sidecar: RouteSidecar) -> "WatchedTarget":
        """The same weights, watched."""
        held = {each.name: getattr(target, each.name) for each in fields(Target)}
        return cls(**held, sidecar=sidecar)

    def advance(self, tokens: list[int], state: TargetState, taps: tuple[int, ...]) -> Pass:
        """See `Target`. The simulated clock stands still while a prompt is read."""
        position = state.position
        answer = super().advance(tokens, state, taps)
        self.sidecar.observe(position, in_numpy(answer.routes))
        return answer

    def verify(self, tokens: list[int], state: TargetState, taps: tuple[int, ...]) -> Pass:
        """See `Target`."""
        self.sidecar.ask(state.position, list(tokens))
        answer = super().verify(tokens, state, taps)
        self.sidecar.demand(in_numpy(answer.routes))
        return answer


@dataclass(frozen=True)
class RoutedReply:
    """A reply of a target of experts: its tokens, why it ended, and what its session then held."""

    tokens: list[int]
    reason: StopReason
    session: Session


def decode_with_sidecar(
    target: Target,
    drafter: Drafter | None,
    request: Request,
    sidecar: RouteSidecar,
    *,
    owner: str,
    generation: int = 0,
    watch: Callable[[Cycle], None] | None = None,
) -> RoutedReply:
    """Decode `request` in a session of its own, while `sidecar` predicts, asks and accounts.

    sidecar: made for `target`; its store keeps its contents from one request to the next
    owner, generation: of the request, see `RouteLedger.open`
    watch: called with every verify pass, for instance to record it

    The tokens are those of decoding without the sidecar, whatever it predicts. Raises what `decode`
    raises, and ProtocolError for a generation that is not newer or a prediction that is none; the
    request is then over for the ledger too.
    """
    session = Session(WatchedTarget.of(target, sidecar), drafter)
    timings = Timings() if drafter is None else Timings(drafter.name, drafter.depth)
    tokens: list[int] = []
    reason: StopReason | None = None
    sidecar.begin(owner, generation)
    try:
        for step in decode(session, request, timings):
            tokens += step.tokens
            reason = step.reason
            if step.cycle is not None:
                cycle = step.cycle
                sidecar.settle(cycle.position, in_numpy(cycle.answer.routes), cycle.cut.rows)
                if watch is not None:
                    watch(cycle)
    finally:
        sidecar.end()
    assert reason is not None  # the last step has one
    return RoutedReply(tokens, reason, session)


def in_numpy(routes: Mapping[int, mx.array]) -> dict[int, NDArray[np.int32]]:
    """The routes of a pass on the host."""
    return {layer: np.array(chosen) for layer, chosen in routes.items()}
