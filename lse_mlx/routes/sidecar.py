"""The route sidecar: predicted experts are asked for ahead of a pass, and the target never knows.

The target's own router is the only authority. A predictor sees positions, tokens and what the router
chose before; what it says becomes prefetch tickets and nothing else. Whether it is right decides how
long a simulated store keeps passes waiting, and no bit of what they compute.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.decode.session import Session
from lse_mlx.drafters.base import Drafter
from lse_mlx.errors import ProtocolError, RequestError, reason, shown
from lse_mlx.protocol.tickets import RouteLedger, Ticket
from lse_mlx.routes.predictors import Prediction, RoutePredictor, Routes
from lse_mlx.routes.report import Recall, RouteReport
from lse_mlx.routes.store import ExpertStore, StoreCosts
from lse_mlx.target.model import Pass, Target
from lse_mlx.target.state import TargetState


@dataclass(frozen=True)
class Asked:
    """What was predicted of one layer at one position, and whether that was given a ticket."""

    prediction: Prediction = Prediction((), ())
    ticketed: bool = False


class RouteSidecar:
    """Tickets, a simulated store and a predictor beside a target of experts, for request after request.

    Its session says what each pass is about to read and which routes it took. Who decodes in it opens
    a `request` and calls `settle` after each pass, as `lse_mlx.traces.recording.record` does.

    ledger: the tickets; store: what they fetch from
    """

    def __init__(
        self, target: Target, predictor: RoutePredictor | None, costs: StoreCosts | None = None
    ):
        """predictor: None asks for nothing ahead of time, which is what others are compared with.

        Raises RequestError for a target without experts.
        """
        self._target, self._sizes = target, target.expert_sizes
        if not self._sizes:
            raise RequestError(
                "The target has no layers of experts, so there are no routes to predict: "
                "load a qwen3_5_moe one."
            )
        self.ledger = RouteLedger()
        stored = {layer: sizes.expert_bytes for layer, sizes in self._sizes.items()}
        self.store = ExpertStore(costs or StoreCosts(), stored, self._arrived)
        self._predictor = predictor
        self._owner, self._generation = "", 0
        self._asked: dict[tuple[int, int], Asked] = {}
        self._recall = dict.fromkeys(sorted(self._sizes), Recall())
        self._passes = self._rows = 0

    def session(self, drafter: Drafter | None) -> Session:
        """A session on the sidecar's target, of whose passes it is told before they run."""
        return Session(WatchedTarget.of(self._target, self), drafter)

    @contextmanager
    def request(self, owner: str, generation: int) -> Iterator[None]:
        """One request: its verify passes run inside, finished or aborted; see `RouteLedger.open`.

        What is on its way at the end may still fill the cache.
        """
        self._withdraw(self.ledger.open(owner, generation))
        self._owner, self._generation = owner, generation
        try:
            yield
        finally:
            self._withdraw(self.ledger.close(owner, generation))

    def ask(self, position: int, tokens: list[int]) -> None:
        """Before a pass over `tokens` from `position` on: ask for what is predicted of each.

        Raises ProtocolError for a prediction that names no layer or expert of the target, and for a
        predictor that fails.
        """
        self._passes += 1
        self._asked.clear()
        if self._predictor is not None:
            for row, token in enumerate(tokens):
                with _predictor_failures():
                    guesses = _predictions(self._predictor.predict(position + row, token))
                for layer, guess in guesses.items():
                    self._check(layer, guess)
                    self._asked[layer, position + row] = Asked(guess)
        # By layer: what is needed first is fetched first.
        for layer, place in sorted(self._asked):
            guess = self._asked[layer, place].prediction
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
            self._asked[layer, place] = Asked(guess, bool(missing))
        self.store.advance(self.store.costs.draft_us)

    def asked(self, layer: int, position: int) -> Asked:
        """What was predicted before the last pass, of one of its positions."""
        return self._asked.get((layer, position), Asked())

    def demand(self, routes: Routes) -> None:
        """During the pass: layer by layer, the experts that the router chose for any of its rows."""
        for layer in range(self._target.layer_count):
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
        self._withdraw(left)
        self._rows += committed
        for layer, chosen in routes.items():
            for row in range(committed):
                native = set(chosen[row].tolist())
                guess = self.asked(layer, position + row).prediction
                self._recall[layer] += Recall(len(native), len(native & set(guess.experts)))
        self.observe(position, {layer: chosen[:committed] for layer, chosen in routes.items()})

    def observe(self, position: int, routes: Routes) -> None:
        """Tell the predictor the routes of committed rows."""
        if self._predictor is not None:
            with _predictor_failures():
                self._predictor.observe(position, {k: rows.copy() for k, rows in routes.items()})

    def report(self, settled: bool = False) -> RouteReport:
        """The numbers so far; settled: let what is on its way arrive first."""
        store = self.store
        if settled:
            store.drain()
        return RouteReport(
            recall=dict(self._recall),
            passes=self._passes,
            committed_rows=self._rows,
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

    def _withdraw(self, ended: list[Ticket]) -> None:
        for dropped in self.store.withdraw([ticket.id for ticket in ended]):
            self.ledger.call_off(dropped)

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


def sidecar_of(session: Session) -> RouteSidecar | None:
    """The sidecar that `session` is of; None for any other session."""
    return session.target.sidecar if isinstance(session.target, WatchedTarget) else None


@contextmanager
def _predictor_failures() -> Iterator[None]:
    """Name what a predictor raises as its own, whatever it is: the target has not failed."""
    try:
        yield
    except Exception as error:
        raise ProtocolError(
            "predicted_expert_ids",
            f"predicted_expert_ids cannot be had, because the predictor failed ({reason(error)}): "
            "mend it, or decode without it.",
        ) from error


def _predictions(said: Mapping[int, Prediction]) -> dict[int, Prediction]:
    """What a predictor said, if it is of the right kind."""
    for guess in said.values():
        if not isinstance(guess, Prediction):
            raise TypeError(f"it predicts {shown(guess)}, which is no Prediction")
    return dict(said)


def in_numpy(routes: Mapping[int, mx.array]) -> dict[int, NDArray[np.int32]]:
    """The routes of a pass on the host."""
    return {layer: np.array(chosen) for layer, chosen in routes.items()}
