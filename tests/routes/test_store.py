"""The simulated store, followed by hand: who waits for whom, for how long, and what is kept."""

from typing import Any

import pytest

from lse_mlx.errors import RequestError
from lse_mlx.routes.store import ExpertStore, StoreCosts

A, B, C, D = ((0, expert) for expert in range(4))


def store(cache: int = 10, arrived: list[int] | None = None) -> ExpertStore:
    """Experts of 10 bytes take 2 + 5 us, and the cache holds `cache` of them."""
    costs = StoreCosts(bytes_per_us=2, latency_us=2, cache_bytes=10 * cache)
    told: list[int] = [] if arrived is None else arrived
    return ExpertStore(costs, {0: 10, 1: 11}, told.append)


def held(simulated: ExpertStore) -> list[tuple[int, int]]:
    return [key for key in (A, B, C, D) if simulated.holds(key)]


def test_a_pass_waits_for_all_that_is_not_there() -> None:
    simulated = store()
    simulated.demand([A, B])
    assert (simulated.now, simulated.exposed_us) == (14, 14)
    assert (simulated.demand_bytes, simulated.early_bytes, simulated.demanded_bytes) == (20, 0, 20)
    simulated.demand([B, A])
    assert (simulated.now, simulated.demand_bytes, simulated.demanded_bytes) == (14, 20, 40)


def test_a_transfer_takes_whole_microseconds() -> None:
    simulated = store()
    simulated.demand([(1, 0)])  # 11 bytes at 2 a microsecond
    assert simulated.now == 2 + 6


def test_what_came_early_costs_no_wait() -> None:
    arrived: list[int] = []
    simulated = store(arrived=arrived)
    simulated.prefetch(A, 1)
    simulated.prefetch(B, 2)
    simulated.advance(13)
    assert arrived == [1]
    simulated.advance(1)
    assert arrived == [1, 2]
    simulated.demand([A, B])
    assert simulated.exposed_us == 0
    assert (simulated.early_bytes, simulated.used_bytes, simulated.demand_bytes) == (20, 20, 0)
    simulated.demand([A])
    assert simulated.used_bytes == 20  # once


def test_a_pass_waits_for_the_rest_of_what_is_on_its_way() -> None:
    simulated = store()
    simulated.prefetch(A, 1)
    simulated.advance(3)
    simulated.demand([A])
    assert (simulated.now, simulated.exposed_us) == (7, 4)
    assert (simulated.early_bytes, simulated.used_bytes, simulated.demand_bytes) == (10, 10, 0)


def test_a_pass_goes_before_tickets_but_breaks_off_nothing() -> None:
    arrived: list[int] = []
    simulated = store(arrived=arrived)
    for ticket, key in enumerate((A, B, C), 1):
        simulated.prefetch(key, ticket)
    simulated.advance(1)
    simulated.demand([C, D])  # A is on its way, B waits until they are through
    assert arrived == [1, 3]
    assert (simulated.now, simulated.exposed_us) == (21, 20)
    assert held(simulated) == [A, C, D]
    # C had not begun, so the pass fetched it; B began as soon as the link was free.
    assert (simulated.early_bytes, simulated.demand_bytes, simulated.used_bytes) == (20, 20, 0)
    simulated.advance(7)
    assert arrived == [1, 3, 2]


def test_tickets_for_the_same_expert_share_its_transfer() -> None:
    arrived: list[int] = []
    simulated = store(arrived=arrived)
    for ticket, key in enumerate((A, B, A, B), 1):
        simulated.prefetch(key, ticket)
    assert simulated.withdraw([2]) == []  # the fourth still wants B
    simulated.drain()
    assert arrived == [1, 3, 2, 4]
    assert (simulated.now, simulated.early_bytes) == (14, 20)


def test_only_what_has_not_begun_is_called_off() -> None:
    arrived: list[int] = []
    simulated = store(arrived=arrived)
    for ticket, key in enumerate((A, B), 1):
        simulated.prefetch(key, ticket)
    assert simulated.withdraw([1, 2]) == [2]
    simulated.drain()
    assert arrived == [1]
    assert held(simulated) == [A]
    assert simulated.early_bytes == 10


def test_the_least_recently_used_leaves_first_and_was_wasted_if_nobody_used_it() -> None:
    simulated = store(cache=2)
    simulated.prefetch(A, 1)
    simulated.advance(7)
    simulated.demand([B])
    assert held(simulated) == [A, B]
    simulated.demand([C])
    assert held(simulated) == [B, C]
    simulated.demand([B])
    simulated.demand([D])
    assert held(simulated) == [B, D]
    assert (simulated.early_bytes, simulated.used_bytes) == (10, 0)
    simulated.demand([A])
    assert simulated.used_bytes == 0


def test_without_a_cache_every_pass_fetches() -> None:
    simulated = store(cache=0)
    for _ in range(2):
        simulated.demand([A])
    assert (simulated.exposed_us, simulated.demand_bytes) == (14, 20)
    assert held(simulated) == []


def test_time_passes_without_anything_to_do() -> None:
    simulated = store()
    simulated.advance(5)
    simulated.drain()
    assert simulated.now == 5
    simulated.prefetch(A, 1)
    simulated.advance(6)
    assert not simulated.holds(A)
    simulated.advance(1)
    assert simulated.holds(A)


@pytest.mark.parametrize(
    ("name", "value"),
    [("bytes_per_us", 0), ("latency_us", -1), ("cache_bytes", 1.5), ("layer_us", True)],
)
def test_costs_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"{name} of a simulated store is {value}"):
        StoreCosts(**{name: value})
