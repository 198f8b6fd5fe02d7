"""The demo pair on the CPU."""

from collections.abc import Iterator

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.engine import Engine
from lse_mlx.loading import load_pair
from tests.tiny_models import on_cpu


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_cpu():
        yield


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    pair = Pair(demo_pair.TARGET, demo_pair.DRAFTER)
    with on_cpu(), load_pair(pair, warm=False, strict_draft=True) as engine:
        yield engine
