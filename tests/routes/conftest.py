"""A tiny target of experts, what its router chooses, predictors that know it, and its traces."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.protocol.trace import Trace
from lse_mlx.routes.predictors import Prediction, Previous, RoutePredictor
from lse_mlx.routes.sidecar import RouteSidecar
from lse_mlx.routes.store import StoreCosts
from lse_mlx.target.model import Target
from lse_mlx.traces.identity import TargetIdentity
from lse_mlx.traces.recording import record
from tests.decode.runs import TAPS, known_sequence
from tests.states import Held, held_by
from tests.tiny_models import VOCAB, load_tiny, on_cpu, random_prompt, save_checkpoint

COUNT = 24
LAYERS, EXPERTS, TOP, BYTES = 5, 12, 3, 3 * 2 * 64 * 64
COSTS = StoreCosts(bytes_per_us=4096, latency_us=2, cache_bytes=25 * BYTES, draft_us=40, layer_us=7)
IDENTITY = TargetIdentity("sha256:target", "sha256:tokenizer")
SAMPLED = Sampling(temperature=0.9, top_k=20)
Native = dict[int, dict[int, tuple[int, ...]]]
"""By position, then by layer, what the router chose."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_tiny(save_checkpoint(tmp_path_factory.mktemp("tiny") / "moe", "moe"))


@dataclass(frozen=True)
class Known:
    """A prompt, the target's greedy reply, and the routes of each of their tokens."""

    prompt: list[int]
    tokens: list[int]
    native: Native


@pytest.fixture(scope="module")
def known(target: Target) -> Known:
    prompt = random_prompt(9, seed=2)
    tokens = known_sequence(target, prompt, COUNT).tokens
    with on_cpu():  # one token at a time, so nothing here is drafted
        state, native = target.new_state(), {}
        for position, token in enumerate(tokens):
            routes = target.advance([token], state, ()).routes
            native[position] = {
                k: tuple(np.array(chosen)[0].tolist()) for k, chosen in routes.items()
            }
    return Known(prompt, tokens, native)


def certain(experts: tuple[int, ...]) -> Prediction:
    return Prediction(experts, (1.0,) * len(experts))


@dataclass
class Scripted:
    """Predicts what a function says of a position and a layer, and keeps what it is told."""

    guess: Callable[[int, int], tuple[int, ...]]
    told: list[tuple[int, dict[int, list[list[int]]]]] = field(default_factory=list)

    def predict(self, position: int, token: int) -> Mapping[int, Prediction]:
        return {layer: certain(self.guess(position, layer)) for layer in range(LAYERS)}

    def observe(self, position: int, routes: Mapping[int, NDArray[np.int32]]) -> None:
        self.told.append((position, {layer: rows.tolist() for layer, rows in routes.items()}))
        for rows in routes.values():
            rows[:] = 0  # whatever it does to what it was given


def oracle(native: Native) -> Scripted:
    return Scripted(lambda position, layer: native.get(position, {}).get(layer, ()))


def wrong(native: Native) -> Scripted:
    """Every expert that was not chosen, in some order."""

    def guess(position: int, layer: int) -> tuple[int, ...]:
        chosen = native.get(position, {}).get(layer, ())
        return tuple(e for e in (7, 3, 11, 0, 5, 1, 9, 2, 10, 4, 8, 6) if e not in chosen)

    return Scripted(guess)


def predictors(native: Native) -> dict[str, RoutePredictor | None]:
    return {
        "none": None,
        "previous": Previous(),
        "oracle": oracle(native),
        "wrong": wrong(native),
    }


def drafter_for(known: Known, right: int) -> ScriptedDrafter:
    """It is right for `right` tokens of each proposal."""
    return ScriptedDrafter.right_for(known.tokens, right, VOCAB, taps=TAPS)


def recorded(
    session: Session, known: Known, *, owner: str | None = "a", **options: Any
) -> tuple[Trace, Held]:
    """The trace of the reply, and the state at its end."""
    settings: dict[str, Any] = {"max_tokens": COUNT, "seed": 0} | options
    with on_cpu():
        trace = record(
            session,
            IDENTITY,
            known.prompt,
            stop_tokens=(),
            owner=owner,
            keep_hidden=False,
            **settings,
        )
        return trace, held_by(session.state)


def watched(known: Known, sidecar: RouteSidecar, right: int = 3, **options: Any) -> Trace:
    return recorded(sidecar.session(drafter_for(known, right)), known, **options)[0]


def sidecar_of(target: Target, predictor: RoutePredictor | None) -> RouteSidecar:
    return RouteSidecar(target, predictor, COSTS)
