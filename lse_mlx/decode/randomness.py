"""The random numbers of one request: three independent streams, fixed by the seed alone."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lse_mlx.decode.values import check_integer


@dataclass(frozen=True)
class Streams:
    """Independent uniforms in [0, 1).

    draft:    what the drafter draws its proposal with
    accept:   the test of each proposed token
    residual: the draw after a rejection, and every draw of the target alone
    """

    draft: Callable[[], float]
    accept: Callable[[], float]
    residual: Callable[[], float]

    @classmethod
    def from_seed(cls, seed: int) -> "Streams":
        """The streams of `seed` (any integer from 0). Raises RequestError for anything else."""
        check_integer("seed", seed, 0, "an integer from 0 up")
        children = np.random.SeedSequence(int(seed)).spawn(3)
        return cls(*(np.random.default_rng(child).random for child in children))
