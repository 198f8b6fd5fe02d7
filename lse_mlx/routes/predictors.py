"""What guesses the routes of a target of experts: an interface, and the simplest guess."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Routes = Mapping[int, NDArray[np.int32]]
"""By layer, the experts of some rows in native rank order, [rows, top_k]."""


@dataclass(frozen=True)
class Prediction:
    """Experts of one layer for one position, the likeliest first, each with a number from 0 to 1."""

    experts: tuple[int, ...]
    confidence: tuple[float, ...]


class RoutePredictor(Protocol):
    """What guesses routes. It is given copies, and nothing that it could change."""

    def predict(self, position: int, token: int) -> Mapping[int, Prediction]:
        """By layer, the experts that `token` at `position` may choose; any layers, any number."""
        ...

    def observe(self, position: int, routes: Routes) -> None:
        """Learn the routes of committed rows, from `position` on."""
        ...


@dataclass
class Previous:
    """Predicts the routes of the last committed row, for every position of the block."""

    last: dict[int, Prediction] = field(default_factory=dict, init=False)

    def predict(self, position: int, token: int) -> Mapping[int, Prediction]:
        """See `RoutePredictor`."""
        return self.last

    def observe(self, position: int, routes: Routes) -> None:
        """See `RoutePredictor`."""
        self.last = {
            layer: Prediction(tuple(rows[-1].tolist()), (1.0,) * rows.shape[1])
            for layer, rows in routes.items()
        }
