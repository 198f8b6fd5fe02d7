"""A hub, a process that fetches from it, and both with a cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints.hub.fake_hub import FakeHub, checkpoint, serving
from tests.checkpoints.hub.fetcher import Client, Fetcher


@pytest.fixture(scope="package")
def fetcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fetcher]:
    process = Fetcher(tmp_path_factory.mktemp("home"))
    yield process
    process.close()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving(FakeHub(checkpoint())) as running:
        yield running


@pytest.fixture
def client(fetcher: Fetcher, hub: FakeHub, tmp_path: Path) -> Client:
    return Client(fetcher, hub, tmp_path / "cache")
