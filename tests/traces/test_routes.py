"""The route sidecar beside a tiny target of experts: it predicts, asks and accounts, and no more."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lse_mlx.decode.loop import Cycle, Request
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import ProtocolError, RequestError
from lse_mlx.target.model import Target
from lse_mlx.traces.expert_store import StoreCosts
from lse_mlx.traces.route_predictors import Prediction, Previous, RoutePredictor
from lse_mlx.traces.routes import RouteSidecar, decode_with_sidecar
from tests.decode.runs import TAPS, known_sequence, request, run
from tests.states import Held, assert_same, held_by
from tests.tiny_models import VOCAB, load_tiny, on_cpu, random_prompt, save_checkpoint
from tests.traces.slow_store import SlowPass, SlowStore

COUNT = 24
LAYERS, EXPERTS, TOP, BYTES = 5, 12, 3, 3 * 2 * 64 * 64
COSTS = StoreCosts(bytes_per_us=4096, latency_us=2, cache_bytes=25 * BYTES, draft_us=40, layer_us=7)
SAMPLED = Sampling(temperature=0.9, top_k=20)
Native = dict[int, dict[int, tuple[int, ...]]]
"""By position, then by layer, what the router chose."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_tiny(save_checkpoint(tmp_path_factory.mktemp("tiny") / "moe", "moe"))


@dataclass(frozen=True)
class Known:
    """A prompt, the target's greedy reply, and the routes of each of their tokens."""

    prompt: list[int]
    tokens: list[int]
    native: Native


@pytest.fixture(scope="module")
def known(target: Target) -> Known:
    prompt = random_prompt(9, seed=2)
    tokens = known_sequence(target, prompt, COUNT).tokens
    with on_cpu():  # one token at a time, so nothing here is drafted
        state, native = target.new_state(), {}
        for position, token in enumerate(tokens):
            routes = target.advance([token], state, ()).routes
            native[position] = {
                k: tuple(np.array(chosen)[0].tolist()) for k, chosen in routes.items()
            }
    return Known(prompt, tokens, native)


def certain(experts: tuple[int, ...]) -> Prediction:
    return Prediction(experts, (1.0,) * len(experts))


@dataclass
class Scripted:
    """Predicts what a function says of a position and a layer, and keeps what it is told."""

    guess: Callable[[int, int], tuple[int, ...]]
    told: list[tuple[int, dict[int, list[list[int]]]]] = field(default_factory=list)

    def predict(self, position: int, token: int) -> Mapping[int, Prediction]:
        return {layer: certain(self.guess(position, layer)) for layer in range(LAYERS)}

    def observe(self, position: int, routes: Mapping[int, NDArray[np.int32]]) -> None:
        self.told.append((position, {layer: rows.tolist() for layer, rows in routes.items()}))
        for rows in routes.values():
            rows[:] = 0  # whatever it does to what it was given


def oracle(native: Native) -> Scripted:
    return Scripted(lambda position, layer: native.get(position, {}).get(layer, ()))


def wrong(native: Native) -> Scripted:
    """Every expert that was not chosen, in some order."""

    def guess(position: int, layer: int) -> tuple[int, ...]:
        chosen = native.get(position, {}).get(layer, ())
        return tuple(e for e in (7, 3, 11, 0, 5, 1, 9, 2, 10, 4, 8, 6) if e not in chosen)

    return Scripted(guess)


def predictors(native: Native) -> dict[str, RoutePredictor | None]:
    return {
        "none": None,
        "previous": Previous(),
        "oracle": oracle(native),
        "wrong": wrong(native),
    }


@dataclass
class Outcome:
    """Everything that a request computes: tokens, digests of each pass, and the state at its end."""

    tokens: list[int]
    reason: str | None
    passes: list[tuple[int, int, str, str]]
    state: Held


def digest(array: Any) -> str:
    return sha256(np.array(array).tobytes()).hexdigest()


def watched(
    target: Target, known: Known, sidecar: RouteSidecar, right: int = 3, **options: Any
) -> tuple[Outcome, list[Cycle]]:
    """The reply with the sidecar; its drafter is right for `right` tokens of each proposal."""
    cycles: list[Cycle] = []
    drafter = ScriptedDrafter.right_for(known.tokens, right, VOCAB, taps=TAPS)
    with on_cpu():
        reply = decode_with_sidecar(
            target, drafter, asked(known, **options), sidecar, owner="a", watch=cycles.append
        )
        passes = [
            (c.position, c.cut.rows, digest(c.answer.logits), digest(c.answer.features))
            for c in cycles
        ]
        return Outcome(reply.tokens, reply.reason, passes, held_by(reply.session.state)), cycles


def asked(known: Known, **options: Any) -> Request:
    settings: dict[str, Any] = {"max_tokens": COUNT} | options
    return request(known.prompt, **settings)


def sidecar_of(target: Target, predictor: RoutePredictor | None) -> RouteSidecar:
    return RouteSidecar(target, predictor, COSTS)


# Nothing of the target changes


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("right", [0, 3, 7])
def test_no_prediction_changes_a_bit(
    target: Target, known: Known, right: int, sampling: Sampling
) -> None:
    outcomes = {
        name: watched(target, known, sidecar_of(target, predictor), right, sampling=sampling)[0]
        for name, predictor in predictors(known.native).items()
    }
    drafter = ScriptedDrafter.right_for(known.tokens, right, VOCAB, taps=TAPS)
    session = Session(target, drafter)
    with on_cpu():
        alone = run(session, known.prompt, max_tokens=COUNT, sampling=sampling)
    for outcome in outcomes.values():
        assert (outcome.tokens, outcome.reason) == (alone.tokens, alone.reason)
        assert outcome.passes == outcomes["none"].passes
        assert_same(outcome.state, held_by(session.state))
    if sampling.temperature == 0:
        assert alone.tokens == known.tokens[len(known.prompt) :]


def test_a_plain_reply_is_predicted_for_too(target: Target, known: Known) -> None:
    sidecar = sidecar_of(target, oracle(known.native))
    with on_cpu():
        reply = decode_with_sidecar(target, None, asked(known), sidecar, owner="a")
    assert reply.tokens == known.tokens[len(known.prompt) :]
    report = sidecar.report()
    assert (report.passes, report.committed_rows) == (COUNT - 1, COUNT - 1)
    assert report.total_recall.share == 1


def test_a_predictor_that_fails_leaves_nothing_behind(target: Target, known: Known) -> None:
    def guess(position: int, layer: int) -> tuple[int, ...]:
        if position > len(known.prompt) + 6 and layer == 3:
            raise KeyError("a predictor's own mistake")
        return (1, 2)

    sidecar = sidecar_of(target, Scripted(guess))
    with pytest.raises(KeyError, match="own mistake"):
        watched(target, known, sidecar)
    assert sidecar.ledger.live("a") is None
    assert sidecar.ledger.counts()["open"] == 0
    assert watched(target, known, sidecar_of(target, None))[0].tokens == known.tokens[9:]


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ({5: certain((1,))}, "target_route_layer"),
        ({0: certain((12,))}, "predicted_expert_ids"),
        ({0: certain((-1,))}, "predicted_expert_ids"),
        ({0: certain((3, 3))}, "predicted_expert_ids"),
        ({0: Prediction((3,), ())}, "prediction_confidence"),
        ({0: Prediction((3,), (1.5,))}, "prediction_confidence"),
        ({0: Prediction((3,), (float("nan"),))}, "prediction_confidence"),
    ],
    ids=str,
)
def test_a_prediction_that_is_none_is_refused(
    target: Target, known: Known, prediction: dict[int, Prediction], field: str
) -> None:
    class Odd(Previous):
        def predict(self, position: int, token: int) -> Mapping[int, Prediction]:
            return prediction

    sidecar = sidecar_of(target, Odd())
    with pytest.raises(ProtocolError, match=field) as refusal:
        watched(target, known, sidecar)
    assert refusal.value.field == field
    assert sidecar.ledger.live("a") is None


def test_a_dense_target_has_nothing_to_predict(tmp_path: Any) -> None:
    dense = load_tiny(save_checkpoint(tmp_path / "dense"))
    with pytest.raises(RequestError, match="no layers of experts"):
        RouteSidecar(dense, None)


# The records


@pytest.mark.parametrize("right", [0, 3, 7])
def test_records_hold_the_native_routes_of_every_committed_row(
    target: Target, known: Known, right: int
) -> None:
    sidecar = sidecar_of(target, Previous())
    watched(target, known, sidecar, right)
    first = len(known.prompt)
    committed = range(first, first + COUNT - 1)  # the last token is read by no pass
    assert [
        (r.sequence_position, r.target_route_layer, r.target_expert_ids_in_native_rank_order)
        for r in sidecar.records
    ] == [(at, layer, known.native[at][layer]) for at in committed for layer in range(LAYERS)]
    for record in sidecar.records:
        assert record.target_top_k == TOP
        assert (record.request_owner, record.request_generation) == ("a", 0)


def test_the_previous_routes_are_those_of_the_last_committed_row(
    target: Target, known: Known
) -> None:
    sidecar = sidecar_of(target, Previous())
    _, cycles = watched(target, known, sidecar)
    before = {
        cycle.position + row: cycle.position - 1
        for cycle in cycles
        for row in range(cycle.cut.rows)
    }
    for record in sidecar.records:
        last = known.native[before[record.sequence_position]]
        assert record.predicted_expert_ids == last[record.target_route_layer]
        assert record.prediction_confidence == (1.0,) * TOP


def test_a_predictor_is_told_every_committed_row_and_no_other(target: Target, known: Known) -> None:
    predictor = wrong(known.native)
    watched(target, known, sidecar_of(target, predictor), right=2)
    rows: dict[int, dict[int, tuple[int, ...]]] = {}
    for position, routes in predictor.told:
        for layer, chosen in routes.items():
            for row, experts in enumerate(chosen):
                place = rows.setdefault(position + row, {})
                assert layer not in place
                place[layer] = tuple(experts)
    assert rows == {at: known.native[at] for at in range(len(known.tokens) - 1)}


# The report, held to another computation


def slow_run(sidecar: RouteSidecar, cycles: list[Cycle], predictor: str, known: Known) -> SlowStore:
    """The same passes and predictions through the slow store of the tests."""
    slow = SlowStore(COSTS, BYTES, LAYERS)
    last = known.native[len(known.prompt) - 1]
    for cycle in cycles:
        routes = {layer: np.array(held).tolist() for layer, held in cycle.answer.routes.items()}
        rows = len(routes[0])
        guesses: list[tuple[int, int, tuple[int, ...]]] = []
        for layer in range(LAYERS):
            for row in range(rows):
                at = cycle.position + row
                if predictor == "previous":
                    guesses.append((layer, at, last[layer]))
                elif predictor != "none":
                    scripted = predictors(known.native)[predictor]
                    assert scripted is not None
                    guesses.append((layer, at, scripted.predict(at, 0)[layer].experts))
        slow.run(SlowPass(cycle.position, cycle.cut.rows, routes, guesses))
        last = {layer: tuple(routes[layer][cycle.cut.rows - 1]) for layer in range(LAYERS)}
    slow.finish()
    return slow


@pytest.mark.parametrize("predictor", ["none", "previous", "oracle", "wrong"])
@pytest.mark.parametrize("right", [0, 3, 7])
def test_the_report_is_that_of_a_slow_store(
    target: Target, known: Known, predictor: str, right: int
) -> None:
    sidecar = sidecar_of(target, predictors(known.native)[predictor])
    _, cycles = watched(target, known, sidecar, right)
    slow = slow_run(sidecar, cycles, predictor, known)
    sidecar.store.drain()
    report = sidecar.report()
    assert report.tickets == slow.tickets()
    assert report.bytes_early == slow.bytes_early
    assert report.bytes_used == slow.bytes_used
    assert report.bytes_wasted == slow.bytes_wasted
    assert report.bytes_on_demand == slow.bytes_on_demand
    assert report.bytes_demanded == slow.bytes_demanded
    assert report.exposed_wait_ms == slow.waited / 1000
    assert sidecar.store.now == slow.now
    assert (report.passes, report.committed_rows) == (len(cycles), COUNT - 1)
    assert {k: (r.native, r.predicted) for k, r in report.recall.items()} == slow.recall


def test_what_predictions_are_worth_shows(target: Target, known: Known) -> None:
    """With proposals that are right, so that the oracle knows every row."""
    reports = {}
    for name, predictor in predictors(known.native).items():
        sidecar = sidecar_of(target, predictor)
        watched(target, known, sidecar, right=7)
        reports[name] = sidecar.report()
    assert {name: report.total_recall.share for name, report in reports.items()} == {
        "none": 0, "previous": reports["previous"].total_recall.share, "oracle": 1, "wrong": 0,
    }  # fmt: skip
    waits = {name: report.exposed_wait_ms for name, report in reports.items()}
    assert waits["oracle"] < min(waits["none"], waits["previous"], waits["wrong"])
    assert reports["none"].bytes_early == 0 == sum(reports["none"].tickets.values())
    assert reports["oracle"].bytes_wasted < reports["wrong"].bytes_wasted
    assert {report.bytes_demanded for report in reports.values()} == {
        reports["none"].bytes_demanded
    }
    assert reports["oracle"].as_dict()["recall_by_layer"] == dict.fromkeys("01234", 1.0)


# Owners and generations


def slow_link() -> StoreCosts:
    """One expert takes far longer than a pass."""
    return StoreCosts(bytes_per_us=1, latency_us=0, cache_bytes=100 * BYTES, draft_us=1, layer_us=1)


def test_a_late_completion_is_no_business_of_the_next_request(target: Target, known: Known) -> None:
    sidecar = RouteSidecar(target, wrong(known.native), slow_link())
    drafter = ScriptedDrafter.right_for(known.tokens, 0, VOCAB, taps=TAPS)
    with on_cpu():
        decode_with_sidecar(
            target, drafter, asked(known, max_tokens=3), sidecar, owner="a", generation=1
        )
        before = sidecar.ledger.counts()
        assert before["open"] == 0 and before["cancelled"] > 0
        sidecar.begin("a", 2)
        sidecar.store.drain()  # the transfer that was on its way at the end of the first request
        after = sidecar.ledger.counts()
        sidecar.end()
        assert after["published"] == before["published"]
        assert after["filled"] == before["filled"] + 1
        reply = decode_with_sidecar(target, drafter, asked(known), sidecar, owner="a", generation=3)
    assert reply.tokens == known.tokens[len(known.prompt) :]
    with pytest.raises(ProtocolError, match="prefetch_ticket_generation"):
        decode_with_sidecar(target, drafter, asked(known), sidecar, owner="a", generation=3)


def test_an_aborted_request_cancels_its_tickets(target: Target, known: Known) -> None:
    sidecar = RouteSidecar(target, wrong(known.native), slow_link())
    stopped: list[int] = []

    def watch(cycle: Cycle) -> None:
        stopped.append(cycle.position)
        raise KeyboardInterrupt

    drafter = ScriptedDrafter.right_for(known.tokens, 0, VOCAB, taps=TAPS)
    with on_cpu(), pytest.raises(KeyboardInterrupt):
        decode_with_sidecar(target, drafter, asked(known), sidecar, owner="a", watch=watch)
    assert len(stopped) == 1
    counts = sidecar.ledger.counts()
    assert counts["open"] == 0
    assert sidecar.ledger.live("a") is None
    sidecar.store.drain()
    assert sidecar.ledger.counts()["published"] == counts["published"]


def test_tickets_of_rejected_positions_are_cancelled_and_of_committed_ones_expire(
    target: Target, known: Known
) -> None:
    """By hand, on a link on which nothing arrives before the pass is over."""
    sidecar = RouteSidecar(target, oracle(known.native), slow_link())
    sidecar.begin("a", 0)
    sidecar.ask(20, known.tokens[20:24])
    asked_for = sidecar.ledger.counts()["open"]
    assert asked_for == 4 * LAYERS * TOP
    empty = {layer: np.zeros((4, 0), np.int32) for layer in range(LAYERS)}
    sidecar.demand(empty)
    chosen = {
        layer: np.array([known.native[20 + row][layer] for row in range(4)], np.int32)
        for layer in range(LAYERS)
    }
    sidecar.settle(20, chosen, 1)
    counts = sidecar.ledger.counts()
    assert counts["cancelled"] == 3 * LAYERS * TOP
    assert counts["expired"] == LAYERS * TOP
    sidecar.store.drain()
    assert sidecar.ledger.counts()["published"] == 0
    assert sidecar.ledger.counts()["filled"] >= 1
