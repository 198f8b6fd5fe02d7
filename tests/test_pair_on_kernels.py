"""The demo pair decoded by the project's kernels, all of them run by the host harness."""

import shutil
from collections.abc import Iterator

import mlx.core as mx
import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.engine import Engine
from lse_mlx.kernels.kernel_text import kernel_folder
from lse_mlx.kernels.registry import Registry
from lse_mlx.loading import load_pair
from lse_mlx.replies import Result
from tests.kernels.modes import needs_compiler, own_registry
from tests.metal_host.host import HostOptions, MetalHost
from tests.tiny_models import on_cpu

pytestmark = [needs_compiler, pytest.mark.slow]

PROMPTS = ["Write a story about a shy fox.", "Tell me about the moon."]
TOKENS = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The demo pair with everything but the target's codes widened to fp32.

    In bf16 two ways to add up may round a close decision to either side; in fp32 none of these
    replies has a decision that close.
    """
    folder = tmp_path_factory.mktemp("pair") / "target"
    shutil.copytree(demo_pair.TARGET, folder)
    with on_cpu():
        weights = mx.load(str(folder / "model.safetensors"))
        assert isinstance(weights, dict)
        wide = {
            name: array if array.dtype == mx.uint32 else array.astype(mx.float32)
            for name, array in weights.items()
        }
        mx.save_safetensors(str(folder / "model.safetensors"), wide)
    return Pair(folder, demo_pair.DRAFTER)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return own_registry(MetalHost(HostOptions()).metal_kernel)


@pytest.fixture(scope="module")
def engines(pair: Pair, registry: Registry) -> Iterator[tuple[Engine, Engine]]:
    """On the CPU as always, and on kernels."""
    with (
        on_cpu(),
        load_pair(pair, warm=False) as host,
        load_pair(pair, registry=registry, warm=False) as kernels,
    ):
        yield host, kernels


def replies(engine: Engine, **how: object) -> list[list[int]]:
    found: list[Result] = [engine.generate(p, max_tokens=TOKENS, **how) for p in PROMPTS]  # type: ignore[arg-type]
    return [result.token_ids for result in found]


@pytest.mark.parametrize(
    "how",
    [{}, {"speculate": False}, {"temperature": 0.7, "seed": 7}],
    ids=["greedy", "without the drafter", "sampled"],
)
def test_the_tokens_are_those_of_the_references(
    engines: tuple[Engine, Engine], how: dict[str, object]
) -> None:
    host, kernels = engines
    assert replies(kernels, **how) == replies(host, **how)


def test_every_kernel_took_part(engines: tuple[Engine, Engine], registry: Registry) -> None:
    engines[1].generate(PROMPTS[0], max_tokens=4)
    served = {name for name, form in registry.served if form == "metal"}
    # One of the two forms of a product, and every other kernel.
    texts = {path.stem for path in kernel_folder().glob("*.metal")} - {"skinny_qmm_matrix"}
    assert served >= texts
    assert engines[1].stats().reference_calls == 0
