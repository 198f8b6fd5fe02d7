"""The plain-MLX form of the gated delta rule, which may serve an exact engine too: row by row."""

import io

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.gated_delta_verify import gated_delta_verify_reference
from tests.kernels.delta_rows import Heads, cut, random_rows
from tests.states import in_numpy

ROWS = 8


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [Heads(2, 4, 128, 16), Heads(16, 48, 128, 8)], ids=str)
def test_rows_have_the_same_bits_for_every_cut(heads: Heads, dtype: mx.Dtype) -> None:
    """Two passes with any border, and the first of them pending with any number of rows behind."""
    rows, state = random_rows(ROWS, heads, dtype)
    together, after = gated_delta_verify_reference(rows, None, 0, state, True)
    for border in range(1, ROWS):
        head, tail = cut(rows, 0, border), cut(rows, border, ROWS)
        first, between = gated_delta_verify_reference(head, None, 0, state, True)
        second, last = gated_delta_verify_reference(tail, None, 0, between, True)
        behind, kept = gated_delta_verify_reference(tail, rows, border, state, True)
        both = mx.concatenate([first, second], axis=1)
        assert np.array_equal(in_numpy(both), in_numpy(together))
        assert np.array_equal(in_numpy(behind), in_numpy(second))
        assert np.array_equal(in_numpy(last), in_numpy(after))
        assert np.array_equal(in_numpy(kept), in_numpy(after))


def reductions(rows: int) -> int:
    """How many sums the outputs of so many rows take, each an operation of MLX."""
    held, state = random_rows(rows)
    y, _ = gated_delta_verify_reference(held, None, 0, state, True)
    graph = io.StringIO()
    mx.export_to_dot(graph, y)
    return graph.getvalue().count('"Sum"')


def test_no_sum_is_taken_of_several_rows_at_once() -> None:
    """A device may pick the order of summation by how many sums an operation takes."""
    assert reductions(1) > 0
    for rows in (2, 5, ROWS):
        assert reductions(rows) == rows * reductions(1)
