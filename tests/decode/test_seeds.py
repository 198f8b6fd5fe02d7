"""A request's seed and prompt fix its reply, whatever ran before."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.target.model import Target
from tests.decode.runs import run, speculating
from tests.decode.tables import TableContext, TableDrafter, TableTarget
from tests.tiny_models import random_prompt

PROMPT = [1, 2]
WARM = Sampling(1.0)


def table_session(speculate: bool) -> Session:
    return Session(TableTarget.random(1), TableDrafter.random(2) if speculate else None)


@pytest.mark.parametrize("speculate", [False, True])
def test_the_same_seed_gives_the_same_tokens(speculate: bool) -> None:
    used = table_session(speculate)
    for seed in range(20):
        expected = run(table_session(speculate), PROMPT, max_tokens=20, sampling=WARM, seed=seed)
        run(used, [3, seed % 4, 2], max_tokens=seed + 1, sampling=Sampling(0.7), seed=seed + 1)
        np.random.default_rng().random()
        mx.random.seed(seed)
        again = run(used, PROMPT, max_tokens=20, sampling=WARM, seed=seed)
        assert again.tokens == expected.tokens
        assert again.timings.accepted == expected.timings.accepted


@pytest.mark.parametrize("speculate", [False, True])
def test_different_seeds_give_different_tokens(speculate: bool) -> None:
    session = table_session(speculate)
    replies = {
        tuple(run(session, PROMPT, max_tokens=20, sampling=WARM, seed=seed).tokens)
        for seed in range(50)
    }
    assert len(replies) == 50


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_shorter_limit_gives_the_beginning(speculate: bool, seed: int) -> None:
    session = table_session(speculate)
    long = run(session, PROMPT, max_tokens=24, sampling=WARM, seed=seed).tokens
    for limit in ("max_tokens", "room"):
        for count in range(1, 25):
            short = run(session, PROMPT, sampling=WARM, seed=seed, **{limit: count}).tokens
            assert short == long[:count]


@dataclass
class GreedyReader(TableContext):
    """Drafts without chance, but draws from its stream all the same."""

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        for _ in range(self.drafter.draws):
            uniform()
        return Proposal.certain([0, 1, 2])


@dataclass(frozen=True)
class Reader(TableDrafter):
    draws: int = 0

    def new_context(self) -> GreedyReader:
        return GreedyReader(self)


def test_what_a_drafter_draws_moves_nothing_else() -> None:
    replies = [
        run(
            Session(TableTarget.random(1), Reader([], draws=n)),
            PROMPT,
            max_tokens=30,
            sampling=WARM,
        )
        for n in (0, 1, 7)
    ]
    assert replies[0].tokens == replies[1].tokens == replies[2].tokens


def test_greedy_takes_nothing_from_the_seed(target: Target) -> None:
    prompt = random_prompt(9)
    session = Session(target, None)
    replies = {tuple(run(session, prompt, max_tokens=8, seed=seed).tokens) for seed in range(3)}
    assert len(replies) == 1


def test_a_real_target_repeats_a_sampled_reply(target: Target) -> None:
    prompt = random_prompt(9)
    known = run(Session(target, None), prompt, max_tokens=30).tokens
    replies = [
        run(speculating(target, prompt + known), prompt, max_tokens=15, sampling=WARM, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert replies[0].tokens == replies[1].tokens != replies[2].tokens
