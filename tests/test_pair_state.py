"""Target and drafter of the demo pair together: a verify pass and its commit leave both as one token
at a time would, bit for bit, also where the drafter's ring wraps."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from lse_mlx import demo_pair
from lse_mlx.decode.session import Session
from lse_mlx.drafters.dflash2.drafter import DFlash2, DFlash2Context, load_dflash2
from lse_mlx.target.loading import load_target
from lse_mlx.target.model import Target
from tests.states import assert_same
from tests.tiny_models import on_cpu

BLOCK = 8
SLOTS = 128 - 1 + BLOCK  # of the demo drafter: its window without the anchor, and a block


@dataclass(frozen=True)
class Pair:
    target: Target
    drafter: DFlash2

    def session(self) -> Session:
        session = Session(self.target, self.drafter)
        session.context = self.drafter.new_context()
        return session

    def take(self, session: Session, rows: list[int], commit: int) -> None:
        """One pass over `rows`, of which the first `commit` become part of both."""
        answer = self.target.verify(rows, session.state, self.drafter.taps)
        session.state.commit(commit)
        assert session.context is not None
        session.context.append(answer.features[:commit], first=len(session.tokens))
        session.tokens += rows[:commit]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with on_cpu():
        target = load_target(demo_pair.TARGET)
        yield Pair(target, load_dflash2(demo_pair.DRAFTER, target))


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return [int(t) for t in np.random.default_rng(3).integers(4, 4096, 2 * SLOTS + 2 * BLOCK)]


def ring_of(session: Session) -> tuple[np.ndarray, list[np.ndarray]]:
    """The position in each slot, and what the live slots hold, layer by layer."""
    assert isinstance(session.context, DFlash2Context)
    ring = session.context._ring
    held = ring.view().slot_positions
    return held, [np.array(layer)[:, :, : len(held)][:, :, held >= 0] for layer in ring._layers]


def assert_same_pair(session: Session, expected: Session) -> None:
    assert session.tokens == expected.tokens
    assert_same(session.state, expected.state)
    (held, layers), (held_expected, layers_expected) = ring_of(session), ring_of(expected)
    assert np.array_equal(held, held_expected)
    for mine, theirs in zip(layers, layers_expected, strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("context", [1, 8, SLOTS - 9, SLOTS - 4, SLOTS, SLOTS + 3, 2 * SLOTS - 2])
def test_commits_leave_what_one_token_at_a_time_leaves(
    pair: Pair, tokens: list[int], context: int
) -> None:
    singly = pair.session()
    for token in tokens[:context]:
        pair.take(singly, [token], 1)
    for n in range(1, BLOCK + 1):
        blocks = pair.session()
        for at in range(0, context - context % BLOCK, BLOCK):
            pair.take(blocks, tokens[at : at + BLOCK], BLOCK)
        for token in tokens[len(blocks.tokens) : context]:
            pair.take(blocks, [token], 1)
        rejected = [(token + 1) % 4096 for token in tokens[context + n : context + BLOCK]]
        pair.take(blocks, [*tokens[context : context + n], *rejected], n)
        pair.take(singly, [tokens[len(singly.tokens)]], 1)
        assert_same_pair(blocks, singly)
