"""Which form of an operation is fastest on this device: stock MLX or one of the project's own.

An own form must give the numbers of stock MLX, and be faster by a margin, or stock serves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import mlx.core as mx

from lse_mlx.errors import KernelError
from lse_mlx.kernels.choices import STOCK, Choices, any_rows

MARGIN = 0.03
"""The share of stock's time that an own form must save."""

ROUNDS = 5
PASSES = 2
"""How often a chain goes through all weights."""

Timer = Callable[[Callable[[], mx.array]], float]
"""Seconds until what a chain returns is computed."""


@dataclass(frozen=True)
class Contest:
    """One operation at one shape, ready to be run in any of its forms.

    shape:     as at `Choices.form`, the number of rows first
    own:       the project's forms
    start:     what the first call of a chain reads
    steps:     one call each, all of the shape but on different weights or caches, so that no cache
               holds what the model's own passes would have to fetch; from input to output
    tolerance: how far an own form may be from stock, relative to the largest value of stock
    """

    operation: str
    shape: str
    own: tuple[str, ...]
    start: mx.array
    steps: Sequence[Callable[[mx.array], mx.array]]
    tolerance: float

    @property
    def key(self) -> str:
        """What `Choices.winners` calls it."""
        return f"{self.operation} {self.shape}"


@dataclass(frozen=True)
class RaceResult:
    """What a race found.

    winner:       the form to use: an own one, or "stock"; "stock" also where no time was taken
    microseconds: of one call, the median of the rounds, for every form that ran to the end
    errors:       of every own form that ran, the largest difference from stock, relative to stock's
                  largest value
    refused:      own forms that may not serve, and why
    """

    operation: str
    shape: str
    winner: str
    microseconds: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What `Choices.winners` calls it."""
        return f"{self.operation} {self.shape}"

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, ready for JSON."""
        return {
            "operation": self.operation,
            "shape": self.shape,
            "winner": self.winner,
            "microseconds": dict(self.microseconds),
            "errors": dict(self.errors),
            "refused": dict(self.refused),
        }


def device_timer(chain: Callable[[], mx.array]) -> float:
    """The timer of a real device."""
    mx.synchronize()
    started = perf_counter()
    mx.eval(chain())
    mx.synchronize()
    return perf_counter() - started


def race(contest: Contest, choices: Choices, timer: Timer = device_timer) -> RaceResult:
    """Compare the numbers of every own form with stock's, and then the times of those that agree.

    A form is told to the operation by `choices`. Every call of a chain reads the result of the one
    before, so that a device can neither overlap nor skip them. The first round of each form is not
    counted, and in the others the forms take turns, so that all meet the same machine.
    """
    chains = {form: _chain(contest, choices, form) for form in (STOCK, *contest.own)}
    errors, refused = _compared(contest, choices)
    running = [form for form in chains if form not in refused]
    for form in running:
        timer(chains[form])
    spent: dict[str, list[float]] = {form: [] for form in running}
    for turn in range(ROUNDS):
        for at in range(len(running)):
            form = running[(turn + at) % len(running)]
            spent[form].append(timer(chains[form]))
    calls = PASSES * len(contest.steps)
    times = {form: 1e6 * median(spent[form]) / calls for form in running}
    fastest = min(running, key=lambda form: times[form])
    won = times[fastest] < (1 - MARGIN) * times[STOCK]
    winner = fastest if won else STOCK
    return RaceResult(contest.operation, contest.shape, winner, times, errors, refused)


def compare(contest: Contest, choices: Choices) -> RaceResult:
    """Compare the numbers of every own form with stock's, without a race: nothing has a time."""
    errors, refused = _compared(contest, choices)
    return RaceResult(contest.operation, contest.shape, STOCK, {}, errors, refused)


def race_all(
    contests: Sequence[Contest],
    choices: Choices,
    seconds: float,
    on_result: Callable[[int, RaceResult], None],
    timer: Timer = device_timer,
    clock: Callable[[], float] = monotonic,
) -> list[RaceResult]:
    """Race `contests` in order until `seconds` are over; those left keep stock for this time.

    on_result: told how many are done, and the last result
    """
    results: list[RaceResult] = []
    ends = clock() + seconds
    for contest in contests:
        if clock() >= ends:
            break
        results.append(race(contest, choices, timer))
        on_result(len(results), results[-1])
    return results


def winners(results: Iterable[RaceResult]) -> dict[str, str]:
    """What `Choices.winners` takes: a form for each shape, and for `exact` one whatever the rows.

    The latter is the own form with the least time over all rows, of those that none refused; the
    first of them where only numbers were compared.
    """
    out: dict[str, str] = {}
    totals: dict[str, dict[str, float]] = {}
    bad: set[tuple[str, str]] = set()
    for result in results:
        out[result.key] = result.winner
        key = any_rows(result.operation, result.shape)
        sums = totals.setdefault(key, {})
        bad |= {(key, form) for form in result.refused}
        for form in result.errors:
            sums[form] = sums.get(form, 0.0) + result.microseconds.get(form, 0.0)
    for key, sums in totals.items():
        right = {form: time for form, time in sums.items() if (key, form) not in bad}
        if right:
            out[key] = min(right, key=lambda form: right[form])
    return out


def _chain(contest: Contest, choices: Choices, form: str) -> Callable[[], mx.array]:
    def run() -> mx.array:
        with choices.forcing(form):
            x = contest.start
            for _ in range(PASSES):
                for step in contest.steps:
                    # A data dependency; a mere order would let a device run both at once.
                    x = x + (0 * step(x).reshape(-1)[0]).astype(x.dtype)
            return x

    return run


def _compared(contest: Contest, choices: Choices) -> tuple[dict[str, float], dict[str, str]]:
    """For every own form its error, and those that may not serve."""
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    with choices.forcing(STOCK):
        wanted = [step(contest.start).astype(mx.float32) for step in contest.steps]
    for form in contest.own:
        try:
            with choices.forcing(form):
                found = [step(contest.start).astype(mx.float32) for step in contest.steps]
        except KernelError as error:
            refused[form] = str(error)
            continue
        pairs = zip(wanted, found, strict=True)
        error = max(_difference(stock, own) for stock, own in pairs)
        errors[form] = error
        if not error <= contest.tolerance:  # written so that NaN is refused
            refused[form] = f"differs from stock by {error:.2g}, more than {contest.tolerance:.2g}"
    return errors, refused


def _difference(stock: mx.array, own: mx.array) -> float:
    scale = max(float(mx.abs(stock).max()), 1e-30)
    return float(mx.where(mx.isnan(own), mx.inf, mx.abs(own - stock)).max()) / scale
