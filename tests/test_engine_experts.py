"""An engine on a target of experts, with a real drafter: loaded from folders as any pair is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lse_mlx.checkpoints.gate.gate import inspect_pair
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.engine import Engine
from lse_mlx.loading import load_pair
from tests.drafters.tiny_dflash2 import save, tiny_config, tiny_tensors
from tests.tiny_models import VOCAB, on_cpu, random_prompt, save_checkpoint, save_words


def save_drafter(folder: Path) -> Path:
    tensors = tiny_tensors()
    for name in ("predecessor", "successor"):
        codebook = f"candidate_selector.{name}_codebook"
        tensors[codebook] = tensors[codebook][:VOCAB]
    return save(folder, tiny_config(vocab_size=VOCAB), tensors)


@pytest.fixture(scope="module", params=["moe", "moe-q4", "moe-vision"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    with on_cpu():
        target = save_checkpoint(folder / "target", request.param)
        save_words(target)
        return Pair(target, save_drafter(folder / "drafter"))


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with on_cpu(), load_pair(pair) as loaded:
        yield loaded


def test_the_gate_compares_it_like_any_other(pair: Pair) -> None:
    assert pair.drafter is not None
    checks = {check.field: check.holds for check in inspect_pair(pair.target, pair.drafter).checks}
    assert checks["embedding"] and checks["output head"] and checks["stored target layers"]


@pytest.mark.parametrize("length", [1, 8, 40])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}, {"min_tokens": 9}], ids=str)
def test_greedy_output_equals_plain_output(engine: Engine, length: int, options: dict) -> None:
    with on_cpu():
        prompt = random_prompt(length)
        fast = engine.generate(prompt, max_tokens=24, **options)
        alone = engine.generate(prompt, max_tokens=24, speculate=False, **options)
    assert fast.token_ids == alone.token_ids
    assert fast.text == alone.text
    assert fast.timings["spec_steps"] > 0


def test_a_second_turn_equals_a_cold_run(engine: Engine) -> None:
    with on_cpu():
        session = engine.session()
        first = engine.generate(random_prompt(9), max_tokens=10, min_tokens=9, session=session)
        prompt = random_prompt(9) + first.token_ids + random_prompt(5)
        warm = engine.generate(prompt, max_tokens=12, session=session)
        cold = engine.generate(prompt, max_tokens=12)
    assert warm.token_ids == cold.token_ids
    assert warm.timings["prompt_cached_n"] >= 9
