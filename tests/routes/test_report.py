"""What predictions were worth: the report of a reply, held to another computation of all of it."""

import re
from pathlib import Path

import numpy as np
import pytest

from lse_mlx.decode.loop import Cycle
from lse_mlx.decode.session import Session
from lse_mlx.routes.store import StoreCosts
from lse_mlx.target.model import Target
from tests.decode.runs import request, start
from tests.routes.conftest import (
    BYTES,
    COSTS,
    COUNT,
    LAYERS,
    Known,
    drafter_for,
    predictors,
    sidecar_of,
    watched,
)
from tests.routes.slow_store import SlowPass, SlowStore
from tests.tiny_models import on_cpu


def cycles_of(target: Target, known: Known, right: int) -> list[Cycle]:
    """The passes of the same reply where nobody predicts or records."""
    steps, _ = start(Session(target, drafter_for(known, right)), request(known.prompt, COUNT))
    with on_cpu():
        return [step.cycle for step in steps if step.cycle is not None]


def slow_run(cycles: list[Cycle], predictor: str, known: Known) -> SlowStore:
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
    trace = watched(known, sidecar, right)
    cycles = cycles_of(target, known, right)
    slow = slow_run(cycles, predictor, known)
    tickets = {
        (r.sequence_position, r.target_route_layer): r.prefetch_ticket_owner for r in trace.routes
    }
    assert {place for place, owner in tickets.items() if owner == "a"} == slow.ticketed
    assert set(tickets.values()) <= {"a", None}
    report = sidecar.report(settled=True)
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
        watched(known, sidecar, right=7)
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


def test_the_page_names_every_figure_and_the_defaults(target: Target) -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")
    _, section = page.split("## Routes on a simulated store")
    named = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(named))) == set(
        sidecar_of(target, None).report().as_dict()
    )
    costs, said = StoreCosts(), " ".join(section.split())
    for figure in (
        f"{costs.bytes_per_us} MB a second",
        f"after {costs.latency_us} microseconds",
        f"holds {costs.cache_bytes / 1e6:.0f} MB",
        f"A draft takes {costs.draft_us / 1000:.0f} ms and a layer {costs.layer_us / 1000} ms",
    ):
        assert figure in said
