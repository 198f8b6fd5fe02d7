"""An operation for races, with a clock that is scripted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from lse_mlx.errors import KernelError
from lse_mlx.kernels.choices import STOCK, Choices
from lse_mlx.kernels.race import Contest, RaceResult, race

SHAPE = "3x4x4 4-bit"


@dataclass
class Track:
    """An operation y = W x in forms that are off by what `wrong` says, and a clock of its own.

    seconds: what a chain of each form takes, round by round, the warm-up round first; or always
    failing: what the calls of a form raise; stopped: what timing a form raises
    calls:   (form, weight, input) of every call
    """

    seconds: dict[str, float | Sequence[float]]
    wrong: dict[str, float] = field(default_factory=dict)
    broken: str = ""
    failing: dict[str, Exception] = field(default_factory=dict)
    stopped: dict[str, Exception] = field(default_factory=dict)
    choices: Choices = field(default_factory=lambda: Choices("stock"))
    calls: list[tuple[str, int, mx.array]] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    def contest(self, shape: str = SHAPE, weights: int = 2) -> Contest:
        own = tuple(form for form in self.seconds if form != STOCK)

        def step(weight: int) -> Callable[[mx.array], mx.array]:
            matrix = mx.array(np.random.default_rng(weight).standard_normal((4, 4), np.float32))

            def run(x: mx.array) -> mx.array:
                form = self.choices.form("product", shape, own)
                if form == self.broken:
                    raise KernelError("The kernel product does not run on this device.")
                if form in self.failing:
                    raise self.failing[form]
                self.calls.append((form, weight, x))
                return x @ matrix * (1 + self.wrong.get(form, 0.0))

            return run

        return Contest(
            "product", shape, own, mx.ones((3, 4)), list(map(step, range(weights))), 1e-3
        )

    def timer(self, chain: Callable[[], mx.array]) -> float:
        mx.eval(chain())
        form = self.calls[-1][0]
        self.runs.append(form)
        if form in self.stopped:
            raise self.stopped[form]
        scripted = self.seconds[form]
        return scripted if isinstance(scripted, float) else scripted[self.runs.count(form) - 1]

    def race(self, **options: int) -> RaceResult:
        return race(self.contest(**options), self.choices, self.timer)
