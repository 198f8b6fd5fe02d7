"""How rows of numbers become a digest that any runtime can compute."""

from hashlib import sha256

import numpy as np
from numpy.typing import NDArray


def rows_digest(rows: NDArray[np.float32]) -> str:
    """SHA-256 of fp32 `rows` (any shape), row-major and little endian, as 64 hexadecimal digits."""
    return sha256(np.ascontiguousarray(rows, dtype="<f4").tobytes()).hexdigest()


def payload_name(step: int) -> str:
    """The tensor that holds the hidden rows of `step` (from 1)."""
    return f"step.{step:06d}.hidden"
