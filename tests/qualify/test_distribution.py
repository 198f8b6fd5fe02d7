"""The rung about sampling, on a target whose law can be written down, with right and wrong acceptance."""

from itertools import product
from typing import Any, cast

import numpy as np
import pytest

from lse_mlx.decode.sampling import Sampling
from lse_mlx.drafters.base import Drafter
from lse_mlx.engine import Engine
from lse_mlx.qualify.distribution import (
    EMITTED,
    SETTINGS,
    RememberedTarget,
    entropy,
    law,
    sampling_distribution,
)
from lse_mlx.qualify.prompts import demo_prompts
from tests.decode.definition import probabilities
from tests.decode.tables import TOKENS, TableDrafter, TableTarget
from tests.decode.test_statistics import MUTANTS, judge_with

PROMPT = [2, 1]


def table_pair() -> tuple[Any, Drafter]:
    return TableTarget.random(1), cast(Drafter, TableDrafter.random(2))


@pytest.mark.parametrize("sampling", [*SETTINGS, Sampling(1.0, min_p=0.2)], ids=str)
def test_the_law_is_the_product_of_the_tables_rows(sampling: Sampling) -> None:
    target, _ = table_pair()
    found = law(RememberedTarget(target), PROMPT, sampling)
    for reply in product(range(TOKENS), repeat=EMITTED):
        chance, behind = 1.0, [*PROMPT, *reply]
        for i, token in enumerate(reply):
            logits = target.table[behind[i], behind[i + 1]].tolist()
            chance *= probabilities(logits, sampling).get(token, 0.0)
        assert found.get(reply, 0.0) == pytest.approx(chance, rel=1e-12)


def test_entropy_is_that_of_even_odds() -> None:
    assert entropy({(1,): 0.5, (2,): 0.5}) == pytest.approx(np.log(2))
    assert entropy({(1,): 1.0}) == 0


def test_right_acceptance_passes() -> None:
    found = sampling_distribution(*table_pair(), [PROMPT])
    assert found.failure is None
    assert [setting["draws"] for setting in found.figures["settings"]] == [600] * len(SETTINGS)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_acceptance_fails(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lse_mlx.decode.loop.judge", judge_with(*MUTANTS[mutant]))
    found = sampling_distribution(*table_pair(), [PROMPT])
    assert found.failure is not None
    assert "not distributed" in found.failure


def test_accepting_always_fails_with_the_demo_pair(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lse_mlx.decode.loop.judge", judge_with(*MUTANTS["accepts always"]))
    assert engine.drafter is not None
    prompt = engine.tokenizer.encode(demo_prompts()[0])
    assert sampling_distribution(engine.target, engine.drafter, [prompt], 150).failure is not None


def test_the_least_certain_prompt_is_taken() -> None:
    target, drafter = table_pair()
    prompts = [[a, b] for a in range(TOKENS) for b in range(TOKENS)]
    found = sampling_distribution(target, drafter, prompts, draws=20)
    plain = RememberedTarget(target)
    most = max(entropy(law(plain, prompt, SETTINGS[0])) for prompt in prompts)
    assert found.figures["settings"][0]["entropy_nats"] == most


def test_a_remembered_target_answers_as_the_target_and_runs_a_pass_once(engine: Engine) -> None:
    target, taps = engine.target, (1, 3)
    passes: list[list[int]] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(target, name)

        def verify(self, tokens: list[int], state: Any, taps: tuple[int, ...]) -> Any:
            passes.append(tokens)
            return target.verify(tokens, state, taps)

    remembered = RememberedTarget(cast(Any, Counted()))
    for _ in range(2):
        mine, own = remembered.new_state(), target.new_state()
        remembered.advance([5, 6, 7], mine, taps)
        target.advance([5, 6, 7], own, taps)
        for rows, kept in (([8, 9, 10], 2), ([11, 12], 1)):
            answers = remembered.verify(rows, mine, taps), target.verify(rows, own, taps)
            mine.commit(kept)
            own.commit(kept)
            for name in ("logits", "features"):
                one, another = (np.array(getattr(answer, name)) for answer in answers)
                assert np.array_equal(one, another)
    assert passes == [[8, 9, 10], [11, 12]]
