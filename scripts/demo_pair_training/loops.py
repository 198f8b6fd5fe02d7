"""Training loops: a step captured in one CUDA graph, a schedule by time or steps, reports."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .optimizers import PairOptimizer

WARM_UP_RUNS = 3
SYNC_EVERY = 10


class GraphedStep:
    """``loss()`` builds losses ``[k]`` from static buffers, the first one is trained on.

    On a GPU the forward and backward pass, clipping and the optimizer are captured once and then
    replayed; on the CPU they simply run.
    """

    def __init__(self, loss: Callable[[], Tensor], optimizer: PairOptimizer):
        self.loss, self.optimizer = loss, optimizer
        self.graph: torch.cuda.CUDAGraph | None = None
        self.report: Tensor | None = None
        if optimizer.learning_rate.is_cuda:
            self._capture()

    def _run(self) -> Tensor:
        self.optimizer.zero_grad()
        losses = self.loss()
        losses[0].backward()
        self.optimizer.step()
        return losses.detach()

    def _capture(self) -> None:
        self.optimizer.learning_rate.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.report = self._run()
        self.optimizer.reset()

    def __call__(self) -> Tensor:
        """Run one step and return its losses ``[k]`` (a static buffer on a GPU)."""
        if self.graph is None:
            return self._run()
        self.graph.replay()
        return self.report

    def milliseconds(self, runs: int = 8) -> float:
        """Time of a step at a zero learning rate; moments are forgotten afterwards."""
        self.optimizer.learning_rate.zero_()
        self()
        synchronize()
        start = time.perf_counter()
        for _ in range(runs):
            self()
        synchronize()
        self.optimizer.reset()
        return (time.perf_counter() - start) / runs * 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def faster_step(
    make_loss: Callable[[bool], Callable[[], Tensor]], optimizer: PairOptimizer, compile_mode: str
) -> tuple[GraphedStep, dict]:
    """The compiled step where it works, agrees with the plain one and is faster; else the plain.

    ``make_loss(compiled)`` builds the loss; ``compile_mode`` is auto, on or off.
    """
    notes: dict = {}
    if compile_mode == "off" or not optimizer.learning_rate.is_cuda:
        return GraphedStep(make_loss(False), optimizer), notes
    plain = None
    if compile_mode == "auto":
        plain = GraphedStep(make_loss(False), optimizer)
        notes["plain_ms"] = plain.milliseconds()
    start = time.perf_counter()
    try:
        compiled = GraphedStep(make_loss(True), optimizer)
        notes["compiled_ms"] = compiled.milliseconds()
        notes["compile_s"] = time.perf_counter() - start
        if plain is not None:
            a, b = plain()[0].item(), compiled()[0].item()
            optimizer.reset()
            notes["plain_loss"], notes["compiled_loss"] = a, b
            if abs(a - b) > 0.01 * abs(a) or notes["plain_ms"] < notes["compiled_ms"]:
                return plain, notes
        return compiled, notes
    except RuntimeError as error:  # what the compiler raises means: go on without it
        print(f"compiled step failed, plain step used: {error!r}"[:2000], flush=True)
        torch.cuda.synchronize()
        return plain or GraphedStep(make_loss(False), optimizer), notes


@dataclass(frozen=True)
class Schedule:
    """How long to train: ends at ``seconds`` or ``steps``, whichever comes first.

    The rate rises over the ``warm_up`` share, then follows a cosine from ``peak`` to
    ``floor * peak``.
    """

    seconds: float
    peak: float
    steps: int = 10**9
    warm_up: float = 0.03
    floor: float = 0.1

    def rate(self, done: float) -> float:
        """Learning rate when the share ``done`` of the budget is used."""
        if done < self.warm_up:
            return self.peak * done / self.warm_up
        angle = math.pi * (done - self.warm_up) / (1 - self.warm_up)
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(angle)))


@dataclass
class History:
    """Steps run and (step, seconds, mean losses) since the report before."""

    name: str
    steps: int = 0
    seconds: float = 0.0
    entries: list[tuple[int, float, list[float]]] = field(default_factory=list)


def run(
    name: str,
    step: GraphedStep,
    load: Callable[[], None],
    schedule: Schedule,
    *,
    report_every: int = 200,
    checkpoint: Callable[[], None] | None = None,
    checkpoint_seconds: float = 60.0,
) -> History:
    """Train: ``load()`` fills the static buffers before every step. Stops on a non-finite loss."""
    history, recent = History(name), []
    rate = step.optimizer.learning_rate
    start = saved = time.perf_counter()

    def report() -> None:
        means = torch.stack(recent).float().mean(0).tolist()
        recent.clear()
        history.entries.append((history.steps, round(history.seconds, 1), means))
        shown = " ".join(f"{x:.4f}" for x in means)
        print(f"{name} {history.steps} {history.seconds:.1f}s {shown}", flush=True)
        if not all(map(math.isfinite, means)):
            raise FloatingPointError(f"{name}: the loss is not finite at step {history.steps}")

    while True:
        if history.steps % SYNC_EVERY == 0:
            synchronize()
        history.seconds = time.perf_counter() - start
        done = max(history.seconds / schedule.seconds, history.steps / schedule.steps)
        if done >= 1:
            break
        rate.fill_(schedule.rate(done))
        load()
        recent.append(step().clone())
        history.steps += 1
        if history.steps % report_every == 0:
            report()
        if checkpoint and time.perf_counter() - saved > checkpoint_seconds:
            checkpoint()
            saved = time.perf_counter()
    if recent:
        report()
    return history
