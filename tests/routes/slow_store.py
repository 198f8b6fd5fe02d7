"""The simulated store once more, a microsecond at a time and by looking through lists."""

from dataclasses import dataclass, field
from math import ceil

from lse_mlx.routes.store import StoreCosts


@dataclass(frozen=True)
class SlowPass:
    """A pass as it went: its position, rows that stayed, routes and predictions of all its rows.

    guesses: layer, position and experts, in the order in which they are asked for
    """

    position: int
    committed: int
    routes: dict[int, list[list[int]]]
    guesses: list[tuple[int, int, tuple[int, ...]]]


@dataclass
class SlowTicket:
    key: tuple[int, int]
    position: int
    state: str = "open"


@dataclass
class SlowStore:
    """One request through the store. Everything that happened is kept, and counted at the end."""

    costs: StoreCosts
    size: int
    layers: int
    now: int = 0
    waited: int = 0
    tickets_made: list[SlowTicket] = field(default_factory=list)
    cache: list[tuple[int, int]] = field(default_factory=list)
    """Least recently used first."""
    fresh: set[tuple[int, int]] = field(default_factory=set)
    """Cached early, and not used since."""
    queue: list[tuple[int, int]] = field(default_factory=list)
    urgent: list[tuple[int, int]] = field(default_factory=list)
    flying: tuple[int, int] | None = None
    left: int = 0
    flying_early: bool = False
    flying_used: bool = False
    bytes_early: int = 0
    bytes_used: int = 0
    bytes_wasted: int = 0
    bytes_on_demand: int = 0
    bytes_demanded: int = 0
    recall: dict[int, tuple[int, int]] = field(default_factory=dict)
    ticketed: set[tuple[int, int]] = field(default_factory=set)
    """Committed positions, each with a layer, for which something was asked in the pass that stayed."""
    served: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Which transfer a ticket waits for, by the ticket's place."""

    def run(self, done: SlowPass) -> None:
        block: list[int] = []
        missing = [
            (layer, position, expert)
            for layer, position, experts in done.guesses
            for expert in experts
            if (layer, expert) not in self.cache
        ]
        end = done.position + done.committed
        self.ticketed |= {(position, layer) for layer, position, _ in missing if position < end}
        for layer, position, expert in missing:
            key = (layer, expert)
            block.append(len(self.tickets_made))
            self.served[len(self.tickets_made)] = key
            self.tickets_made.append(SlowTicket(key, position))
            if key != self.flying and key not in self.queue:
                self.queue.append(key)
            self.lift_off()
        self.wait(self.costs.draft_us)
        for layer in range(self.layers):
            self.need(layer, done.routes[layer])
            self.wait(self.costs.layer_us)
        for place in block:
            ticket = self.tickets_made[place]
            if ticket.state == "open":
                rejected = ticket.position >= done.position + done.committed
                ticket.state = "cancelled" if rejected else "expired"
        self.queue = [key for key in self.queue if self.is_wanted(key)]
        for place in list(self.served):  # what was dropped from the queue is waited for no more
            if self.served[place] != self.flying and self.served[place] not in self.queue:
                del self.served[place]
        self.remember(done)

    def finish(self) -> None:
        """Let everything arrive; what nobody used by now was wasted."""
        while self.flying is not None:
            self.tick()
        self.bytes_wasted += self.size * len(self.fresh)

    def tickets(self) -> dict[str, int]:
        states = [ticket.state for ticket in self.tickets_made]
        return {s: states.count(s) for s in ("open", "published", "filled", "cancelled", "expired")}

    def remember(self, done: SlowPass) -> None:
        guessed = {(layer, position): set(experts) for layer, position, experts in done.guesses}
        for layer in range(self.layers):
            native, hits = self.recall.get(layer, (0, 0))
            for row in range(done.committed):
                chosen = done.routes[layer][row]
                told = guessed.get((layer, done.position + row), set())
                native, hits = native + len(chosen), hits + sum(e in told for e in chosen)
            self.recall[layer] = native, hits

    def is_wanted(self, key: tuple[int, int]) -> bool:
        return any(t.key == key and t.state == "open" for t in self.tickets_made)

    def need(self, layer: int, rows: list[list[int]]) -> None:
        wanted: list[tuple[int, int]] = []
        for row in rows:
            wanted += [(layer, e) for e in row if (layer, e) not in wanted]
        self.bytes_demanded += self.size * len(wanted)
        absent = [key for key in wanted if key not in self.cache]
        for key in wanted:
            if key in self.cache:
                self.use(key)
            elif key == self.flying:
                if self.flying_early and not self.flying_used:
                    self.bytes_used += self.size
                self.flying_used = True
            else:
                if key in self.queue:
                    self.queue.remove(key)
                self.urgent.append(key)
        self.lift_off()
        while absent:
            landed = self.tick()
            self.waited += 1
            if landed in absent:
                absent.remove(landed)

    def use(self, key: tuple[int, int]) -> None:
        if key in self.fresh:
            self.fresh.remove(key)
            self.bytes_used += self.size
        self.cache.remove(key)
        self.cache.append(key)

    def wait(self, us: int) -> None:
        for _ in range(us):
            self.tick()

    def tick(self) -> tuple[int, int] | None:
        """One microsecond; returns what arrived at its end."""
        self.now += 1
        if self.flying is None:
            return None
        self.left -= 1
        if self.left:
            return None
        landed, self.flying = self.flying, None
        self.cache.append(landed)
        if self.flying_early and not self.flying_used:
            self.fresh.add(landed)
        while len(self.cache) * self.size > self.costs.cache_bytes:
            gone = self.cache.pop(0)
            if gone in self.fresh:
                self.fresh.remove(gone)
                self.bytes_wasted += self.size
        for place, key in list(self.served.items()):
            if key == landed:
                ticket = self.tickets_made[place]
                ticket.state = "published" if ticket.state == "open" else "filled"
                del self.served[place]
        self.lift_off()
        return landed

    def lift_off(self) -> None:
        if self.flying is not None or not (self.urgent or self.queue):
            return
        self.flying_early = not self.urgent
        self.flying = self.urgent.pop(0) if self.urgent else self.queue.pop(0)
        self.flying_used = False
        self.left = self.costs.latency_us + ceil(self.size / self.costs.bytes_per_us)
        if self.flying_early:
            self.bytes_early += self.size
        else:
            self.bytes_on_demand += self.size
