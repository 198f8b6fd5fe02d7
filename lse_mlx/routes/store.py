"""A simulated store of experts: one link with a bandwidth and a latency, one cache, and a clock.

The clock moves by what is told to it and by nothing else, in whole microseconds, so the same requests
always give the same numbers. It is a model to compare predictions by, not a measurement of a device.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lse_mlx.errors import RequestError

Key = tuple[int, int]
"""A layer and one of its experts."""


@dataclass(frozen=True)
class StoreCosts:
    """What the simulated device takes. Times in microseconds.

    bytes_per_us: of the link, while it transfers; latency_us: of each transfer, before that
    cache_bytes:  how much of experts stays in memory; the least recently used goes first
    draft_us:     from the prediction of a block's routes to the beginning of its pass
    layer_us:     that one layer of the target computes on one pass

    Raises RequestError for what is no whole number or out of range.
    """

    bytes_per_us: int = 6_000
    latency_us: int = 80
    cache_bytes: int = 1_000_000_000
    draft_us: int = 2_000
    layer_us: int = 500

    def __post_init__(self) -> None:
        for name, least in (
            ("bytes_per_us", 1),
            ("latency_us", 0),
            ("cache_bytes", 0),
            ("draft_us", 0),
            ("layer_us", 0),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise RequestError(
                    f"The {name} of a simulated store is {value!r}: give an integer from {least} up."
                )


@dataclass
class Transfer:
    """One expert on its way, or waiting to be.

    early:   begun for tickets, not for a pass that stands still until it arrives
    tickets: all that wait for it; wanted: those of them that have not ended otherwise
    used:    demanded while it was on its way
    ends:    when it arrives, once it has begun
    """

    key: Key
    early: bool
    tickets: list[int] = field(default_factory=list)
    wanted: set[int] = field(default_factory=set)
    used: bool = False
    ends: int = 0


@dataclass
class ExpertStore:
    """The link carries one transfer at a time: what a pass waits for first, then tickets by age.

    sizes:   bytes of one expert, by its layer
    arrived: called with each ticket whose transfer has ended
    now:     the clock
    early_bytes, demand_bytes: of transfers begun for tickets, and for a pass that had to wait
    used_bytes: of early ones that a pass demanded before they left the cache again
    demanded_bytes: of all experts that passes demanded, each once a pass
    exposed_us: that passes stood still
    """

    costs: StoreCosts
    sizes: Mapping[int, int]
    arrived: Callable[[int], None]
    now: int = field(default=0, init=False)
    early_bytes: int = field(default=0, init=False)
    demand_bytes: int = field(default=0, init=False)
    used_bytes: int = field(default=0, init=False)
    demanded_bytes: int = field(default=0, init=False)
    exposed_us: int = field(default=0, init=False)
    _unused: OrderedDict[Key, bool] = field(default_factory=OrderedDict, init=False, repr=False)
    """The cache, least recently used first: whether an entry came early and nobody used it yet."""
    _cached_bytes: int = field(default=0, init=False)
    _current: Transfer | None = field(default=None, init=False)
    _urgent: OrderedDict[Key, Transfer] = field(default_factory=OrderedDict, init=False)
    _waiting: OrderedDict[Key, Transfer] = field(default_factory=OrderedDict, init=False)

    def holds(self, key: Key) -> bool:
        """Whether the expert is in the cache."""
        return key in self._unused

    def prefetch(self, key: Key, ticket: int) -> None:
        """Fetch an expert that the cache does not hold; several tickets share one transfer."""
        transfer = self._waiting.get(key)
        if self._current is not None and self._current.key == key:
            transfer = self._current
        if transfer is None:
            transfer = self._waiting[key] = Transfer(key, early=True)
        transfer.tickets.append(ticket)
        transfer.wanted.add(ticket)
        self._begin_next()

    def withdraw(self, tickets: Collection[int]) -> list[int]:
        """These tickets ended: transfers that have not begun and that no other one wants are dropped.

        Returns all tickets of dropped transfers, for which nothing will arrive.
        """
        dropped: list[int] = []
        for transfer in list(self._waiting.values()):
            transfer.wanted.difference_update(tickets)
            if not transfer.wanted:
                dropped += self._waiting.pop(transfer.key).tickets
        return dropped

    def demand(self, keys: Sequence[Key]) -> None:
        """A pass needs these experts now, each named once: time passes until it has them."""
        began, missing = self.now, set()
        for key in keys:
            self.demanded_bytes += self.sizes[key[0]]
            if key in self._unused:
                self._touch(key)
            else:
                self._hurry(key)
                missing.add(key)
        self._begin_next()
        while missing:
            assert self._current is not None
            missing.discard(self._current.key)
            self._finish()
        self.exposed_us += self.now - began

    def advance(self, us: int) -> None:
        """Let time pass while something else is computed."""
        until = self.now + us
        while self._current is not None and self._current.ends <= until:
            self._finish()
        self.now = until

    def drain(self) -> None:
        """Let time pass until nothing is on its way."""
        while self._current is not None:
            self._finish()

    def _touch(self, key: Key) -> None:
        if self._unused[key]:
            self.used_bytes += self.sizes[key[0]]
        self._unused[key] = False
        self._unused.move_to_end(key)

    def _hurry(self, key: Key) -> None:
        if self._current is not None and self._current.key == key:
            if self._current.early and not self._current.used:
                self.used_bytes += self.sizes[key[0]]
            self._current.used = True
            return
        transfer = self._waiting.pop(key, None) or Transfer(key, early=False)
        transfer.early = False
        self._urgent[key] = transfer

    def _begin_next(self) -> None:
        if self._current is not None:
            return
        queue = self._urgent or self._waiting
        if not queue:
            return
        _, transfer = queue.popitem(last=False)
        size = self.sizes[transfer.key[0]]
        if transfer.early:
            self.early_bytes += size
        else:
            self.demand_bytes += size
        # Rounded up: a transfer takes whole microseconds.
        transfer.ends = self.now + self.costs.latency_us - -size // self.costs.bytes_per_us
        self._current = transfer

    def _finish(self) -> None:
        transfer, self._current = self._current, None
        assert transfer is not None
        self.now = transfer.ends
        self._unused[transfer.key] = transfer.early and not transfer.used
        self._cached_bytes += self.sizes[transfer.key[0]]
        while self._cached_bytes > self.costs.cache_bytes:
            (layer, _), _ = self._unused.popitem(last=False)
            self._cached_bytes -= self.sizes[layer]
        for ticket in transfer.tickets:
            self.arrived(ticket)
        self._begin_next()
