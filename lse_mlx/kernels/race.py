"""Which form of an operation is fastest on this device: stock MLX or one of the project's own.

An own form must give the numbers of stock MLX, and be faster by a margin, or stock serves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import mlx.core as mx

from lse_mlx.errors import KernelError, reason
from lse_mlx.kernels.choices import STOCK, Choices, any_rows

MARGIN = 0.03
"""The share of stock's time that an own form must save."""

ROUNDS = 5
PASSES = 2
"""How often a chain goes through all weights."""

FAILURES = (KernelError, RuntimeError, ValueError, MemoryError)
"""What MLX and this package raise where a form does not compile, does not run or has no room."""

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
    stock_is_exact: whether stock's rows, too, do not depend on how many are in the pass
    """

    operation: str
    shape: str
    own: tuple[str, ...]
    start: mx.array
    steps: Sequence[Callable[[mx.array], mx.array]]
    tolerance: float
    stock_is_exact: bool = False

    @property
    def key(self) -> str:
        """What `Choices.winners` calls it."""
        return f"{self.operation} {self.shape}"

    def allows(self, result: "RaceResult") -> bool:
        """Whether `result`, read from somewhere, can be one of this contest."""
        forms = {STOCK, *self.own}
        named = {*result.microseconds, *result.errors, *result.refused}
        right = forms - result.refused.keys()
        return (
            named <= forms
            and result.microseconds.keys() == right
            and all(result.errors.get(form, inf) <= self.tolerance for form in right - {STOCK})
            and result.winner == _fastest(result.microseconds)
        )


@dataclass(frozen=True)
class RaceResult:
    """What a race found.

    winner:       the form to use: an own one, or "stock"; "stock" also where no time was taken
    microseconds: of one call, the median of the rounds, for every form that ran to the end
    errors:       of every own form that ran, the largest difference from stock, relative to stock's
                  largest value; not finite where the form's numbers are not
    refused:      forms that may not serve, and why; where stock itself is one of them, nothing
                  could be compared
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

    @property
    def held(self) -> bool:
        """Whether there was anything to compare with: stock itself ran."""
        return STOCK not in self.refused

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, ready for JSON: what is not finite is None, and `refused` says why."""
        return {
            "operation": self.operation,
            "shape": self.shape,
            "winner": self.winner,
            "microseconds": {
                form: finite_or_none(time) for form, time in self.microseconds.items()
            },
            "errors": {form: finite_or_none(error) for form, error in self.errors.items()},
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
    counted, and in the others the forms take turns, so that all meet the same machine. A form that
    fails, or whose time is no time, has lost; where stock does, there is nothing to race against.
    """
    errors, refused = _compared(contest, choices)
    running = [form for form in (STOCK, *contest.own) if form not in refused]
    times: dict[str, float] = {}
    if STOCK in running:
        chains = {form: _chain(contest, choices, form) for form in running}
        times, failed = _times(chains, PASSES * len(contest.steps), timer)
        refused |= failed
    if STOCK in refused:
        times = {}
    winner = _fastest(times)
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
        if not result.held:
            continue
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


def finite_or_none(number: float | None) -> float | None:
    """A number as JSON can hold it: None for NaN and infinities, which JSON does not have."""
    return number if number is not None and isfinite(number) else None


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


def _times(
    chains: Mapping[str, Callable[[], mx.array]], calls: int, timer: Timer
) -> tuple[dict[str, float], dict[str, str]]:
    """For every form that ran to the end the microseconds of a call, and why the others did not.

    calls: of a chain
    """
    spent: dict[str, list[float]] = {form: [] for form in chains}
    failed: dict[str, str] = {}
    for turn in range(1 + ROUNDS):
        running = list(spent)
        for at in range(len(running)):
            form = running[(turn + at) % len(running)]
            try:
                seconds = timer(chains[form])
            except FAILURES as error:
                failed[form] = _failure(error)
            else:
                spent[form].append(seconds)
                if not 0 < seconds < inf:  # written so that NaN is refused
                    failed[form] = f"its time was {seconds} s, which is none"
            if form in failed:
                del spent[form]
    return {form: 1e6 * median(rounds[1:]) / calls for form, rounds in spent.items()}, failed


def _fastest(times: Mapping[str, float]) -> str:
    """The fastest form if it beats stock by the margin, or stock."""
    if STOCK not in times:
        return STOCK
    fastest = min(times, key=lambda form: times[form])
    return fastest if times[fastest] < (1 - MARGIN) * times[STOCK] else STOCK


def _compared(contest: Contest, choices: Choices) -> tuple[dict[str, float], dict[str, str]]:
    """For every own form its error, and those that may not serve.

    Where stock fails, it is the only one of these.
    """
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    try:
        wanted = _numbers(contest, choices, STOCK)
    except FAILURES as error:
        return {}, {STOCK: _failure(error)}
    for form in contest.own:
        try:
            pairs = zip(wanted, _numbers(contest, choices, form), strict=True)
            error = max(_difference(stock, own) for stock, own in pairs)
        except FAILURES as failure:
            refused[form] = _failure(failure)
            continue
        errors[form] = error
        if not isfinite(error):
            refused[form] = "differs from stock in what is finite"
        elif error > contest.tolerance:
            refused[form] = f"differs from stock by {error:.2g}, more than {contest.tolerance:.2g}"
    return errors, refused


def _numbers(contest: Contest, choices: Choices, form: str) -> list[mx.array]:
    """What each step makes of the start."""
    with choices.forcing(form):
        found = [step(contest.start).astype(mx.float32) for step in contest.steps]
    mx.eval(found)  # here, so that a failure is this form's
    return found


def _failure(error: Exception) -> str:
    """Why a form lost, of an error that it raised."""
    return str(error) if isinstance(error, KernelError) else f"fails here ({reason(error)})"


def _difference(stock: mx.array, own: mx.array) -> float:
    scale = max(float(mx.abs(stock).max()), 1e-30)
    return float(mx.where(mx.isnan(own), mx.inf, mx.abs(own - stock)).max()) / scale
