"""The seed alone fixes the three streams, and none of them moves another."""

from itertools import permutations

import numpy as np
import pytest
from scipy.stats import kstest

from lse_mlx.decode.randomness import Streams
from lse_mlx.errors import RequestError

NAMES = ("draft", "accept", "residual")


def drawn(streams: Streams, name: str, count: int = 50) -> list[float]:
    return [getattr(streams, name)() for _ in range(count)]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**80])
def test_the_same_seed_gives_the_same_streams(seed: int) -> None:
    one, other = Streams.from_seed(seed), Streams.from_seed(seed)
    np.random.default_rng(5).random(10)  # whatever ran in between
    for name in NAMES:
        assert drawn(one, name) == drawn(other, name)


def test_different_seeds_and_streams_differ() -> None:
    rows = [tuple(drawn(Streams.from_seed(s), n)) for s in (0, 1, 2, 2**32) for n in NAMES]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("order", list(permutations(NAMES)))
def test_drawing_from_one_stream_does_not_move_another(order: tuple[str, ...]) -> None:
    expected = {name: drawn(Streams.from_seed(3), name) for name in NAMES}
    streams = Streams.from_seed(3)
    for i, name in enumerate(order):
        assert drawn(streams, name, 10 * i + 1) == expected[name][: 10 * i + 1]


def test_the_streams_are_uniform_and_unrelated() -> None:
    streams = Streams.from_seed(11)
    columns = [np.array(drawn(streams, name, 20_000)) for name in NAMES]
    for column in columns:
        assert column.min() >= 0
        assert column.max() < 1
        assert kstest(column, "uniform").pvalue > 1e-4
    related = np.corrcoef(columns) - np.eye(3)
    assert np.abs(related).max() < 0.03


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(RequestError, match="seed is -1"):
        Streams.from_seed(-1)
