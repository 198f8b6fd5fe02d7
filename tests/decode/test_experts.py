"""The cycle on targets of experts: every committed row is what one token at a time would have given."""

import numpy as np
import pytest

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.target.model import Target
from tests.decode.runs import (
    Cold,
    known_sequence,
    request,
    run,
    speculating,
    start,
)
from tests.tiny_models import (
    load_reference,
    load_tiny,
    random_prompt,
    reference_greedy,
    save_checkpoint,
)

LENGTH, COUNT = 9, 20


@pytest.fixture(scope="module", params=["moe", "moe-q4"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def target(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_tiny(save_checkpoint(tmp_path_factory.mktemp("tiny") / kind, kind))


@pytest.fixture(scope="module")
def cold(target: Target) -> Cold:
    return known_sequence(target, random_prompt(LENGTH, 2), COUNT)


def test_plain_decoding_is_that_of_mlx_lm(
    kind: str, target: Target, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reference = load_reference(save_checkpoint(tmp_path_factory.mktemp("again") / kind, kind))
    prompt = random_prompt(LENGTH, 2)
    expected, closest = reference_greedy(reference, prompt, COUNT)
    assert closest > 1e-3
    assert len(set(expected)) > COUNT // 4
    assert run(Session(target, None), prompt, max_tokens=COUNT).tokens == expected


@pytest.mark.parametrize("right", range(8))
def test_speculative_decoding_is_plain_decoding(target: Target, cold: Cold, right: int) -> None:
    session = speculating(target, cold.tokens, right)
    reply = run(session, cold.tokens[:LENGTH], max_tokens=COUNT)
    assert reply.tokens == cold.tokens[LENGTH:]
    cold.assert_holds(session, LENGTH + COUNT - 1)


@pytest.mark.parametrize("right", [1, 7])
@pytest.mark.parametrize("held", [3, 8])
def test_a_session_goes_on_as_if_it_were_cold(
    target: Target, cold: Cold, right: int, held: int
) -> None:
    session = speculating(target, cold.tokens, right)
    run(session, cold.tokens[:LENGTH], max_tokens=held)
    reply = run(session, cold.tokens[: LENGTH + held], max_tokens=COUNT - held)
    assert reply.timings.prompt_cached_n == LENGTH + held - 1
    assert reply.tokens == cold.tokens[LENGTH + held :]
    cold.assert_holds(session, LENGTH + COUNT - 1)


def test_a_sampled_reply_depends_on_its_seed_alone(target: Target, cold: Cold) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9)
    replies = [
        run(session, cold.tokens[:LENGTH], max_tokens=COUNT, sampling=sampling, seed=5).tokens
        for session in (speculating(target, cold.tokens, 3), speculating(target, cold.tokens, 3))
    ]
    assert replies[0] == replies[1]


def test_a_cycle_carries_the_routes_of_its_rows(target: Target, cold: Cold) -> None:
    """As the target answered them, one list of experts a row, drafted rows too."""
    session = speculating(target, cold.tokens, 2)
    steps, _ = start(session, request(cold.tokens[:LENGTH], COUNT))
    for step in steps:
        if step.cycle is None:
            continue
        rows = 1 + len(step.cycle.proposal.tokens)
        assert step.cycle.answer.logits.shape[0] in (rows, rows - 1)
        routes = step.cycle.answer.routes
        assert sorted(routes) == list(range(5))
        for layer, chosen in routes.items():
            assert chosen.shape == (step.cycle.answer.logits.shape[0], 3)
            alone = target.advance(
                cold.tokens[: step.cycle.position + 1], target.new_state(), ()
            ).routes[layer]
            assert np.array_equal(np.array(chosen[0]), np.array(alone[-1]))
