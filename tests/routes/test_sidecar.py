"""The route sidecar beside a tiny target of experts: it predicts, asks and accounts, and no more."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.errors import ProtocolError, RequestError
from lse_mlx.protocol.records import RouteRecord
from lse_mlx.protocol.trace_files import read_trace
from lse_mlx.routes.predictors import Prediction, Previous
from lse_mlx.routes.sidecar import RouteSidecar
from lse_mlx.routes.store import StoreCosts
from lse_mlx.target.model import Target
from lse_mlx.traces.native import replay_on
from lse_mlx.traces.recording import write
from tests.decode.runs import run
from tests.routes.conftest import (
    BYTES,
    COUNT,
    IDENTITY,
    LAYERS,
    SAMPLED,
    TOP,
    Known,
    Scripted,
    certain,
    drafter_for,
    oracle,
    predictors,
    recorded,
    sidecar_of,
    watched,
    wrong,
)
from tests.states import assert_same
from tests.tiny_models import load_tiny, on_cpu, save_checkpoint

# Nothing of the target changes


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("right", [0, 3, 7])
def test_no_prediction_changes_a_bit(
    target: Target, known: Known, right: int, sampling: Sampling
) -> None:
    """The steps have the digests of all that a pass computes."""
    session = Session(target, drafter_for(known, right))
    plain, state = recorded(session, known, sampling=sampling)
    for predictor in predictors(known.native).values():
        beside = sidecar_of(target, predictor).session(drafter_for(known, right))
        trace, held = recorded(beside, known, sampling=sampling)
        assert (trace.header, trace.steps) == (plain.header, plain.steps)
        assert [native_of(r) for r in trace.routes] == [native_of(r) for r in plain.routes]
        assert_same(held, state)
    with on_cpu():
        alone = run(
            Session(target, drafter_for(known, right)),
            known.prompt,
            max_tokens=COUNT,
            sampling=sampling,
        )
    assert plain.tokens == alone.tokens
    if sampling.temperature == 0:
        assert alone.tokens == known.tokens[len(known.prompt) :]


def test_a_plain_reply_is_predicted_for_too(target: Target, known: Known) -> None:
    sidecar = sidecar_of(target, oracle(known.native))
    trace, _ = recorded(sidecar.session(None), known)
    assert trace.tokens == known.tokens[len(known.prompt) :]
    report = sidecar.report()
    assert (report.passes, report.committed_rows) == (COUNT - 1, COUNT - 1)
    assert report.total_recall.share == 1


@pytest.mark.parametrize("error", [KeyError, RuntimeError, TypeError])
def test_a_predictor_that_fails_is_named_and_leaves_nothing_behind(
    target: Target, known: Known, error: type[Exception]
) -> None:
    def guess(position: int, layer: int) -> tuple[int, ...]:
        if position > len(known.prompt) + 6 and layer == 3:
            raise error("a predictor's own mistake")
        return (1, 2)

    sidecar = sidecar_of(target, Scripted(guess))
    with pytest.raises(ProtocolError, match=r"predictor failed .*own mistake") as refusal:
        watched(known, sidecar)
    assert refusal.value.field == "predicted_expert_ids"
    assert sidecar.ledger.live("a") is None
    assert sidecar.ledger.counts()["open"] == 0
    assert watched(known, sidecar_of(target, None)).tokens == known.tokens[9:]


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ({5: certain((1,))}, "target_route_layer"),
        ({0: certain((12,))}, "predicted_expert_ids"),
        ({0: certain((-1,))}, "predicted_expert_ids"),
        ({0: certain((3, 3))}, "predicted_expert_ids"),
        ({0: (3,)}, "predicted_expert_ids"),
        ({0: None}, "predicted_expert_ids"),
        ({0: Prediction((3,), ())}, "prediction_confidence"),
        ({0: Prediction((3,), (1.5,))}, "prediction_confidence"),
        ({0: Prediction((3,), (float("nan"),))}, "prediction_confidence"),
    ],
    ids=str,
)
def test_a_prediction_that_is_none_is_refused(
    target: Target, known: Known, prediction: Any, field: str
) -> None:
    class Odd(Previous):
        def predict(self, position: int, token: int) -> Mapping[int, Prediction]:
            return prediction

    sidecar = sidecar_of(target, Odd())
    with pytest.raises(ProtocolError, match=field) as refusal:
        watched(known, sidecar)
    assert refusal.value.field == field
    assert sidecar.ledger.live("a") is None


def test_a_dense_target_has_nothing_to_predict(tmp_path: Any) -> None:
    dense = load_tiny(save_checkpoint(tmp_path / "dense"))
    with pytest.raises(RequestError, match="no layers of experts"):
        RouteSidecar(dense, None)


# The records


def native_of(route: RouteRecord) -> tuple[int, int, tuple[int, ...]]:
    experts = route.target_expert_ids_in_native_rank_order
    return route.sequence_position, route.target_route_layer, experts


@pytest.mark.parametrize("right", [0, 3, 7])
def test_records_hold_the_native_routes_of_every_committed_row(
    target: Target, known: Known, right: int
) -> None:
    trace = watched(known, sidecar_of(target, Previous()), right)
    first = len(known.prompt)
    committed = range(first, first + COUNT - 1)  # the last token is read by no pass
    assert [native_of(route) for route in trace.routes] == [
        (at, layer, known.native[at][layer]) for at in committed for layer in range(LAYERS)
    ]
    for route in trace.routes:
        assert route.target_top_k == TOP
        assert (route.request_owner, route.request_generation) == ("a", 1)


@pytest.mark.parametrize("right", [0, 3, 7])
def test_the_previous_routes_are_those_of_the_last_committed_row(
    target: Target, known: Known, right: int
) -> None:
    trace = watched(known, sidecar_of(target, Previous()), right)
    before = {
        step.sequence_position + row: step.sequence_position - 1
        for step in trace.steps
        for row in range(step.committed_rows)
    }
    for route in trace.routes:
        last = known.native[before[route.sequence_position]]
        assert route.predicted_expert_ids == last[route.target_route_layer]
        assert route.prediction_confidence == (1.0,) * TOP


def test_nothing_is_predicted_in_a_session_without_a_sidecar(target: Target, known: Known) -> None:
    trace, _ = recorded(Session(target, drafter_for(known, 3)), known)
    assert len(trace.routes) == LAYERS * (COUNT - 1)
    assert {(r.predicted_expert_ids, r.prefetch_ticket_owner) for r in trace.routes} == {((), None)}


def test_predictions_go_through_files_and_a_replay(
    target: Target, known: Known, tmp_path: Path
) -> None:
    trace = watched(known, sidecar_of(target, wrong(known.native)))
    write(trace, tmp_path / "trace")
    read = read_trace(tmp_path / "trace")
    assert read.routes == trace.routes
    with on_cpu():
        assert replay_on(target, IDENTITY, read).first is None


def test_a_predictor_is_told_every_committed_row_and_no_other(target: Target, known: Known) -> None:
    predictor = wrong(known.native)
    watched(known, sidecar_of(target, predictor), right=2)
    rows: dict[int, dict[int, tuple[int, ...]]] = {}
    for position, routes in predictor.told:
        for layer, chosen in routes.items():
            for row, experts in enumerate(chosen):
                place = rows.setdefault(position + row, {})
                assert layer not in place
                place[layer] = tuple(experts)
    assert rows == {at: known.native[at] for at in range(len(known.tokens) - 1)}


# Owners and generations


def slow_link() -> StoreCosts:
    """One expert takes far longer than a pass."""
    return StoreCosts(bytes_per_us=1, latency_us=0, cache_bytes=100 * BYTES, draft_us=1, layer_us=1)


def test_a_late_completion_is_no_business_of_the_next_request(target: Target, known: Known) -> None:
    sidecar = RouteSidecar(target, wrong(known.native), slow_link())
    session = sidecar.session(drafter_for(known, 0))
    recorded(session, known, max_tokens=3)
    before = sidecar.ledger.counts()
    assert before["open"] == 0 and before["cancelled"] > 0
    with sidecar.request("a", 2):
        sidecar.store.drain()  # the transfer that was on its way at the end of the first request
        after = sidecar.ledger.counts()
    assert after["published"] == before["published"]
    assert after["filled"] == before["filled"] + 1
    with sidecar.request("a", 7):
        sidecar.ask(20, known.tokens[20:24])  # so that something is on its way
    with pytest.raises(ProtocolError, match="prefetch_ticket_generation"):
        recorded(session, known)
    reply, _ = recorded(session, known, owner="b")
    assert reply.tokens == known.tokens[len(known.prompt) :]


def test_a_session_has_one_owner_and_a_newer_generation_for_each_reply(
    target: Target, known: Known
) -> None:
    session = sidecar_of(target, Previous()).session(drafter_for(known, 3))
    origins = []
    for most in (2, 5):
        trace, _ = recorded(session, known, owner=None, max_tokens=most)
        origins.append((trace.header.request_owner, trace.header.request_generation))
        assert {(r.request_owner, r.request_generation) for r in trace.routes} == {origins[-1]}
    assert origins == [(session.owner, 1), (session.owner, 2)]


def test_an_aborted_request_cancels_its_tickets(target: Target, known: Known) -> None:
    asked: list[int] = []

    def guess(position: int, layer: int) -> tuple[int, ...]:
        asked.append(position)
        if position > len(known.prompt) + 9:
            raise KeyboardInterrupt
        return (1, 2, 3)

    sidecar = RouteSidecar(target, Scripted(guess), slow_link())
    with pytest.raises(KeyboardInterrupt):
        watched(known, sidecar, right=0)
    assert len(set(asked)) > 9
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
    with sidecar.request("a", 0):
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
