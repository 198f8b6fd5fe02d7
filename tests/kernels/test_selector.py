"""Scores against float64 and the order that the contract gives, and the walk against one by hand."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lse_mlx.drafters.dflash2.walk import greedy_walk
from lse_mlx.errors import DraftError
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.selector import MALFORMED, NOT_FINITE, path_reference, select
from lse_mlx.selftest.definitions import selector_scores, walk
from tests.kernels.modes import assert_same_bits, in_every_mode, needs_compiler, plain

VOCAB = 1000
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Block:
    """What `select` is called with, apart from the registry; shapes as it has them."""

    logits: Floats
    ids: NDArray[np.int32]
    predecessors: Floats
    gates: Floats
    successors: Floats

    def select(self, registry: Registry) -> list[mx.array]:
        inputs = (self.logits, self.ids, self.predecessors, self.gates, self.successors)
        selection = select(registry, *map(mx.array, inputs), VOCAB)
        return [selection.scores, selection.path]


def waves() -> Block:
    """Seven positions, sixteen candidates, rank 256, all data smooth."""

    def wave(function: np.ufunc, step: float, size: float, *shape: int) -> Floats:
        values = function(step * np.arange(np.prod(shape))) * size
        return values.astype(np.float32).reshape(shape)

    return Block(
        logits=wave(np.cos, 0.017, 0.23, 7, 16),
        ids=np.arange(7 * 16, dtype=np.int32).reshape(7, 16),
        predecessors=wave(np.sin, 0.013, 0.31, 7, 16, 256),
        gates=wave(np.sin, 0.037, 0.41, 7, 256),
        successors=wave(np.cos, 0.021, 0.29, 7, 16, 256),
    )


def random_block(positions: int, k: int, rank: int, seed: int) -> Block:
    rng = np.random.default_rng([seed, positions, k, rank])

    def normal(*shape: int) -> Floats:
        return rng.standard_normal(shape).astype(np.float32)

    ids = np.stack([rng.permutation(VOCAB)[:k] for _ in range(positions)]).astype(np.int32)
    predecessors, successors = normal(positions, k, rank), normal(positions, k, rank)
    return Block(normal(positions, k), ids, predecessors, normal(positions, rank), successors)


def given_scores(scores: Floats, ids: NDArray[np.int32]) -> Block:
    """A block whose scores are `scores` [positions, k, k], value for value, a zero's sign too.

    Predecessors are rows of the unit matrix, so a sum has one term that is not zero.
    """
    positions, k, _ = scores.shape
    predecessors = np.broadcast_to(np.eye(k, dtype=np.float32), scores.shape)
    # Zeros times an infinity would be NaN: those scores come in by the logits, below.
    finite = np.where(np.isfinite(scores), scores, np.float32(0))
    return Block(
        logits=np.full((positions, k), -0.0, np.float32),
        ids=ids,
        predecessors=np.ascontiguousarray(predecessors),
        gates=np.ones((positions, k), np.float32),
        successors=np.ascontiguousarray(finite.swapaxes(1, 2)),
    )


def exact_scores(block: Block) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scores in float64, and the sum of the terms' sizes."""
    asked = block.predecessors.astype(np.float64) * block.gates[:, None]
    terms = asked[:, :, None] * block.successors[:, None]
    exact = selector_scores(block.logits, block.predecessors, block.gates, block.successors)
    return exact, np.abs(terms).sum(-1)


def assert_within_bound(scores: Floats, block: Block) -> None:
    """The bound of rounding `rank` products and sums in any order, and once more at the end."""
    exact, size = exact_scores(block)
    narrowed = exact.astype(np.float32).astype(np.float64)
    unit = 2.0**-24
    roundings = (block.gates.shape[1] + 2) * unit
    bound = roundings / (1 - roundings) * size + 2 * unit / (1 - unit) * np.abs(narrowed)
    error = np.abs(scores - narrowed)
    assert (error <= bound).all(), f"{(error / bound).max()} of the bound"


def walk_by_hand(scores: Floats, ids: NDArray[np.int32]) -> list[int]:
    """Tokens and status as the contract words them."""
    return walk(scores, ids, VOCAB)


Form = Callable[[Block], tuple[Floats, list[int]]]


def by_reference(block: Block) -> tuple[Floats, list[int]]:
    scores, path = block.select(Registry("reference"))
    return np.array(scores), path.tolist()


def by_kernel(block: Block) -> tuple[Floats, list[int]]:
    scores, path = block.select(plain())
    return np.array(scores), path.tolist()


def by_kernel_in_every_mode(block: Block) -> tuple[Floats, list[int]]:
    scores, path = in_every_mode(block.select)
    return scores, path.tolist()


REFERENCE = pytest.param(by_reference, id="reference")
KERNEL = pytest.param(by_kernel, id="kernel", marks=needs_compiler)
MODES = pytest.param(by_kernel_in_every_mode, id="modes", marks=needs_compiler)
SLOW_MODES = pytest.param(
    by_kernel_in_every_mode, id="modes", marks=[needs_compiler, pytest.mark.slow]
)
FORMS = pytest.mark.parametrize("form", [REFERENCE, MODES])


@FORMS
def test_scores_of_a_whole_block_are_within_the_bound(form: Form) -> None:
    block = waves()
    scores, path = form(block)
    assert_within_bound(scores, block)
    assert path == walk_by_hand(scores, block.ids)


@FORMS
@pytest.mark.parametrize(
    ("positions", "k", "rank"), [(7, 5, 32), (1, 1, 7), (2, 32, 65), (3, 17, 64)]
)
def test_scores_of_other_shapes(form: Form, positions: int, k: int, rank: int) -> None:
    block = random_block(positions, k, rank, seed=1)
    scores, path = form(block)
    assert_within_bound(scores, block)
    assert path == walk_by_hand(scores, block.ids)


@needs_compiler
def test_the_order_of_the_sum_is_the_one_of_the_contract() -> None:
    """Bit for bit: rounded products, one fma after the other, then the logit.

    The data has few enough bits that float64 holds a product and a sum exactly, before it is rounded
    to fp32 once, as an fma does; a predecessor times a gate has more bits than fp32.
    """
    block = random_block(2, 4, 40, seed=3)
    bits = {"predecessors": 14, "gates": 14, "successors": 6}
    coarse = {name: np.round(getattr(block, name) * 2.0**n) / 2**n for name, n in bits.items()}
    block = replace(block, **{name: x.astype(np.float32) for name, x in coarse.items()})
    sums = np.zeros((2, 4, 4), np.float32)
    for r in range(40):
        asked = block.predecessors[:, :, r] * block.gates[:, None, r]
        assert asked.dtype == np.float32
        product = asked[:, :, None].astype(np.float64) * block.successors[:, None, :, r]
        sums = (product + sums).astype(np.float32)
    assert_same_bits(sums + block.logits[:, None], by_kernel_in_every_mode(block)[0])


@needs_compiler
def test_a_position_does_not_depend_on_the_others() -> None:
    block = random_block(7, 16, 64, seed=5)
    scores, _ = by_kernel_in_every_mode(block)
    for p in range(7):
        one = Block(*(getattr(block, name)[p : p + 1] for name in Block.__dataclass_fields__))
        assert_same_bits(scores[p : p + 1], by_kernel_in_every_mode(one)[0])


def lattice(seed: int) -> tuple[Floats, NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((7, 16, 16)).astype(np.float32)
    ids = np.stack([rng.permutation(VOCAB)[:16] for _ in range(7)]).astype(np.int32)
    return scores, ids


@FORMS
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "variant", ["normal", "all -0", "NaN on the path", "malformed id", "+inf beside the path"]
)
def test_walks(form: Form, seed: int, variant: str) -> None:
    """Exact, in five variants; `seed` is the first or the second of a batch of two."""
    scores, ids = lattice(seed)
    clean = walk_by_hand(scores, ids)
    taken = int(np.flatnonzero(ids[2] == clean[2])[0])
    if variant == "all -0":
        scores[:] = -0.0
    block, status = given_scores(scores, ids), 0
    if variant == "NaN on the path":
        block.successors[3, 5, taken], status = np.nan, NOT_FINITE
        scores[3, :, 5] = np.nan  # 0 times NaN
    elif variant == "malformed id":
        ids[4, 15], status = -1, MALFORMED
    elif variant == "+inf beside the path":
        beside = (taken + 1) % 16
        block.predecessors[3, beside], scores[3, beside] = np.inf, np.nan
        block.successors[3, :, :] = np.abs(block.successors[3]) + 1
        scores[3] = np.abs(scores[3]) + 1
        scores[3, beside] = np.inf
    got, path = form(block)
    np.testing.assert_array_equal(got, scores)
    assert path == walk_by_hand(scores, ids)
    assert path[-1] == status
    if not status:
        assert path[:-1] == greedy_walk(scores, ids, VOCAB).tokens
    else:
        with pytest.raises(DraftError):
            greedy_walk(scores, ids, VOCAB)


@FORMS
def test_ties_go_to_the_smaller_token_then_to_the_first_place(form: Form) -> None:
    ids = np.array([[9, 4, 7, 4], [1, 2, 3, 5]], np.int32)
    scores = np.zeros((2, 4, 4), np.float32)
    scores[1, 1] = [0, 1, 0, 0]  # reached only if place 1 was taken, not 3
    scores[1, 3] = [0, 0, 1, 0]
    assert form(given_scores(scores, ids))[1] == [4, 2, 0]


@FORMS
@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_a_malformed_winner_is_token_0_and_row_0_is_next(form: Form, bad: int) -> None:
    ids = np.array([[5, 6, 7], [8, 9, 3], [1, 2, 4]], np.int32)
    scores = np.zeros((3, 3, 3), np.float32)
    scores[0, :, 2] = scores[1, 2, 1] = scores[2, 0, 1] = scores[2, 1, 2] = 1
    assert form(given_scores(scores, ids))[1] == [7, 9, 4, 0]
    ids[1, 1] = bad
    assert form(given_scores(scores, ids))[1] == [7, 0, 2, MALFORMED]


@FORMS
def test_both_bits_of_the_status(form: Form) -> None:
    scores, ids = lattice(2)
    block = given_scores(scores, ids)
    block.logits[6, 1], ids[0, 9] = np.nan, VOCAB
    assert form(block)[1][-1] == NOT_FINITE | MALFORMED


@hypothesis_settings(max_examples=60)
@given(st.integers(0, 10_000))
def test_the_reference_walk_equals_one_by_hand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.array([-1, -0.0, 0.0, 2, np.nan, np.inf, -np.inf], np.float32)
    chances = np.array([9, 9, 9, 9, *rng.choice([0, 0.3], 3)])
    scores = rng.choice(values, (4, 3, 3), p=chances / chances.sum())
    ids = rng.integers(-1 if seed % 3 == 0 else 0, 6, (4, 3)).astype(np.int32)
    path = path_reference(mx.array(scores), mx.array(ids), VOCAB)
    assert path.tolist() == walk_by_hand(scores, ids)


@pytest.mark.parametrize("form", [KERNEL, SLOW_MODES])
@hypothesis_settings(max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_the_kernels_walk_equals_one_by_hand_on_rows_full_of_ties(form: Form, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(-1, 2, (7, 6, 6)).astype(np.float32)
    ids = rng.integers(-1 if seed % 3 == 0 else 0, 8, (7, 6)).astype(np.int32)
    got, path = form(given_scores(scores, ids))
    np.testing.assert_array_equal(got, scores)
    assert path == walk_by_hand(scores, ids)


@needs_compiler
@pytest.mark.parametrize(("positions", "k"), [(2, 33), (9, 29)])
def test_blocks_too_large_for_one_threadgroup_go_to_the_reference(positions: int, k: int) -> None:
    registry = plain()
    block = random_block(positions, k, 8, seed=0)
    scores, path = block.select(registry)
    assert dict(registry.served) == {("selector", "reference"): 1}
    assert path.tolist() == walk_by_hand(np.array(scores), block.ids)
