"""Greedy decoding: plain is mlx-lm's, speculative is plain, token for token and bit for bit."""

from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest

from lse_mlx.decode.session import Session
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.target.model import Target
from tests.decode.runs import TAPS, Cold, known_sequence, request, run, speculating, start
from tests.tiny_models import (
    VOCAB,
    RecordingDrafter,
    load_reference,
    random_prompt,
    reference_greedy,
)

COUNT = 20
# Length of the prompt to the seed that draws it; chosen so that no two logits come close. The longest
# is past the window that the demo drafter sees.
PROMPTS = {1: 2, 2: 0, 7: 4, 8: 3, 9: 2, 40: 1, 140: 4}
each_length = pytest.mark.parametrize("length", PROMPTS)


@pytest.fixture(scope="module")
def reference(folder: Path) -> nn.Module:
    return load_reference(folder)


@pytest.fixture(scope="module")
def cold(target: Target) -> dict[int, Cold]:
    """For each prompt the whole sequence, decoded one token at a time by the target alone."""
    return {
        length: known_sequence(target, random_prompt(length, seed), COUNT)
        for length, seed in PROMPTS.items()
    }


@each_length
def test_plain_decoding_is_that_of_mlx_lm(
    target: Target, reference: nn.Module, length: int
) -> None:
    prompt = random_prompt(length, PROMPTS[length])
    expected, closest = reference_greedy(reference, prompt, COUNT)
    assert closest > 1e-3  # far above what another order of summation can do
    assert len(set(expected)) > COUNT // 4
    assert run(Session(target, None), prompt, max_tokens=COUNT).tokens == expected


@each_length
@pytest.mark.parametrize("right", range(8))
def test_speculative_decoding_is_plain_decoding(
    target: Target, cold: dict[int, Cold], length: int, right: int
) -> None:
    known = cold[length].tokens
    session = speculating(target, known, right)
    reply = run(session, known[:length], max_tokens=COUNT)
    assert reply.tokens == known[length:]
    assert reply.reason == "max_tokens"
    assert reply.timings.passes > 0
    # Near the end a proposal is shorter, so the last pass may accept fewer.
    assert reply.timings.accepted[:right] == reply.timings.tested[:right]
    assert sum(reply.timings.accepted[right:]) == 0
    cold[length].assert_holds(session, length + COUNT - 1)


@pytest.mark.parametrize("length", [2, 7, 9, 40, 140])
@pytest.mark.parametrize("prefill_rows", [1, 3, 8])
@pytest.mark.parametrize("speculate", [False, True])
def test_a_prompt_in_pieces_changes_nothing(
    target: Target, cold: dict[int, Cold], length: int, prefill_rows: int, speculate: bool
) -> None:
    known = cold[length].tokens
    session = speculating(target, known, 3)
    reply = run(
        session, known[:length], max_tokens=9, prefill_rows=prefill_rows, speculate=speculate
    )
    assert reply.tokens == known[length : length + 9]
    cold[length].assert_holds(session, length + 8)


@pytest.mark.parametrize("seed", range(8))
def test_accepted_lengths_may_change_from_pass_to_pass(
    target: Target, cold: dict[int, Cold], seed: int
) -> None:
    known = cold[9].tokens
    right = np.random.default_rng(seed).integers(0, 8, len(known)).tolist()

    def script(at: int, made_before: int) -> list[int]:
        coming = known[at + 1 : at + 8]
        return [t if i < right[at] else (t + 1) % VOCAB for i, t in enumerate(coming)]

    session = Session(target, RecordingDrafter(ScriptedDrafter(script, 7, TAPS)))
    assert run(session, known[:9], max_tokens=COUNT).tokens == known[9:]
    cold[9].assert_holds(session, 9 + COUNT - 1)


def test_after_every_step_the_session_holds_all_but_the_last_token(
    target: Target, cold: dict[int, Cold]
) -> None:
    known = cold[7].tokens
    for right in (0, 2, 7):
        session = speculating(target, known, right)
        steps, _ = start(session, request(known[:7], COUNT))
        held = 7
        for step in steps:
            held += len(step.tokens)
            cold[7].assert_holds(session, held - 1)
        assert held == 7 + COUNT


def test_every_step_but_the_last_has_tokens_and_no_reason(
    target: Target, cold: dict[int, Cold]
) -> None:
    known = cold[7].tokens
    steps = list(start(speculating(target, known), request(known[:7], COUNT))[0])
    assert [len(s.tokens) for s in steps] == [1, 8, 8, 3]
    assert [s.reason for s in steps] == [None, None, None, "max_tokens"]
