"""Rows of logits whose best are hard to order."""

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


def waves() -> Rows:
    """Seven rows of 248,320 columns, smooth, with one value above all others in five columns."""
    one = (np.sin(np.arange(248_320) * 0.00317) * 11).astype(np.float32)
    one[[1, 511, 512, 1025, 248_319]] = 20
    return np.stack([one] * 7)


def edges() -> Rows:
    """Four rows of 4,097 columns: infinities and ties, NaN, nothing but -inf, one value in six."""
    columns = np.arange(4097)
    rows = np.stack([((columns * 37) % 997) * 0.03125 - 17] * 4).astype(np.float32)
    rows[0, [73, 513]], rows[0, [17, 514]] = np.inf, -np.inf
    rows[0, [511, 512, 1025, 4096]] = 100
    rows[1, [511, 512, 4096]], rows[1, 1023], rows[1, 1024] = np.nan, np.inf, -np.inf
    rows[2] = -np.inf
    rows[3] = -9
    rows[3, [0, 511, 512, 1025, 2048, 4096]] = 7
    return rows


def more_edges() -> list[Rows]:
    """Three rows of 4,131 columns, and one of zeros with NaN and +inf."""
    columns = np.arange(4131)
    rows = np.stack([((columns * 37) % 997) * 0.03125 - 17] * 3).astype(np.float32)
    rows[:, [1, 511, 512, 1025, 4129]] = 100
    rows[1, [73, 1024]] = np.inf
    rows[2] = -np.inf
    zeros = np.zeros((1, 4096), np.float32)
    zeros[0, [17, 1027]], zeros[0, 4095] = np.nan, np.inf
    return [rows, zeros]


def planted(rows: int, width: int, seed: int) -> Rows:
    """Random rows with ties, NaN, infinities, both zeros and subnormal numbers at random columns.

    A row in three has few values to choose from, so that most of it is ties.
    """
    rng = np.random.default_rng([seed, rows, width])
    logits = rng.standard_normal((rows, width)).astype(np.float32)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 4.5, -4.5], np.float32)
    for row in logits:
        if rng.random() < 1 / 3:
            row[:] = rng.choice(rng.choice(special, 3), width)
        else:
            some = rng.random(width) < rng.choice([0.0, 0.01, 0.2])
            row[some] = rng.choice(special, int(some.sum()))
    return logits
