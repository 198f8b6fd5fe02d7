"""What a DFlash2 context remembers: the ring, its visibility, its refusals."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lse_mlx.drafters.dflash2 import DFlash2, DFlash2Config, DFlash2Context, load_dflash2
from lse_mlx.drafters.dflash2.operations import Operations
from lse_mlx.drafters.dflash2.ring import ContextRing
from lse_mlx.errors import DraftError
from tests.drafters.forms import FORMS
from tests.drafters.tiny_dflash2 import (
    BLOCK,
    SLOTS,
    TAPS,
    WINDOW,
    random_features,
    save,
    shared,
    tiny_config,
    tiny_target,
    tiny_tensors,
)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> DFlash2:
    folder = save(tmp_path_factory.mktemp("tiny"), tiny_config(), tiny_tensors())
    return load_dflash2(folder, shared(tiny_target()))


def greedy(context: DFlash2Context, anchor: int = 5) -> list[int]:
    return context.propose(anchor, 0.0, lambda: 0.5).tokens


def ring_bits(context: DFlash2Context) -> NDArray[np.uint32]:
    """Every live slot of every layer, as bits."""
    ring = context._ring
    live = ring.view().slot_positions >= 0
    return np.stack([np.array(x)[:, :, :SLOTS][:, :, live] for x in ring._layers]).view(np.uint32)


@settings(max_examples=25)
@given(st.lists(st.integers(1, SLOTS + 4), min_size=1, max_size=6), st.integers(0, 3 * SLOTS))
def test_multi_row_appends_equal_one_row_appends_bit_for_bit(
    drafter: DFlash2, lengths: list[int], start: int
) -> None:
    features = mx.array(random_features(sum(lengths)))
    together, singly = drafter.new_context(), drafter.new_context()
    done = 0
    for length in lengths:
        together.append(features[done : done + length], start + done)
        done += length
    for row in range(max(0, done - SLOTS), done):
        singly.append(features[row : row + 1], start + row)
    assert together.position == singly.position
    np.testing.assert_array_equal(ring_bits(together), ring_bits(singly))
    np.testing.assert_array_equal(*(c._ring.view().slot_positions for c in (together, singly)))


@given(
    st.lists(st.tuples(st.integers(1, 2 * SLOTS), st.integers(0, BLOCK)), min_size=1, max_size=6)
)
@FORMS
def test_visibility_goes_by_absolute_position(
    form: Operations, steps: list[tuple[int, int]]
) -> None:
    ring = ContextRing(DFlash2Config.parse(tiny_config()), form)
    held: dict[int, int] = {}  # slot -> the position whose row it holds
    for rows, back in steps:
        kept = min(rows, SLOTS)
        first = ring.position
        ring.append(form.own(mx.zeros((2, 2, 2, kept, 16))), first, skipped=rows - kept)
        held |= {p % SLOTS: p for p in range(first, ring.position)}
        ring.rewind(ring.position - min(back, ring.live))
        held = {slot: p for slot, p in held.items() if p < ring.position}
    view = ring.view()
    assert sum(position >= 0 for position in view.slot_positions) == ring.live == len(held)
    seen_with_block = view.seen_with_block
    for query in range(BLOCK):
        at = ring.position + query
        seen = {slot for slot, position in held.items() if at - position < WINDOW}
        assert set(np.flatnonzero(view.seen[query])) == seen
        assert set(np.flatnonzero(seen_with_block[query, :SLOTS])) == seen
        assert seen_with_block[query, SLOTS:].all(), (
            "the block sees all of itself, rows ahead included"
        )


@FORMS
def test_a_rewind_of_a_full_ring_keeps_the_whole_window(form: Operations) -> None:
    """The ring is a block longer than the window, so that the anchor loses nothing."""
    ring = ContextRing(DFlash2Config.parse(tiny_config()), form)
    ring.append(form.own(mx.zeros((2, 2, 2, SLOTS, 16))), first=0)
    ring.append(form.own(mx.zeros((2, 2, 2, 5, 16))), first=SLOTS)
    ring.rewind(ring.position - BLOCK)
    assert ring.view().seen[0].sum() == WINDOW - 1


def test_features_overwritten_later_do_not_change_drafts(drafter: DFlash2) -> None:
    buffer = random_features(20)
    features = mx.array(buffer)
    context = drafter.new_context()
    context.append(features, 0)
    features[:] = 0.0
    features[3:7] = mx.array(buffer[:4])
    fresh = drafter.new_context()
    fresh.append(mx.array(buffer), 0)
    assert greedy(context) == greedy(fresh)
    np.testing.assert_array_equal(ring_bits(context), ring_bits(fresh))


def test_a_reset_context_is_a_new_one(drafter: DFlash2) -> None:
    context, fresh = drafter.new_context(), drafter.new_context()
    spoiled = random_features(SLOTS + 3, seed=1)
    spoiled[-1] = np.nan
    context.append(mx.array(spoiled), 0)
    context.reset()
    assert (context.position, context.live) == (0, 0)
    for each in (context, fresh):
        each.append(mx.array(random_features(4)), 50)
    assert greedy(context) == greedy(fresh)
    assert (context.position, context.live) == (54, 4)


def test_a_rewind_is_as_if_the_rows_never_came(drafter: DFlash2) -> None:
    features = mx.array(random_features(SLOTS + BLOCK))
    rewound, fresh = drafter.new_context(), drafter.new_context()
    rewound.append(features, 0)
    rewound.rewind(SLOTS)
    fresh.append(features[:SLOTS], 0)
    assert greedy(rewound) == greedy(fresh)
    assert rewound.live == SLOTS - BLOCK, "what was overwritten does not come back"


def test_contexts_of_one_drafter_do_not_touch_each_other(drafter: DFlash2) -> None:
    one, other = drafter.new_context(), drafter.new_context()
    one.append(mx.array(random_features(9)), 0)
    before = greedy(one)
    other.append(mx.array(random_features(30, seed=1)), 0)
    greedy(other)
    assert greedy(one) == before


@pytest.mark.parametrize(
    ("features", "first", "message"),
    [
        (mx.zeros((1, 192)), 9, "position 9 leaves a gap after position 6"),
        (mx.zeros((1, 192)), -2, "position -2"),
        (mx.zeros((0, 192)), 6, "at least one row"),
        (mx.zeros((2, 191)), 6, r"shape \[2, 191\].*\[rows, 192\].*\[1, 3, 4\]"),
        (mx.zeros(192), 6, r"shape \[192\]"),
        (mx.array(1.0), 6, r"shape \[\]"),
        (mx.zeros((1, 192), mx.bfloat16), 6, "bfloat16"),
        (mx.zeros((SLOTS + 1, 192)), 0, None),
    ],
)
def test_append_refusals_change_nothing(
    drafter: DFlash2, features: mx.array, first: int, message: str | None
) -> None:
    context = drafter.new_context()
    context.append(mx.array(random_features(6)), 0)
    before = ring_bits(context)
    if message is None:  # more rows than slots, in place of all six: allowed
        context.append(features, first)
        assert (context.position, context.live) == (SLOTS + 1, SLOTS)
        return
    with pytest.raises(DraftError, match=message):
        context.append(features, first)
    assert (context.position, context.live) == (6, 6)
    np.testing.assert_array_equal(ring_bits(context), before)


def test_rewinds_beyond_a_block_or_what_is_held_are_refused(drafter: DFlash2) -> None:
    context = drafter.new_context()
    context.append(mx.array(random_features(20)), 10)
    for attempt in (lambda: context.rewind(21), lambda: context.append(mx.zeros((1, 192)), 21)):
        with pytest.raises(DraftError, match="drops 9 rows"):
            attempt()
    context.rewind(22)
    context.rewind(14)
    with pytest.raises(DraftError, match="only 3 are held"):
        context.rewind(9)
    assert (context.position, context.live) == (14, 3)


@pytest.mark.parametrize(
    ("anchor", "temperature", "message"),
    [
        (199, 0.0, "anchor 199"),
        (-1, 0.0, "anchor -1"),
        (5, -0.5, "temperature -0.5"),
        (5, float("nan"), "temperature nan"),
        (5, float("inf"), "temperature inf"),
    ],
)
def test_propose_refusals(drafter: DFlash2, anchor: int, temperature: float, message: str) -> None:
    context = drafter.new_context()
    context.append(mx.array(random_features(6)), 0)
    with pytest.raises(DraftError, match=message):
        context.propose(anchor, temperature, lambda: 0.5)


def test_a_draft_without_context_is_refused(drafter: DFlash2) -> None:
    with pytest.raises(DraftError, match="append the prompt"):
        drafter.new_context().propose(5, 0.0, lambda: 0.5)


def test_features_that_are_not_finite_are_refused_at_the_draft(drafter: DFlash2) -> None:
    context = drafter.new_context()
    context.append(mx.full((3, 192), mx.nan), 0)
    for temperature in (0.0, 1.0):
        with pytest.raises(DraftError, match="Draft position 0 has the score nan"):
            context.propose(5, temperature, lambda: 0.5)


def test_what_the_interface_says(drafter: DFlash2) -> None:
    assert (drafter.taps, drafter.depth, drafter.name) == (TAPS, BLOCK - 1, "dflash2")
    assert drafter.new_context().position == 0
