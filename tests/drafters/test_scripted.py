"""The scripted drafters do what they are for, under the rules of a real drafter's context."""

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import DraftContext, Drafter, Proposal
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import DraftError

SEQUENCE = list(range(100, 120))
NO_TAPS = mx.zeros((1, 0))


def context(drafter: Drafter, rows: int) -> DraftContext:
    """A context of `drafter` after `rows` committed rows."""
    made = drafter.new_context()
    made.append(mx.zeros((rows, 0)), 0)
    return made


def drafted(made: DraftContext, temperature: float = 0.0) -> list[int]:
    return made.propose(SEQUENCE[made.position], temperature, lambda: 0.5).tokens


def test_right_is_right_wherever_it_stands() -> None:
    made = context(ScriptedDrafter.right(SEQUENCE), rows=4)
    assert drafted(made) == [105, 106, 107, 108, 109, 110, 111]
    made.append(mx.zeros((8, 0)), 4)
    assert drafted(made, temperature=1.0) == [113, 114, 115, 116, 117, 118, 119]


def test_right_drafts_what_is_left_at_the_end() -> None:
    made = context(ScriptedDrafter.right(SEQUENCE), rows=17)
    assert drafted(made) == [118, 119]
    made.append(mx.zeros((2, 0)), 17)
    assert drafted(made) == []


@pytest.mark.parametrize("k", range(8))
def test_right_for_k_tokens_then_wrong(k: int) -> None:
    made = context(ScriptedDrafter.right_for(SEQUENCE, k, vocab_size=112), rows=3)
    right = SEQUENCE[4:11]
    matches = [a == b for a, b in zip(drafted(made), right, strict=True)]
    assert matches == [i < k for i in range(7)]
    assert all(0 <= token < 112 for token in drafted(made))


def test_listed_drafts_come_in_turn_for_each_context() -> None:
    drafter = ScriptedDrafter.listed([[1, 2], [], [3] * 9], depth=4)
    for _ in range(2):
        made = context(drafter, rows=1)
        assert [drafted(made) for _ in range(3)] == [[1, 2], [], [3] * 4]
        with pytest.raises(DraftError, match=r"Draft 3 .*script of 3"):
            drafted(made)


def test_its_q_is_certain_and_it_draws_nothing() -> None:
    made = context(ScriptedDrafter.right(SEQUENCE), rows=1)

    def uniform() -> float:
        raise AssertionError("a scripted draft is not drawn")

    proposal = made.propose(101, 1.0, uniform)
    assert [(q.ids.tolist(), q.probs.tolist()) for q in proposal.q] == [
        ([token], [1.0]) for token in proposal.tokens
    ]


def test_a_proposal_of_the_script_goes_out_as_it_is() -> None:
    q = Distribution(np.array([3, 5]), np.array([0.25, 0.75]))
    listed = [Proposal([5], [q], lambda: [q]), Proposal([], [])]
    made = context(ScriptedDrafter(lambda position, draft: listed[draft]), rows=1)
    for proposal in listed:
        assert made.propose(4, 1.0, lambda: 0.5) is proposal
    with pytest.raises(IndexError):
        made.propose(4, 1.0, lambda: 0.5)


def test_its_context_refuses_what_a_real_one_does() -> None:
    drafter = ScriptedDrafter.right(SEQUENCE, depth=3, taps=(0, 2))
    assert (drafter.taps, drafter.depth) == ((0, 2), 3)
    made = drafter.new_context()
    with pytest.raises(DraftError, match="append the prompt"):
        made.propose(0, 0.0, lambda: 0.5)
    made.append(mx.zeros((9, 8)), 0)
    with pytest.raises(DraftError, match="gap"):
        made.append(NO_TAPS, 10)
    with pytest.raises(DraftError, match="drops 5 rows"):
        made.append(NO_TAPS, 4)
    made.append(NO_TAPS, 5)
    assert made.position == 6
