"""Tickets in any order of calls, against a list of events: nothing reaches a newer request."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lse_mlx.errors import ProtocolError
from lse_mlx.protocol.tickets import RouteLedger, Ticket


@dataclass
class Known:
    """What a simple model knows of a ticket: everything that ever happened to it, in order."""

    ticket: Ticket
    events: list[str]

    @property
    def over(self) -> bool:
        return "complete" in self.events or "called off" in self.events


class AnyOrder(RuleBasedStateMachine):
    """The ledger beside a list of events; what a completion means is read off the events."""

    owners = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = RouteLedger()
        self.live: dict[str, int] = {}
        self.newest: dict[str, int] = {}
        self.known: list[Known] = []
        self.now = 0

    @rule(owner=st.sampled_from(owners), step=st.integers(1, 3))
    def open(self, owner: str, step: int) -> None:
        generation = self.newest.get(owner, -1) + step
        self.ledger.open(owner, generation)
        for known in self.known:
            if known.ticket.owner == owner:
                known.events.append("taken back")
        self.live[owner] = self.newest[owner] = generation

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.live)))
        self.ledger.close(owner, self.live.pop(owner))
        for known in self.known:
            if known.ticket.owner == owner:
                known.events.append("taken back")

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        position=st.integers(0, 6),
        expert=st.integers(0, 3),
        patience=st.none() | st.integers(1, 4),
    )
    def issue(self, data: st.DataObject, position: int, expert: int, patience: int | None) -> None:
        owner = data.draw(st.sampled_from(sorted(self.live)))
        deadline = None if patience is None else self.now + patience
        ticket = self.ledger.issue(
            owner, self.live[owner], layer=0, expert=expert, position=position, deadline=deadline
        )
        assert ticket.id == len(self.known) + 1
        self.known.append(Known(ticket, []))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), position=st.integers(0, 7))
    def cancel(self, data: st.DataObject, position: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.live)))
        self.ledger.cancel(owner, self.live[owner], position)
        for known in self.known:
            if known.ticket.owner == owner and known.ticket.position >= position:
                known.events.append("taken back")

    @rule(steps=st.integers(0, 3))
    def advance(self, steps: int) -> None:
        self.ledger.advance(steps)
        self.now += steps
        for known in self.known:
            deadline = known.ticket.deadline
            if deadline is not None and deadline <= self.now:
                known.events.append("too late")

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.known))
        assume(not known.over)
        ticket = known.ticket
        outcome = self.ledger.complete(ticket.id, ticket.owner, ticket.generation)
        assert outcome == ("filled" if known.events else "published")
        if outcome == "published":  # the very request that asked is there and still asks
            assert self.live[ticket.owner] == ticket.generation
        known.events.append("complete")

    @precondition(lambda self: self.known)
    @rule(data=st.data(), step=st.sampled_from([-1, 1]))
    def complete_for_another_generation(self, data: st.DataObject, step: int) -> None:
        ticket = data.draw(st.sampled_from(self.known)).ticket
        with pytest.raises(ProtocolError):
            self.ledger.complete(ticket.id, ticket.owner, ticket.generation + step)

    @precondition(lambda self: any(k.events and not k.over for k in self.known))
    @rule(data=st.data())
    def call_off(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from([k for k in self.known if k.events and not k.over]))
        self.ledger.call_off(known.ticket.id)
        known.events.append("called off")

    @precondition(lambda self: any(known.over for known in self.known))
    @rule(data=st.data())
    def complete_again(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from([k for k in self.known if k.over]))
        with pytest.raises(ProtocolError, match="over already"):
            self.ledger.complete(known.ticket.id, known.ticket.owner, known.ticket.generation)

    @invariant()
    def each_ticket_is_in_one_state(self) -> None:
        states = Counter(state_after(known.events) for known in self.known)
        assert Counter(self.ledger.counts()) == states
        assert len(self.ledger.counts()) == 5


def state_after(events: list[str]) -> str:
    """Of what happened first and whether there was a completion; what follows changes nothing."""
    if "complete" in events:
        return "filled" if events[0] != "complete" else "published"
    return {"taken back": "cancelled", "too late": "expired"}[events[0]] if events else "open"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
