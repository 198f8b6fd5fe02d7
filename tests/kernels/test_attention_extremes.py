"""Attention where dot products are -inf: such a key has no weight, and the others keep theirs."""

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.sliding_attention import PARTITION, RingView, sliding_attention
from lse_mlx.kernels.verify_attention import FINE, verify_attention
from tests.kernels.modes import in_every_mode, needs_compiler

HEAD_DIM = 32
FAR = 1e20
"""Squared, more than fp32 holds."""

pytestmark = needs_compiler


def of_keys(far: slice, count: int) -> tuple[mx.array, np.ndarray, np.ndarray]:
    """A query, keys of which those in `far` have a dot product of -inf with it, and values.

    query [D]; keys, values [count, D]; the other keys have a dot product of 0
    """
    rng = np.random.default_rng(count)
    keys = np.zeros((count, HEAD_DIM), np.float32)
    keys[far] = -FAR
    values = rng.standard_normal((count, HEAD_DIM)).astype(np.float32)
    return mx.full((HEAD_DIM,), FAR), keys, values


@pytest.mark.parametrize(
    ("far", "count"),
    [
        (slice(0, 32), 40),  # a tile
        (slice(0, FINE), FINE + 9),  # a partition
        (slice(FINE, 2 * FINE), 2 * FINE + 3),  # one behind another
        (slice(64, 96), 100),
        (slice(0, 39), 40),
    ],
    ids=str,
)
def test_keys_at_minus_infinity_have_no_weight(far: slice, count: int) -> None:
    query, keys, values = of_keys(far, count)

    def run(registry: Registry) -> list[mx.array]:
        shaped = [mx.array(a)[None, None] for a in (keys, values)]
        return [verify_attention(registry, query[None, None, None], *shaped, count, 0.25)]

    [out] = in_every_mode(run)
    near = np.delete(values.astype(np.float64), far, axis=0)
    np.testing.assert_allclose(out[0, 0, 0], near.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("far", [slice(0, 32), slice(0, PARTITION)], ids=str)
def test_rows_of_a_ring_at_minus_infinity_have_no_weight(far: slice) -> None:
    slots = PARTITION + 8
    query, keys, values = of_keys(far, slots + 1)
    ring = mx.array(np.stack([keys[:slots], values[:slots]]))[:, None]
    block = mx.array(np.stack([keys[slots:], values[slots:]]))[:, None]
    view = RingView(position=slots, live=slots, window=4 * slots, slots=slots, block=1)
    [out] = in_every_mode(
        lambda registry: [sliding_attention(registry, query[None, None], ring, block, view)]
    )
    near = np.delete(values.astype(np.float64), far, axis=0)
    np.testing.assert_allclose(out[0], near.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(("sign", "expected"), [(-1.0, 0.0), (1.0, np.nan)])
def test_nothing_but_infinities(sign: float, expected: float) -> None:
    """As the contract in attention.h has it."""
    query, keys, values = of_keys(slice(0, 40), 40)

    def run(registry: Registry) -> list[mx.array]:
        shaped = [mx.array(a)[None, None] for a in (-sign * keys, values)]
        return [verify_attention(registry, query[None, None, None], *shaped, 40, 0.25)]

    [out] = in_every_mode(run)
    np.testing.assert_array_equal(out, np.full_like(out, expected))
