"""An open pass keeps small inputs of its rows, never a state per row; nothing grows with passes."""

import gc
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.target.model import Target
from lse_mlx.target.state import DeltaState, TargetState
from tests.tiny_models import random_prompt

ROWS = 8
FP32 = 4


def held_bytes(state: TargetState) -> int:
    return sum(array.nbytes for array in state.arrays())


def allocated(state: TargetState) -> int:
    """Bytes that MLX has allocated once `state` is evaluated and everything else is let go, and
    those of the buffers behind its NumPy arrays."""
    arrays = state.arrays()
    mx.eval([array for array in arrays if isinstance(array, mx.array)])
    gc.collect()
    buffers = [buffer_of(array) for array in arrays if isinstance(array, np.ndarray)]
    return mx.get_active_memory() + sum({id(b): b.nbytes for b in buffers}.values())


def buffer_of(array: np.ndarray) -> np.ndarray:
    """The array that owns the memory which `array` is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def row_inputs(target: Target, rows: int) -> int:
    """What `rows` rows of a pass may keep: per delta layer k, v, decay, beta and the conv's inputs
    behind a copy of its tail, in fp32. A device keeps q too, and needs less: it is bf16 there."""
    total = 0
    for layer in target.trunk.layers:
        if layer.is_linear:
            delta = layer.linear_attn
            per_row = delta.key_dim + delta.value_dim + 2 * delta.num_v_heads + delta.conv_dim
            total += FP32 * (rows * per_row + (delta.conv_kernel_size - 1) * delta.conv_dim)
    return total


def one_state(target: Target) -> int:
    """Bytes of the recurrent states of all delta layers."""
    return sum(
        FP32 * layer.linear_attn.num_v_heads * 32 * 32
        for layer in target.trunk.layers
        if layer.is_linear
    )


def shared_rows(target: Target) -> int:
    """The q and k in the rows of the convolution's output that v is a part of."""
    return sum(
        FP32 * ROWS * 2 * layer.linear_attn.key_dim
        for layer in target.trunk.layers
        if layer.is_linear
    )


@pytest.fixture
def state(hybrid: Target) -> TargetState:
    state = hybrid.new_state()
    hybrid.advance(random_prompt(20), state, ())
    return state


def test_an_open_pass_adds_no_more_than_its_rows_inputs(hybrid: Target, state: TargetState) -> None:
    before = held_bytes(state)
    hybrid.verify(random_prompt(ROWS), state, ())
    assert held_bytes(state) <= before + row_inputs(hybrid, ROWS)


def test_the_growth_is_per_row_and_below_a_state_per_row(hybrid: Target) -> None:
    opened = {}
    for rows in (2, ROWS):
        state = hybrid.new_state()
        hybrid.advance(random_prompt(20), state, ())
        hybrid.verify(random_prompt(rows), state, ())
        opened[rows] = held_bytes(state)
    growth = opened[ROWS] - opened[2]
    assert growth <= row_inputs(hybrid, ROWS) - row_inputs(hybrid, 2)
    assert growth < (ROWS - 2) * one_state(hybrid) / 4


def test_each_delta_layer_holds_one_recurrent_state_while_a_pass_is_open(
    hybrid: Target, state: TargetState
) -> None:
    before = [x.recurrent for x in state.layers if isinstance(x, DeltaState)]
    hybrid.verify(random_prompt(ROWS), state, ())
    for layer, recurrent in zip(
        (x for x in state.layers if isinstance(x, DeltaState)), before, strict=True
    ):
        assert layer.recurrent is recurrent
        assert states_in(layer) == 1
    state.commit(5)
    hybrid.verify(random_prompt(ROWS), state, ())
    for layer in state.layers:
        if isinstance(layer, DeltaState):
            assert layer.pending is None
            assert states_in(layer) == 1


def states_in(layer: DeltaState) -> int:
    """How many arrays of a recurrent state's size there are."""
    return sum(a.size >= layer.recurrent.size for a in layer.arrays())


def test_what_mlx_allocates_is_the_inputs_of_two_passes_at_most(
    hybrid: Target, state: TargetState
) -> None:
    # MLX shares memory between arrays: a tail or a v may keep the rows that it was cut from.
    allowed = allocated(state) + 2 * row_inputs(hybrid, ROWS) + 2 * shared_rows(hybrid)
    for i in range(4):
        hybrid.verify(random_prompt(ROWS, seed=i), state, ())
        assert allocated(state) <= allowed
        state.commit(ROWS)
    assert allowed - allocated(hybrid.new_state()) < ROWS * one_state(hybrid)


@pytest.mark.parametrize("accept", [lambda i: 1, lambda i: ROWS, lambda i: 1 + i % ROWS])
def test_fifty_passes_hold_no_more_than_the_first(
    hybrid: Target, accept: Callable[[int], int]
) -> None:
    def kept(count: Callable[[TargetState], int]) -> int:
        return count(state) - sum(
            2 * x.keys.nbytes for x in state.layers if not isinstance(x, DeltaState)
        )

    state = hybrid.new_state()
    hybrid.advance(random_prompt(20), state, ())
    for i in range(52):
        hybrid.verify(random_prompt(ROWS, seed=i), state, ())
        if i == 2:
            count, held, most = len(state.arrays()), kept(held_bytes), kept(allocated) + 4096
        if i > 2:
            assert len(state.arrays()) == count
            assert kept(held_bytes) == held
        if i == 51:
            assert kept(allocated) <= most
        state.commit(accept(i))


def test_a_long_prompt_leaves_no_more_than_a_short_one(hybrid: Target) -> None:
    left = {}
    for length in (8, 248):  # within one step of the attention cache
        empty = allocated(hybrid.new_state())
        state = hybrid.new_state()
        hybrid.advance(random_prompt(length), state, ())
        left[length] = allocated(state) - empty
        del state
    assert left[248] <= left[8] + 4096
