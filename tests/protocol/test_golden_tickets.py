"""Tickets over the golden block: what a rejected row asked for is taken back and never published."""

from pathlib import Path

import pytest

from lse_mlx.errors import ProtocolError
from lse_mlx.protocol.tickets import RouteLedger, Ticket
from lse_mlx.protocol.trace_files import read_trace
from tests.golden import table
from tests.golden.generate import FOLDER, GENERATION, OWNER

LAYER = 1
# Per pass of the golden trace "greedy", by hand: rows of the block, and rows that are committed.
ROWS = [4, 4, 4, 4, 4, 1, 4, 4]
COMMITTED = [1, 1, 3, 4, 3, 1, 4, 2]


def predicted_for(folder: Path, ledger: RouteLedger) -> tuple[list[Ticket], list[Ticket]]:
    """The trace's passes with one expert asked for each row: the tickets that stay, and the rest."""
    kept: list[Ticket] = []
    taken: list[Ticket] = []
    for step in read_trace(folder).steps:
        rows = [
            ledger.issue(
                OWNER,
                GENERATION,
                layer=LAYER,
                expert=table.experts(step.sequence_position + row, LAYER)[0],
                position=step.sequence_position + row,
            )
            for row in range(step.rows)
        ]
        taken += ledger.cancel(OWNER, GENERATION, step.sequence_position + step.committed_rows)
        kept += rows[: step.committed_rows]
    return kept, taken


def completed(ledger: RouteLedger, ticket: Ticket) -> str:
    return ledger.complete(ticket.id, ticket.owner, ticket.generation)


def test_a_rejected_row_takes_its_tickets_with_it() -> None:
    ledger = RouteLedger()
    ledger.open(OWNER, GENERATION)
    kept, taken = predicted_for(FOLDER / "greedy", ledger)
    assert len(taken) == sum(ROWS) - sum(COMMITTED) == 10
    assert len(kept) == sum(COMMITTED) == 19
    assert {completed(ledger, ticket) for ticket in taken} == {"filled"}
    assert {completed(ledger, ticket) for ticket in kept} == {"published"}


def test_each_position_is_published_once_however_often_it_was_asked_for() -> None:
    ledger = RouteLedger()
    ledger.open(OWNER, GENERATION)
    kept, taken = predicted_for(FOLDER / "greedy", ledger)
    published = [t.position for t in [*taken, *kept] if completed(ledger, t) == "published"]
    assert sorted(published) == list(range(3, 22))


def test_a_late_completion_is_nothing_to_the_request_that_took_the_place() -> None:
    ledger = RouteLedger()
    ledger.open(OWNER, GENERATION)
    kept, taken = predicted_for(FOLDER / "greedy", ledger)
    ledger.close(OWNER, GENERATION)
    ledger.open(OWNER, GENERATION + 1)
    assert {completed(ledger, ticket) for ticket in [*kept, *taken]} == {"filled"}


def test_a_ticket_cannot_be_completed_under_the_newer_generation() -> None:
    ledger = RouteLedger()
    ledger.open(OWNER, GENERATION)
    kept, _ = predicted_for(FOLDER / "greedy", ledger)
    ledger.open(OWNER, GENERATION + 1)
    with pytest.raises(ProtocolError) as refused:
        ledger.complete(kept[0].id, OWNER, GENERATION + 1)
    assert refused.value.field == "prefetch_ticket_generation"


def test_predictions_leave_the_native_experts_as_they_are() -> None:
    """Right, reordered, half right, wrong or absent: beside each stands what the router took."""
    for route in read_trace(FOLDER / "routes").routes:
        native = table.experts(route.sequence_position, route.target_route_layer)
        assert route.target_expert_ids_in_native_rank_order == native
