"""Prefetch tickets: a completion reaches the request that asked, while it still asks, or nobody."""

from collections.abc import Callable
from typing import Any

import pytest

from lse_mlx.errors import ProtocolError
from lse_mlx.protocol.tickets import RouteLedger, Ticket

OWNER = "request one"


def opened(generation: int = 3) -> RouteLedger:
    ledger = RouteLedger()
    assert ledger.open(OWNER, generation) == []
    return ledger


def asked(ledger: RouteLedger, position: int = 5, generation: int = 3, **more: Any) -> Ticket:
    return ledger.issue(OWNER, generation, layer=2, expert=9, position=position, **more)


def completed(ledger: RouteLedger, ticket: Ticket) -> str:
    return ledger.complete(ticket.id, ticket.owner, ticket.generation)


def refused(field: str, ask: Callable[[], object]) -> str:
    with pytest.raises(ProtocolError) as refusal:
        ask()
    message = str(refusal.value)
    assert refusal.value.field == field
    assert field in message
    assert message.endswith(".") and ". " not in message and "\n" not in message
    return message


def test_a_ticket_says_what_was_asked_for_and_for_whom() -> None:
    ledger = opened()
    ticket = asked(ledger, deadline=4)
    assert ticket == Ticket(1, OWNER, 3, 2, 9, 5, 4, "open")
    assert ledger.held(1) == ticket
    assert asked(ledger).id == 2
    assert ledger.live(OWNER) == 3 and ledger.live("another") is None


def test_an_open_ticket_is_published() -> None:
    ledger = opened()
    assert completed(ledger, asked(ledger)) == "published"
    assert ledger.counts() == {
        "open": 0, "published": 1, "filled": 0, "cancelled": 0, "expired": 0,
    }  # fmt: skip


@pytest.mark.parametrize("position", range(8))
def test_a_rejected_suffix_is_cancelled_and_only_fills_the_cache(position: int) -> None:
    ledger = opened()
    tickets = [asked(ledger, at) for at in range(4, 8)]
    taken = ledger.cancel(OWNER, 3, position)
    assert [(t.position, t.state) for t in taken] == [
        (at, "cancelled") for at in range(max(4, position), 8)
    ]
    outcomes = [completed(ledger, ticket) for ticket in tickets]
    assert outcomes == ["published" if t.position < position else "filled" for t in tickets]


def test_a_new_ticket_for_a_rejected_position_is_another_one() -> None:
    ledger = opened()
    before = asked(ledger, 6)
    ledger.cancel(OWNER, 3, 6)
    after = asked(ledger, 6)
    assert completed(ledger, before) == "filled"
    assert completed(ledger, after) == "published"


def test_cancelling_twice_takes_back_what_is_new_alone() -> None:
    ledger = opened()
    asked(ledger)
    assert len(ledger.cancel(OWNER, 3)) == 1
    assert ledger.cancel(OWNER, 3) == []
    asked(ledger)
    assert [t.id for t in ledger.cancel(OWNER, 3)] == [2]


@pytest.mark.parametrize("end", ["close", "open"])
def test_nothing_of_an_earlier_generation_is_published(end: str) -> None:
    """Neither after it ended and the slot is used again, nor where the slot is simply taken over."""
    ledger = opened()
    late = [asked(ledger), asked(ledger, 7)]
    left = ledger.close(OWNER, 3) if end == "close" else ledger.open(OWNER, 4)
    assert [t.id for t in left] == [1, 2]
    if end == "close":
        assert ledger.live(OWNER) is None
        assert completed(ledger, late[1]) == "filled"
        assert ledger.open(OWNER, 4) == []
    own = asked(ledger, generation=4)
    assert completed(ledger, late[0]) == "filled"
    assert completed(ledger, own) == "published"


def test_requests_of_several_owners_do_not_mind_each_other() -> None:
    ledger = opened()
    ledger.open("other", 0)
    mine, theirs = asked(ledger), ledger.issue("other", 0, layer=0, expert=0, position=5)
    ledger.cancel(OWNER, 3)
    ledger.close(OWNER, 3)
    assert ledger.held(mine.id).state == "cancelled"
    assert completed(ledger, theirs) == "published"


def test_tickets_expire_at_their_deadline() -> None:
    ledger = opened()
    soon, later, never = asked(ledger, deadline=1), asked(ledger, deadline=3), asked(ledger)
    assert ledger.advance(0) == []
    assert [(t.id, t.state) for t in ledger.advance()] == [(soon.id, "expired")]
    assert ledger.advance() == []
    assert [t.id for t in ledger.advance(7)] == [later.id]
    assert ledger.now == 9
    assert [completed(ledger, t) for t in (soon, later, never)] == ["filled", "filled", "published"]


def test_what_expired_is_not_cancelled_and_the_other_way_round() -> None:
    ledger = opened()
    expired, cancelled = asked(ledger, 5, deadline=1), asked(ledger, 6, deadline=2)
    ledger.advance()
    assert [t.id for t in ledger.cancel(OWNER, 3)] == [cancelled.id]
    assert ledger.advance() == []
    assert ledger.held(expired.id).state == "expired"
    assert ledger.held(cancelled.id).state == "cancelled"


@pytest.mark.parametrize("state", ["cancelled", "expired"])
def test_a_transfer_that_was_dropped_leaves_its_ticket_as_it_is(state: str) -> None:
    ledger = opened()
    ticket = asked(ledger, deadline=1)
    refused("prefetch_ticket", lambda: ledger.call_off(ticket.id))
    assert ledger.cancel(OWNER, 3) if state == "cancelled" else ledger.advance()
    ledger.call_off(ticket.id)
    for again in (lambda: completed(ledger, ticket), lambda: ledger.call_off(ticket.id)):
        assert "over already" in refused("prefetch_ticket", again)
    assert {name: count for name, count in ledger.counts().items() if count} == {state: 1}


# Refusals


@pytest.mark.parametrize("end", ["none", "cancel", "expire"])
def test_a_ticket_is_completed_once(end: str) -> None:
    ledger = opened()
    ticket = asked(ledger, deadline=1)
    if end != "none":
        assert ledger.cancel(OWNER, 3) if end == "cancel" else ledger.advance()
    completed(ledger, ticket)
    assert "over already" in refused("prefetch_ticket", lambda: completed(ledger, ticket))
    refused("prefetch_ticket", lambda: ledger.held(ticket.id))


@pytest.mark.parametrize("unknown", [0, -1, 2, True, 1.0, "1", None])
def test_an_unknown_ticket_is_refused(unknown: Any) -> None:
    ledger = opened()
    asked(ledger)
    refused("prefetch_ticket", lambda: ledger.complete(unknown, OWNER, 3))


def test_a_completion_of_another_request_is_refused_and_harmless() -> None:
    ledger = opened()
    ticket = asked(ledger)
    refused("prefetch_ticket_owner", lambda: ledger.complete(1, "another", 3))
    for generation in (2, 4, True, 3.0, None):
        wrong: Any = generation
        refused("prefetch_ticket_generation", lambda w=wrong: ledger.complete(1, OWNER, w))
    assert completed(ledger, ticket) == "published"


def test_only_the_live_generation_asks_cancels_and_ends() -> None:
    ledger = opened()
    ticket = asked(ledger)
    acts: list[Callable[[str, int], object]] = [
        lambda owner, generation: ledger.issue(owner, generation, layer=0, expert=0, position=0),
        ledger.cancel,
        ledger.close,
    ]
    for act in acts:
        refused("prefetch_ticket_owner", lambda a=act: a("another", 3))
        for wrong in (2, 4):
            refused("prefetch_ticket_generation", lambda a=act, w=wrong: a(OWNER, w))
    assert ledger.held(ticket.id).state == "open"
    ledger.close(OWNER, 3)
    for act in acts:
        refused("prefetch_ticket_owner", lambda a=act: a(OWNER, 3))


@pytest.mark.parametrize("generation", [0, 2, 3])
@pytest.mark.parametrize("ended", [False, True])
def test_an_owner_goes_back_to_no_generation_while_anything_of_it_is_on_its_way(
    generation: int, ended: bool
) -> None:
    ledger = opened()
    ticket = asked(ledger)
    if ended:
        ledger.close(OWNER, 3)
    refused("prefetch_ticket_generation", lambda: ledger.open(OWNER, generation))
    assert ledger.live(OWNER) == (None if ended else 3)
    assert completed(ledger, ticket) == ("filled" if ended else "published")


@pytest.mark.parametrize("end", ["complete", "call off"])
def test_an_owner_is_forgotten_with_its_last_ticket(end: str) -> None:
    ledger = opened()
    late = [asked(ledger), asked(ledger, 7)]
    ledger.close(OWNER, 3)
    for ticket in late:
        refused("prefetch_ticket_generation", lambda: ledger.open(OWNER, 3))
        completed(ledger, ticket) if end == "complete" else ledger.call_off(ticket.id)
    assert ledger.open(OWNER, 0) == []


def test_a_ledger_does_not_grow_with_the_requests_that_it_has_seen() -> None:
    def sizes() -> dict[str, int]:
        return {k: len(held) for k, held in vars(ledger).items() if hasattr(held, "__len__")}

    ledger = RouteLedger()
    seen: list[dict[str, int]] = []
    for number in range(40):
        owner = f"request {number}"
        ledger.open(owner, 0)
        tickets = [ledger.issue(owner, 0, layer=0, expert=e, position=5) for e in range(3)]
        completed(ledger, tickets[0])
        ledger.close(owner, 0)
        completed(ledger, tickets[1])
        ledger.call_off(tickets[2].id)
        seen.append(sizes())
    assert len(seen[0]) >= 4
    assert all(size == seen[0] for size in seen)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layer": -1}, "target_route_layer"),
        ({"layer": True}, "target_route_layer"),
        ({"expert": 2.0}, "predicted_expert_ids"),
        ({"expert": -1}, "predicted_expert_ids"),
        ({"position": -1}, "sequence_position"),
        ({"position": "5"}, "sequence_position"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": 1.5}, "deadline"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(change: dict[str, Any], field: str) -> None:
    ledger = opened()
    values: dict[str, Any] = {"layer": 0, "expert": 0, "position": 0} | change
    refused(field, lambda: ledger.issue(OWNER, 3, **values))
    assert sum(ledger.counts().values()) == 0


@pytest.mark.parametrize("owner", ["", "a\nb", None, 7, []])
def test_an_owner_is_a_name(owner: Any) -> None:
    refused("prefetch_ticket_owner", lambda: RouteLedger().open(owner, 0))
    refused("prefetch_ticket_owner", lambda: RouteLedger().live(owner))


@pytest.mark.parametrize("steps", [-1, 0.5, True, None])
def test_time_does_not_go_back(steps: Any) -> None:
    refused("steps", lambda: RouteLedger().advance(steps))


# Any order of events
