"""Every shape of a request, run once when an engine is loaded, so that the first request waits for
no compilation; after the races that choose between forms."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx

from lse_mlx.checkpoints.progress import Progress, Silent
from lse_mlx.decode.loop import PREFILL_ROWS, Request, decode
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.decode.stopping import Limits
from lse_mlx.decode.timings import Timings
from lse_mlx.drafters.base import Drafter
from lse_mlx.errors import DraftError, reason
from lse_mlx.kernels.operations import with_kernels
from lse_mlx.kernels.race import RaceResult
from lse_mlx.kernels.registry import Compilation
from lse_mlx.kernels.winners import this_device
from lse_mlx.races import hold_races, pair_contests
from lse_mlx.target.model import Target

REPLY_TOKENS = 64
CPU_REPLY_TOKENS = 32
"""Where nothing is compiled: enough to judge a drafter by, which is all that is left to do."""

SAMPLED_TOKENS = 4
USELESS = 0.05
"""Of a drafter: less than this share of its tokens accepted."""

FEW_TESTED = 16
"""Fewer drafted tokens than this say nothing about a drafter."""


@dataclass(frozen=True)
class WarmupReport:
    """What a warm-up did and found: `engine.warmed`.

    device:       chip, architecture, system, MLX's version and a hash of the kernels: `this_device`
    form:         how kernels run: "metal", "cuda", or "reference" where none runs
    mode, exact:  what was asked for as `kernels` and `exact`
    compilations: variants of kernels and traces of compiled functions, in order, with the time that
                  each took; none where form is "reference"
    calls:        for each kernel, how many calls which form served; those that plain MLX or NumPy
                  served ("reference") under the operation's name: see `kernels_of`
    refused:      operations whose kernels this device does not run after all, and why
    forms:        by operation and shape, what serves where stock MLX could too
    races:        between those forms, made now or read from disk; `raced` of them now
    tested, accepted: tokens of a greedy reply that the drafter proposed and the target looked at,
                  and those it kept; 0 without a drafter
    seconds:      that the warm-up took in all, races included
    """

    device: dict[str, str]
    form: str
    mode: str
    exact: bool
    compilations: tuple[Compilation, ...]
    calls: dict[str, dict[str, int]]
    refused: dict[str, str]
    forms: dict[str, str]
    races: tuple[RaceResult, ...]
    raced: int
    tested: int
    accepted: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, ready for JSON; times in milliseconds where a name says so."""
        names = sorted({c.name for c in self.compilations} | set(self.calls))
        return {
            "device": self.device,
            "form": self.form,
            "mode": self.mode,
            "exact": self.exact,
            "kernels": [self._kernel(name) for name in names],
            "refused": self.refused,
            "jit_compiles": len(self.compilations),
            "jit_compile_ms": sum((c.milliseconds for c in self.compilations), 0.0),
            "forms": dict(sorted(self.forms.items())),
            "races": [race.as_dict() for race in self.races],
            "raced": self.raced,
            "spec_tested": self.tested,
            "spec_accepted": self.accepted,
            "seconds": self.seconds,
        }

    def _kernel(self, name: str) -> dict[str, Any]:
        variants = [
            {"variant": c.variant, "compile_ms": c.milliseconds}
            for c in self.compilations
            if c.name == name
        ]
        return {"name": name, "calls": self.calls.get(name, {}), "variants": variants}


def warm_up(
    target: Target,
    drafter: Drafter | None,
    prompt: list[int],
    *,
    names: tuple[str, str] = ("the target", "the drafter"),
    races: Path | None = None,
    strict_draft: bool = False,
    progress: Progress | None = None,
) -> WarmupReport:
    """Run every shape of a request once; nothing of it stays but what is compiled.

    Where no device kernels run, nothing is ever compiled: there only a reply is decoded with the
    drafter, to see whether it is of use, and without a drafter nothing at all. A drafter that fails
    is named; with `strict_draft` its DraftError is raised.

    prompt: token ids of some request, to which a reply is decoded
    names:  what the target and the drafter are called if the drafter turns out to be useless
    races:  the folder where results of races are kept; None for no races
    """
    progress = progress or Silent()
    registry, started = target.registry, perf_counter()
    found: list[RaceResult] = []
    raced = 0
    if races and registry.on_device:
        contests = pair_contests(target, drafter)
        found, raced = hold_races(contests, registry.choices, races, progress)
    try:
        timings = _run(target, drafter, prompt, progress)
    except DraftError as error:
        if strict_draft:
            raise
        progress.note(
            f"the drafter {names[1]} failed ({reason(error)}), so it only slows decoding down: check "
            "its files, or decode without a drafter"
        )
        timings = _run(target, None, prompt, progress)
    for name, why in registry.refused.items():
        served = "reference" in registry.forms().get(name, {})
        instead = "plain MLX serves" if served else "another form serves in place of"
        progress.note(f"{instead} {with_kernels(name)}. {why}")
    tested, accepted = sum(timings.tested), sum(timings.accepted)
    if tested >= FEW_TESTED and accepted < USELESS * tested:
        progress.note(
            f"of {tested} tokens that the drafter {names[1]} proposed, the target {names[0]} accepted "
            f"{accepted}, so it only slows decoding down: check that it belongs to this target, or "
            "decode without a drafter"
        )
    mx.clear_cache()
    return WarmupReport(
        device=this_device(),
        form=registry.form,
        mode=registry.choices.mode,
        exact=registry.choices.exact,
        compilations=tuple(registry.compilations),
        calls=registry.forms(),
        refused=dict(registry.refused),
        forms=dict(registry.choices.chosen),
        races=tuple(found),
        raced=raced,
        tested=tested,
        accepted=accepted,
        seconds=perf_counter() - started,
    )


def _run(target: Target, drafter: Drafter | None, prompt: list[int], progress: Progress) -> Timings:
    """Every shape where a device compiles any, then a reply, whose timings are returned."""
    on_device = target.registry.on_device
    if on_device:
        _run_every_shape(target, drafter, prompt, progress)
    elif drafter is None:
        return Timings()
    tokens = REPLY_TOKENS if on_device else CPU_REPLY_TOKENS
    return _reply(target, drafter, prompt, tokens, Sampling())


def _run_every_shape(
    target: Target, drafter: Drafter | None, prompt: list[int], progress: Progress
) -> None:
    steps = list(_steps(target, drafter, prompt))
    progress.advance("warm-up", 0, len(steps))
    for done, step in enumerate(steps, 1):
        step()
        progress.advance("warm-up", done, len(steps))


def _steps(
    target: Target, drafter: Drafter | None, prompt: list[int]
) -> Iterator[Callable[[], Any]]:
    """Everything before the greedy reply, one call each."""
    depth = 0 if drafter is None else drafter.depth
    walk = Walk(target, drafter)
    widest = min(depth, target.context_length - 2) + 1
    yield from (partial(walk.piece, rows) for rows in (*range(1, 10), PREFILL_ROWS))
    yield walk.draft
    yield from (partial(walk.verify, width) for width in range(1, widest + 1))
    yield from (partial(walk.piece_of_next_turn, rows) for rows in (2, 9) if depth)
    sampling = Sampling(temperature=1.0)
    yield lambda: _reply(target, drafter, prompt, SAMPLED_TOKENS, sampling)
    if drafter is not None:
        yield lambda: _reply(target, None, prompt, 2, Sampling())
        yield lambda: _reply(target, None, prompt, 2, sampling)


class Walk:
    """Passes as the loop makes them, one after the other in a state that is thrown away.

    What a pass compiles can depend on its rows, and on whether accepted rows of the pass before it
    are still to be folded in. Where the context is full, the walk begins anew.
    """

    def __init__(self, target: Target, drafter: Drafter | None):
        self._target = target
        self._drafter = drafter
        self._taps = () if drafter is None else drafter.taps
        self._begin()

    def piece(self, rows: int) -> None:
        """A prompt's piece of so many rows, after nothing that is to be folded in."""
        rows = min(rows, self._target.context_length - 1)
        if self._state.position + rows > self._target.context_length:
            self._begin()
        first = self._state.position
        answer = self._target.advance(self._tokens(rows), self._state, self._taps)
        if self._context is not None:
            self._context.append(answer.features, first)
        mx.eval(answer.logits)
        mx.clear_cache()

    def verify(self, width: int) -> None:
        """A plain step, a verify pass accepted in part, and another after that, whole."""
        self._pass(1, 1)
        self._pass(width, max(1, width - 1))
        self._pass(width, width)

    def piece_of_next_turn(self, rows: int) -> None:
        """A prompt's piece after a pass that was accepted in part."""
        if 4 + rows < self._target.context_length:
            self._make_room(3 + rows)
            self._pass(3, 2)
            self.piece(rows)

    def draft(self) -> None:
        """A draft for a greedy reply, and one for a sampled one."""
        if self._context is not None:
            for temperature in (0.0, 1.0):
                self._context.propose(0, temperature, lambda: 0.5)

    def _begin(self) -> None:
        self._state = self._target.new_state()
        self._context = None if self._drafter is None else self._drafter.new_context()

    def _make_room(self, rows: int) -> None:
        if self._state.position + rows > self._target.context_length:
            self._begin()
            self.piece(1)

    def _pass(self, width: int, kept: int) -> None:
        self._make_room(width)
        first = self._state.position
        answer = self._target.verify(self._tokens(width), self._state, self._taps)
        mx.eval(answer.logits)
        self._state.commit(kept)
        if self._context is not None:
            self._context.append(answer.features[:kept], first)

    def _tokens(self, count: int) -> list[int]:
        return [n % self._target.vocab_size for n in range(count)]


def _reply(
    target: Target, drafter: Drafter | None, prompt: Sequence[int], tokens: int, sampling: Sampling
) -> Timings:
    """Decode a reply of so many tokens as a request would, no stop token ending it."""
    prompt = list(prompt[: max(1, target.context_length // 2)])
    limits = Limits(frozenset(), tokens, target.context_length - len(prompt))
    request = Request(prompt, sampling, limits, 0, drafter is not None, strict_draft=True)
    timings = Timings() if drafter is None else Timings(drafter.name, drafter.depth)
    for _ in decode(Session(target, drafter), request, timings):
        pass
    return timings
