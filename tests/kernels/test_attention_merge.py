"""Merging partitions: the definition, and partitions that saw nothing."""

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.attention_merge import merge_partitions
from tests.kernels.modes import assert_same_bits, in_every_mode, needs_compiler

pytestmark = needs_compiler

SCALE = 0.25


def parts(partitions: int, vectors: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Accumulators, and (largest dot product, sum of weights), which is at least 1."""
    rng = np.random.default_rng([partitions, vectors])
    accumulators = rng.standard_normal((partitions, vectors, width)).astype(np.float32)
    stats = np.stack(
        [20 * rng.standard_normal((partitions, vectors)), rng.uniform(1, 9, (partitions, vectors))],
        axis=-1,
    ).astype(np.float32)
    return accumulators, stats


def merged(accumulators: np.ndarray, stats: np.ndarray, dtype: mx.Dtype = mx.float32) -> np.ndarray:
    arrays = mx.array(accumulators), mx.array(stats.reshape(-1))
    [out] = in_every_mode(
        lambda registry: [merge_partitions(registry, *arrays, scale=SCALE, dtype=dtype)]
    )
    return out


@pytest.mark.parametrize("partitions", [1, 2, 9])
def test_it_weighs_partitions_by_their_largest_score(partitions: int) -> None:
    accumulators, stats = parts(partitions, 5, 64)
    largest, sums = stats[..., 0].astype(np.float64), stats[..., 1].astype(np.float64)
    weights = np.exp(SCALE * (largest - largest.max(axis=0)))
    expected = (weights[..., None] * accumulators).sum(0) / (weights * sums).sum(0)[:, None]
    np.testing.assert_allclose(merged(accumulators, stats), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_partition_that_saw_nothing_changes_no_bit(at: int) -> None:
    accumulators, stats = parts(3, 5, 32)
    accumulators[:, 0] = -0.0  # 0 * 0 + -0 would be +0
    more = np.insert(accumulators, at, np.nan, axis=0)
    with_empty = np.insert(stats, at, [-np.inf, 0], axis=0)
    assert_same_bits(merged(accumulators, stats), merged(more, with_empty))


def test_what_saw_nothing_at_all_is_zero() -> None:
    accumulators, stats = parts(3, 5, 32)
    stats[:, 2] = [-np.inf, 0]
    out = merged(accumulators, stats)
    assert not out[2].any()
    assert out[[0, 1, 3, 4]].all()


def test_a_nan_is_not_taken_for_nothing() -> None:
    accumulators, stats = parts(3, 5, 32)
    stats[1, 4] = [-np.inf, np.nan]
    out = merged(accumulators, stats)
    assert np.isnan(out[4]).all()
    assert np.isfinite(out[:4]).all()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_the_result_is_rounded_once(dtype: mx.Dtype) -> None:
    accumulators, stats = parts(4, 5, 32)
    rounded = mx.array(merged(accumulators, stats)).astype(dtype).astype(mx.float32)
    out = merged(accumulators, stats, dtype)
    np.testing.assert_array_equal(out.astype(np.float32), np.array(rounded))
