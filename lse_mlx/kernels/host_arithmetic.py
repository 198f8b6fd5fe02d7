"""What stands between matrix products on a CPU, in NumPy: the one copy for target and drafter.

Sums run along a row, so a row's bits do not depend on how many rows there are. NumPy's exp is
several times as fast as MLX's on a CPU.
"""

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


def host_norm(x: Rows, weight: Rows, eps: float) -> Rows:
    """x / sqrt(mean(x^2) + eps) * weight along the last axis; weight has x's last axes or fewer."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def host_sigmoid(x: Rows) -> Rows:
    """1 / (1 + exp(-x)), of any shape."""
    with np.errstate(over="ignore"):  # exp of a large -x is inf, and the sigmoid then 0
        return np.float32(1) / (np.float32(1) + np.exp(-x))


def host_silu(x: Rows) -> Rows:
    """x * sigmoid(x), of any shape."""
    with np.errstate(over="ignore"):  # exp of a large -x is inf, and silu then -0
        return x / (np.float32(1) + np.exp(-x))
