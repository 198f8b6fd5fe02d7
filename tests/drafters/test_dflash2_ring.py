"""Writes to the ring: exact, in place, across its end; and attention over what a write left."""

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.checkpoints.drafter_config import DFlash2Config
from lse_mlx.drafters.dflash2.operations import Operations, device_operations
from lse_mlx.drafters.dflash2.ring import ContextRing
from lse_mlx.kernels.registry import Registry
from tests.drafters.forms import FORMS
from tests.drafters.tiny_dflash2 import tiny_config
from tests.kernels.attention_in_float64 import Window
from tests.kernels.modes import in_every_mode, needs_compiler

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 2, 4, 2, 128, 8
WINDOW, SLOTS = 2048, 2055
KV_SHAPE = (2, KV_HEADS, HEAD_DIM)


def wide_ring(form: Operations) -> ContextRing:
    """A ring of the drafter's own length, two layers of two key/value heads."""
    values = tiny_config(head_dim=HEAD_DIM) | {
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "sliding_window": WINDOW,
    }
    config = DFlash2Config.parse(values)
    assert (config.ring_slots, config.block_size) == (SLOTS, BLOCK)
    return ContextRing(config, form)


def rows_at(positions: np.ndarray) -> np.ndarray:
    """Keys and values of rows, [layers, 2, kv heads, rows, head_dim]: sines of their own number."""
    shape = (LAYERS, 2, KV_HEADS, len(positions), HEAD_DIM)
    row = np.arange(LAYERS * 2 * KV_HEADS * HEAD_DIM).reshape(LAYERS, 2, KV_HEADS, 1, HEAD_DIM)
    return np.broadcast_to(np.sin(0.017 * row + 0.3 * positions[:, None]), shape).astype(np.float32)


def append(ring: ContextRing, form: Operations, first: int, count: int) -> None:
    rows = rows_at(np.arange(first, first + count))
    ring.append(form.own(mx.array(rows)), first)


def address(array: mx.array | np.ndarray) -> int:
    if isinstance(array, mx.array):
        mx.eval(array)
        array = np.asarray(memoryview(array))
    return array.__array_interface__["data"][0]


@FORMS
@pytest.mark.parametrize("rewind", [0, 3])
@pytest.mark.parametrize("live", [17, SLOTS])
def test_eight_rows_from_slot_2053_on(form: Operations, live: int, rewind: int) -> None:
    """Two of them before the end of the ring and six after it; all else keeps its bits."""
    ring = wide_ring(form)
    end = 3 * SLOTS + 2053 + rewind  # of the rows held before
    append(ring, form, end - live, live)
    ring.rewind(end - rewind)
    before = [np.array(ring.layer(index)) for index in range(LAYERS)]
    first = ring.position
    assert first % SLOTS == 2053
    append(ring, form, first, 8)

    assert (ring.position, ring.live) == (first + 8, min(SLOTS, live - rewind + 8))
    written = (first + np.arange(8)) % SLOTS
    assert list(written) == [2053, 2054, 0, 1, 2, 3, 4, 5]
    new = rows_at(first + np.arange(8))
    for index in range(LAYERS):
        expected = before[index]
        expected[:, :, written] = new[index]
        np.testing.assert_array_equal(np.array(ring.layer(index)), expected)


@FORMS
def test_writes_and_drafts_leave_the_ring_where_it_lies(form: Operations) -> None:
    """No copy of it is ever made: what was read by a finished draft is written in place."""
    ring = wide_ring(form)
    append(ring, form, 0, SLOTS)
    where = [address(ring.layer(index)) for index in range(LAYERS)]
    for first in (SLOTS, SLOTS + 8, SLOTS + 15):
        append(ring, form, first, 8)
        queries = form.own(mx.ones((BLOCK, HEADS, HEAD_DIM)))
        block = form.own(mx.ones((2, KV_HEADS, BLOCK, HEAD_DIM)))
        mixed = form.attend(queries, ring.layer(1), block, ring.view())
        assert np.isfinite(np.array(mixed)).all()
        del mixed
    ring.rewind(ring.position - 8)
    append(ring, form, ring.position, 3)
    assert [address(ring.layer(index)) for index in range(LAYERS)] == where


@needs_compiler
@pytest.mark.parametrize("rewind", [0, 3])
@pytest.mark.parametrize("live", [17, 200])
def test_attention_over_a_ring_that_was_written_and_rewound(live: int, rewind: int) -> None:
    """What a write across the end left, read by the kernel, is what float64 says of the rows."""
    rng = np.random.default_rng([live, rewind])
    queries = rng.standard_normal((BLOCK, HEADS, HEAD_DIM)).astype(np.float32)
    first = 5 * SLOTS + 2053
    position = first + BLOCK - rewind
    window: list[Window] = []

    def run(registry: Registry) -> list[mx.array]:
        form = device_operations(registry)
        ring = wide_ring(form)
        append(ring, form, first - live, live)
        append(ring, form, first, BLOCK)
        ring.rewind(position)
        block = rows_at(position + np.arange(BLOCK))[1]
        held = np.concatenate([rows_at(np.arange(first - live, position))[1], block], axis=2)
        window[:] = [Window(queries, held[0], held[1], position, WINDOW, SLOTS)]
        assert ring.live == window[0].live
        return [form.attend(mx.array(queries), ring.layer(1), mx.array(block), ring.view())]

    [out] = in_every_mode(run)
    np.testing.assert_allclose(out, window[0].expected(), rtol=0, atol=2e-6)
