"""A small pair in codes on a device that answers at once, for tests of what an engine does first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from lse_mlx.checkpoints.drafter_config import DFlash2Config
from lse_mlx.drafters.dflash2.drafter import DFlash2
from lse_mlx.drafters.dflash2.weights import DFlash2Weights
from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.registry import Registry
from lse_mlx.target.loading import load_target
from lse_mlx.target.model import Target
from tests.drafters.tiny_dflash2 import quantize, save, tiny_config, tiny_tensors
from tests.tiny_models import VOCAB, on_cpu, save_checkpoint

HEAD_DIM = 32


class Dice:
    """Builds kernels that answer at once: floats at random, integers that count up.

    What a kernel answers has no part in what is compiled, so any request can be tried.
    refusing: names of kernels that do not compile
    """

    def __init__(self, *refusing: str) -> None:
        self._rng = np.random.default_rng(0)
        self._refusing = refusing

    def build(self, *, name: str, **text: Any) -> Callable[..., list[mx.array]]:
        return self._refuse if name in self._refusing else self._answer

    def _answer(
        self, *, output_shapes: list[tuple[int, ...]], output_dtypes: list[mx.Dtype], **rest: Any
    ) -> list[mx.array]:
        return [
            mx.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
            if dtype == mx.int32
            else mx.array(self._rng.standard_normal(shape).astype(np.float32)).astype(dtype)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]

    def _refuse(self, **arguments: Any) -> list[mx.array]:
        raise RuntimeError("threadgroup too large")


def dice(mode: Any = "own", exact: bool = False, refusing: tuple[str, ...] = ()) -> Registry:
    """A registry of such kernels."""
    return Registry("metal", Dice(*refusing).build, Choices(mode, exact))


def save_pair(folder: Path) -> Path:
    """Targets and a drafter for each of them, in codes, of sizes that the kernels take."""
    for kind in ("q4", "mixed", "tied"):
        save_checkpoint(folder / kind, kind)
    with on_cpu():
        tensors = tiny_tensors(head_dim=HEAD_DIM)
        for name in ("predecessor", "successor"):
            codebook = f"candidate_selector.{name}_codebook"
            tensors[codebook] = tensors[codebook][:VOCAB]
        config = tiny_config(vocab_size=VOCAB, head_dim=HEAD_DIM)
        config["quantization"] = {"group_size": 32, "bits": 8}
        save(folder / "drafter", config, quantize(tensors, 8))
    return folder


def on_device(
    folder: Path, registry: Registry, kind: str = "q4", context_length: int | None = None
) -> tuple[Target, DFlash2]:
    """The pair in the form for a device, run by `registry`."""
    target = load_target(folder / kind, context_length, on_host=False, registry=registry)
    config = DFlash2Config.read(folder / "drafter")
    weights = DFlash2Weights.read(folder / "drafter", config)
    return target, DFlash2(config, weights, target, registry, on_host=False)


class Heard:
    """Progress that is written down."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[tuple[str, int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        self.steps.append((phase, done, total))
