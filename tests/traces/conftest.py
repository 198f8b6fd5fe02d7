"""The demo pair on the CPU, and traces of it that every test here may read."""

from collections.abc import Iterator

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.decode.sampling import Sampling
from lse_mlx.engine import Engine
from lse_mlx.loading import load_pair
from lse_mlx.protocol.trace import Trace
from lse_mlx.traces.identity import TargetIdentity, identify
from lse_mlx.traces.recording import record
from tests.tiny_models import on_cpu

PROMPT = "Tell me a story about a clever owl who wants to see the moon."
OWNER = "test"
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(1.0, top_p=0.95, min_p=0.01)}


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_cpu():
        yield


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with on_cpu(), load_pair(Pair(demo_pair.TARGET, demo_pair.DRAFTER), warm=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def identity() -> TargetIdentity:
    return identify(demo_pair.TARGET)


@pytest.fixture(scope="session")
def traces(engine: Engine, identity: TargetIdentity) -> dict[str, Trace]:
    """Replies to PROMPT, greedy and sampled, with their hidden rows."""
    with on_cpu():
        return {
            name: record(
                engine.session(),
                identity,
                engine.tokenizer.encode(PROMPT),
                stop_tokens=engine.tokenizer.stop_tokens,
                sampling=sampling,
                seed=11,
                max_tokens=32,
                owner=OWNER,
            )
            for name, sampling in SAMPLINGS.items()
        }
