"""The tiny hybrid and the fast table, each with a language of its own, on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import lse_mlx
from lse_mlx.target.model import Target
from lse_mlx.target.tokenizer import Tokenizer
from tests.boundaries.demo_bench import TURN, Bench
from tests.boundaries.fast_tables import FastTarget
from tests.boundaries.languages import Language, load_language, of_size
from tests.boundaries.stepwise import Stepwise
from tests.tiny_models import VOCAB, load_tiny, on_cpu, save_checkpoint

TABLE_VOCAB = 40


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_cpu():
        yield


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("boundaries")


@pytest.fixture(scope="session")
def target(root: Path) -> Target:
    return load_tiny(save_checkpoint(root / "tiny"))


@pytest.fixture(scope="session")
def stepwise(target: Target) -> Stepwise:
    """The same target, one token at a time."""
    return Stepwise(target)


@pytest.fixture(scope="session")
def language() -> Language:
    return of_size(VOCAB)


@pytest.fixture(scope="session")
def tokenizer(root: Path, language: Language) -> Tokenizer:
    return load_language(root / "language", language)


@pytest.fixture(scope="session")
def table() -> FastTarget:
    return FastTarget.random(0, TABLE_VOCAB)


@pytest.fixture(scope="session")
def table_language() -> Language:
    return of_size(TABLE_VOCAB)


@pytest.fixture(scope="session")
def table_tokenizer(root: Path, table_language: Language) -> Tokenizer:
    return load_language(root / "table language", table_language)


@pytest.fixture(scope="session")
def bench() -> Iterator[Bench]:
    with on_cpu():
        engine = lse_mlx.load(warm_up=False)
        made = Bench(engine, engine.tokenizer.encode(TURN))
    yield made
    engine.close()
