"""The drafter against float64 NumPy: hidden rows, scores, paths, around the window's wrap."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from lse_mlx.drafters.dflash2 import DFlash2, DFlash2Context, load_dflash2
from lse_mlx.drafters.dflash2.weights import DFlash2Weights
from tests.drafters.reference_dflash2 import (
    ReferenceDrafter,
    decisive_margin,
    greedy_path,
    sampled_path,
)
from tests.drafters.tiny_dflash2 import (
    BLOCK,
    SLOTS,
    VOCAB,
    WINDOW,
    dense64,
    quantize,
    random_features,
    save,
    shared,
    tiny_config,
    tiny_target,
    tiny_tensors,
)

TEMPERATURE = 0.8


def pair(folder: Path, seed: int, bits: int = 0) -> tuple[DFlash2, ReferenceDrafter]:
    """A drafter loaded from disk and the reference with the same weights."""
    target, tensors, config = tiny_target(seed), tiny_tensors(seed), tiny_config()
    if bits:
        tensors = quantize(tensors, bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    reference = ReferenceDrafter(
        config,
        dense64(tensors, bits),
        target.table.astype(np.float64),
        target.output.astype(np.float64),
    )
    return load_dflash2(save(folder, config, tensors), shared(target)), reference


def clear_anchor(reference: ReferenceDrafter, uniforms: NDArray[np.float64], seed: int) -> int:
    """An anchor whose drafts hang on no difference below 3e-4, which fp32 could turn around."""
    for anchor in ((seed + i) % VOCAB for i in range(VOCAB)):
        if decisive_margin(reference.draft(anchor), TEMPERATURE, uniforms) > 3e-4:
            return anchor
    raise AssertionError("every anchor's draft is a near-tie: choose another seed")


def assert_same_draft(context: DFlash2Context, reference: ReferenceDrafter, seed: int) -> None:
    """Greedy and sampled drafts agree, and what they are chosen from is within 1e-4."""
    uniforms = np.random.default_rng(seed).uniform(size=BLOCK - 1)
    anchor = clear_anchor(reference, uniforms, seed)
    expected = reference.draft(anchor)
    assert context.position == reference.position
    lattice = context._drafter.lattice(anchor, context._ring)
    np.testing.assert_array_equal(np.array(lattice.ids), expected.candidates)
    np.testing.assert_allclose(np.array(lattice.scores), expected.scores, atol=2e-4)
    assert context.propose(anchor, 0.0, lambda: 0.5).tokens == greedy_path(expected)
    tokens, qs = sampled_path(expected, TEMPERATURE, iter(uniforms).__next__)
    proposal = context.propose(anchor, TEMPERATURE, iter(uniforms).__next__)
    assert proposal.tokens == tokens
    for position, q in enumerate(proposal.q):
        np.testing.assert_array_equal(q.ids, expected.candidates[position])
        np.testing.assert_allclose(q.probs, qs[position], atol=1e-4)


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_drafts_equal_the_reference_through_accepted_lengths_and_the_wrap(
    tmp_path: Path, bits: int, on_host: bool
) -> None:
    drafter, reference = pair(tmp_path, seed=bits, bits=bits)
    weights = DFlash2Weights.read(tmp_path, drafter.config)
    drafter = DFlash2(drafter.config, weights, drafter._shared, on_host=on_host)
    context = drafter.new_context()
    features = random_features(70, seed=bits)
    context.append(mx.array(features[:5]), 0)
    reference.append(features[:5].astype(np.float64), 0)
    # Accepted lengths 0..7 commit 1..8 rows a pass, past the window and twice around the ring.
    for step, rows in enumerate([1, 8, 2, 7, 3, 6, 4, 5, 8, 8, 1, 1]):
        assert_same_draft(context, reference, seed=31 * step + bits)
        first = context.position
        context.append(mx.array(features[first : first + rows]), first)
        reference.append(features[first : first + rows].astype(np.float64), first)
    assert context.position > 2 * SLOTS


@pytest.mark.parametrize(
    "rows", [1, WINDOW - 1, WINDOW, SLOTS - 1, SLOTS, SLOTS + 1, 2 * SLOTS + 3]
)
def test_first_appends_of_any_length(tmp_path: Path, rows: int) -> None:
    drafter, reference = pair(tmp_path, seed=rows)
    context, features = drafter.new_context(), random_features(rows)
    context.append(mx.array(features), 0)
    reference.append(features.astype(np.float64), 0)
    assert_same_draft(context, reference, seed=rows)


@pytest.mark.parametrize("held", [10, SLOTS, 2 * SLOTS])
def test_replaced_rows_are_as_if_the_first_ones_never_came(tmp_path: Path, held: int) -> None:
    drafter, reference = pair(tmp_path, seed=held)
    context, features = drafter.new_context(), random_features(held)
    context.append(mx.array(features), 0)
    reference.append(features.astype(np.float64), 0)
    other = random_features(3, seed=9)
    for first in (held - 8, held - 10):
        context.append(mx.array(other), first)
        reference.append(other.astype(np.float64), first)
        assert_same_draft(context, reference, seed=first)


@pytest.mark.gpu
@pytest.mark.skipif(not mx.is_available(mx.gpu), reason="no GPU that MLX can use is here")
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_drafts_on_a_gpu_equal_the_reference(tmp_path: Path, bits: int) -> None:
    mx.set_default_device(mx.Device(mx.gpu))
    try:
        drafter, reference = pair(tmp_path, seed=bits, bits=bits)
        context, features = drafter.new_context(), random_features(40, seed=bits)
        for first, rows in ((0, 25), (25, 8), (33, 1)):
            context.append(mx.array(features[first : first + rows]), first)
            reference.append(features[first : first + rows].astype(np.float64), first)
            assert_same_draft(context, reference, seed=first)
    finally:
        mx.set_default_device(mx.Device(mx.cpu))


def test_hidden_rows_are_within_1e_4(tmp_path: Path) -> None:
    drafter, reference = pair(tmp_path, seed=4)
    context, features = drafter.new_context(), random_features(33)
    context.append(mx.array(features), 0)
    reference.append(features.astype(np.float64), 0)
    block = mx.array([11] + [7] * (BLOCK - 1))
    hidden = drafter._model.block_rows(drafter._shared.embed(block), context._ring)
    np.testing.assert_allclose(np.array(hidden), reference.draft(11).hidden, atol=1e-4)


def test_a_shift_of_all_positions_changes_next_to_nothing(tmp_path: Path) -> None:
    """Attention knows distances only; angles taken in fp32 would drift at such positions."""
    drafter, _ = pair(tmp_path, seed=5)
    features = mx.array(random_features(SLOTS))
    scores = []
    for first in (0, 200_000):
        context = drafter.new_context()
        context.append(features, first)
        scores.append(np.array(drafter.lattice(3, context._ring).scores))
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-4)


def test_a_replay_with_the_same_uniforms_is_the_same_draft(tmp_path: Path) -> None:
    drafter, _ = pair(tmp_path, seed=6)
    drafts = []
    for _ in range(2):
        context = drafter.new_context()
        context.append(mx.array(random_features(20)), 0)
        uniforms = np.random.default_rng(1).uniform(size=BLOCK - 1)
        drafts.append(context.propose(5, 1.0, iter(uniforms).__next__))
    assert drafts[0].tokens == drafts[1].tokens
    for one, other in zip(drafts[0].q, drafts[1].q, strict=True):
        np.testing.assert_array_equal(one.probs, other.probs)


def test_drafting_changes_no_state(tmp_path: Path) -> None:
    drafter, _ = pair(tmp_path, seed=7)
    context = drafter.new_context()
    context.append(mx.array(random_features(SLOTS + 2)), 0)
    first = context.propose(5, 0.0, lambda: 0.5)
    context.propose(6, 1.0, lambda: 0.5)
    assert context.propose(5, 0.0, lambda: 0.5).tokens == first.tokens
    assert (context.position, context.live) == (SLOTS + 2, SLOTS)


def test_every_draft_is_the_full_trained_block(tmp_path: Path) -> None:
    """Whoever uses fewer tokens takes the first of seven: the head always sees seven rows."""
    target, config = tiny_target(8), tiny_config()
    drafter = load_dflash2(save(tmp_path, config, tiny_tensors(8)), shared(target))
    context = drafter.new_context()
    context.append(mx.array(random_features(6)), 0)
    proposal = context.propose(5, 0.0, lambda: 0.5)
    assert target.head_rows == [BLOCK - 1]
    assert len(proposal.tokens) == len(proposal.q) == drafter.depth == BLOCK - 1
    assert proposal.first(3).tokens == proposal.tokens[:3]
