"""Prefetch tickets: what was asked for ahead of time, for whom, and what became of it.

A ticket asks for one expert of one layer on behalf of one position of one request. A request is an
owner and a generation: when an owner's slot is used again, the generation is a newer one. Transfers
end when they end, perhaps long after their position was rejected or their request was over. So a
completion is published, which the request may see, only while its ticket is open: its owner is in the
same generation, and its position was not taken back. Any other completion is late: its bytes may
fill an ordinary cache entry, which belongs to nobody, and no request hears of it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from lse_mlx.errors import ProtocolError, shown
from lse_mlx.protocol.fields import check_id, check_integer, check_text

Completion = Literal["published", "filled"]
TicketState = Literal["open", "published", "filled", "cancelled", "expired"]

TICKET, OWNER, GENERATION = (
    "prefetch_ticket",
    "prefetch_ticket_owner",
    "prefetch_ticket_generation",
)


@dataclass(frozen=True)
class Ticket:
    """One expert asked for ahead of time.

    id: from 1, in the order of issue; never used twice in a ledger
    owner, generation: the request; layer, expert: what is asked for; position: of the token
    deadline: the ledger's time at which an open ticket expires; None for none
    """

    id: int
    owner: str
    generation: int
    layer: int
    expert: int
    position: int
    deadline: int | None = None
    state: TicketState = "open"


@dataclass
class RouteLedger:
    """The tickets of any number of requests, one generation of an owner at a time.

    A ticket is open until it is published, cancelled or expired. A cancelled or expired one may still
    be completed, and is filled then, unless its transfer was called off. Of tickets that are over the
    ledger keeps only the number. An owner is forgotten once it has no request and no ticket that may
    still be completed, so the ledger is as large as what goes on. Not for several threads at once.

    now: the ledger's time, in whatever steps its user counts
    """

    now: int = field(default=0, init=False)
    _open: dict[int, Ticket] = field(default_factory=dict, init=False, repr=False)
    _ended: dict[int, Ticket] = field(default_factory=dict, init=False, repr=False)
    _issued: int = field(default=0, init=False)
    _live: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _newest: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _over: Counter[TicketState] = field(default_factory=Counter, init=False, repr=False)

    def open(self, owner: str, generation: int) -> list[Ticket]:
        """Begin a request; what its owner's earlier generation left open is cancelled and returned.

        Raises ProtocolError for a generation that is not newer than every earlier one of the owner,
        as long as the owner is remembered.
        """
        check_text(OWNER, owner)
        check_integer(GENERATION, generation, 0)
        newest = self._newest.get(owner)
        if newest is not None and generation <= newest:
            raise ProtocolError(
                GENERATION,
                f"{GENERATION} is {generation}, and {shown(owner)} has had {newest}: "
                "give each request of an owner a newer one.",
            )
        left = self._end(lambda ticket: ticket.owner == owner, "cancelled")
        self._live[owner] = self._newest[owner] = generation
        return left

    def close(self, owner: str, generation: int) -> list[Ticket]:
        """End a request, finished or aborted; what it left open is cancelled and returned.

        Raises ProtocolError where it is not the owner's live one.
        """
        left = self.cancel(owner, generation)
        del self._live[owner]
        self._forget(owner)
        return left

    def issue(
        self,
        owner: str,
        generation: int,
        *,
        layer: int,
        expert: int,
        position: int,
        deadline: int | None = None,
    ) -> Ticket:
        """A new open ticket of a live request.

        deadline: later than `now`. Raises ProtocolError, which names the field, for a request that
        is not live and for values out of range.
        """
        self._check_live(owner, generation)
        check_id("target_route_layer", layer)
        check_id("predicted_expert_ids", expert)
        check_integer("sequence_position", position, 0)
        if deadline is not None:
            check_integer("deadline", deadline, self.now + 1)
        self._issued += 1
        ticket = Ticket(self._issued, owner, generation, layer, expert, position, deadline)
        self._open[ticket.id] = ticket
        return ticket

    def complete(self, ticket: int, owner: str, generation: int) -> Completion:
        """What the end of a transfer means, for the ticket that it was started for.

        ticket, owner, generation: as the ticket says. "published" if the ticket was open, "filled" if
        it was cancelled or had expired. Raises ProtocolError for a ticket that was never issued, is
        over already, or is another request's.
        """
        held = self.held(ticket)
        if owner != held.owner:
            raise ProtocolError(
                OWNER,
                f"{OWNER} is {shown(owner)}, and ticket {ticket} is of {shown(held.owner)}: "
                "complete a ticket as it was issued.",
            )
        if type(generation) is not int or generation != held.generation:
            raise ProtocolError(
                GENERATION,
                f"{GENERATION} is {shown(generation)}, and ticket {ticket} is of "
                f"{held.generation}: complete a ticket as it was issued.",
            )
        outcome: Completion = "published" if held.state == "open" else "filled"
        del (self._open if outcome == "published" else self._ended)[ticket]
        self._over[outcome] += 1
        self._forget(owner)
        return outcome

    def call_off(self, ticket: int) -> None:
        """No completion will come for a cancelled or expired ticket: its transfer was dropped.

        Raises ProtocolError for an open ticket, and for one that was never issued or is over already.
        """
        held = self.held(ticket)
        if held.state == "open":
            raise ProtocolError(
                TICKET,
                f"{TICKET} is {ticket}, which is open: cancel it before its transfer is called off.",
            )
        del self._ended[ticket]
        self._over[held.state] += 1
        self._forget(held.owner)

    def cancel(self, owner: str, generation: int, position: int = 0) -> list[Ticket]:
        """Take back every open ticket of a live request from `position` on; they are returned.

        For a rejected suffix, whose positions other tokens will have. Raises ProtocolError where the
        request is not live.
        """
        self._check_live(owner, generation)
        check_integer("sequence_position", position, 0)
        return self._end(
            lambda ticket: ticket.owner == owner and ticket.position >= position, "cancelled"
        )

    def advance(self, steps: int = 1) -> list[Ticket]:
        """Let time pass; open tickets whose deadline is reached expire, and are returned."""
        check_integer("steps", steps, 0)
        self.now += steps
        return self._end(
            lambda ticket: ticket.deadline is not None and ticket.deadline <= self.now, "expired"
        )

    def held(self, ticket: int) -> Ticket:
        """A ticket that is open, cancelled or expired; raises ProtocolError for any other."""
        if type(ticket) is not int or not 1 <= ticket <= self._issued:
            raise ProtocolError(
                TICKET,
                f"{TICKET} is {shown(ticket)}, which was never issued: name one of this ledger.",
            )
        found = self._open.get(ticket) or self._ended.get(ticket)
        if found is None:
            raise ProtocolError(
                TICKET,
                f"{TICKET} is {ticket}, which is over already: complete each ticket once.",
            )
        return found

    def live(self, owner: str) -> int | None:
        """The owner's live generation; None between requests."""
        check_text(OWNER, owner)
        return self._live.get(owner)

    def counts(self) -> dict[TicketState, int]:
        """How many tickets are in each state; each ticket ever issued is in one."""
        counted = Counter(ticket.state for ticket in self._ended.values()) + self._over
        counted["open"] = len(self._open)
        return {state: counted[state] for state in get_args(TicketState)}

    def _check_live(self, owner: str, generation: int) -> None:
        check_text(OWNER, owner)
        live = self._live.get(owner)
        if live is None:
            raise ProtocolError(
                OWNER, f"{OWNER} is {shown(owner)}, which has no request: open one first."
            )
        if type(generation) is not int or generation != live:
            raise ProtocolError(
                GENERATION,
                f"{GENERATION} is {shown(generation)}, and the request of {shown(owner)} is "
                f"{live}: an earlier request has nothing left to ask for.",
            )

    def _forget(self, owner: str) -> None:
        """Where nothing of the owner is live or on its way, no generation can be taken for another."""
        if owner not in self._live and all(t.owner != owner for t in self._ended.values()):
            self._newest.pop(owner, None)

    def _end(self, ends: Callable[[Ticket], bool], state: TicketState) -> list[Ticket]:
        """Give `state` to the open tickets that `ends` picks."""
        ended = [replace(ticket, state=state) for ticket in self._open.values() if ends(ticket)]
        for ticket in ended:
            del self._open[ticket.id]
            self._ended[ticket.id] = ticket
        return ended
