"""Small DFlash2 sources for the converter, and conversions of them."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoints.conversion.adversarial_groups import adversarial_groups
from tests.checkpoints.conversion.scalar_quantizer import Tensors, safetensors_file, shorts

CONFIG: dict[str, Any] = {"architectures": ["DFlash2DraftModel"], "hidden_size": 128}
QUANTIZATION = {"bits": 8, "group_size": 64, "mode": "affine"}


def matrix(rows: int, columns: int, seed: int) -> tuple[str, tuple[int, int], bytes]:
    """A bfloat16 matrix of adversarial groups in random order."""
    g = random.Random(seed)
    pool = adversarial_groups(seed)
    values = [v for _ in range(rows * columns // 64) for v in g.choice(pool)]
    return "BF16", (rows, columns), shorts(values)


def vector(size: int, seed: int) -> tuple[str, tuple[int], bytes]:
    return "BF16", (size,), random.Random(seed).randbytes(2 * size)


def small_tensors() -> Tensors:
    """Every kind of tensor: matrices, codebooks, vectors, rank 3, and a rank-2 one that is none."""
    return {
        "fc.weight": matrix(5, 192, 1),
        "candidate_selector.predecessor_codebook": matrix(3, 64, 2),
        "norm.weight": vector(7, 3),
        "layers.0.mlp.up_proj.weight": matrix(131, 64, 4),
        "layers.0.mlp_conv.base_kernel": ("BF16", (2, 2, 3), random.Random(5).randbytes(24)),
        "some.bias": ("F32", (4, 64), random.Random(6).randbytes(1024)),
        "empty.weight": ("F16", (0,), b""),
        "candidate_selector.successor_codebook": matrix(2, 128, 7),
    }


def write_source(folder: Path, tensors: Tensors | bytes | None = None, config: Any = None) -> Path:
    """A source of `tensors`, or with that model.safetensors; config may be an object or text."""
    folder.mkdir(parents=True)
    if config is None:
        config = CONFIG
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text, encoding="utf-8")
    if not isinstance(tensors, bytes):
        tensors = safetensors_file(small_tensors() if tensors is None else tensors)
    (folder / "model.safetensors").write_bytes(tensors)
    return folder


def run(source: Path, name: str = "converted", **how: Any) -> Path:
    """Convert `source` into the folder `name` beside it, which is returned."""
    # Imported late: making a source needs neither NumPy nor the package.
    from lse_mlx.checkpoints.conversion.convert import convert

    destination = source.parent / name
    convert(source, destination, "org/name", "0123abcd", **how)
    return destination


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Recorder:
    """Progress that remembers, and may do something at a phase."""

    def __init__(self, at: str = "", action: Callable[[], object] = lambda: None):
        self.steps: list[tuple[str, int, int, str]] = []
        self._at, self._action = at, action

    def note(self, text: str) -> None:
        raise AssertionError(f"a conversion has nothing to note, but said {text!r}")

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        if phase == self._at and not any(step[0] == phase for step in self.steps):
            self._action()
        self.steps.append((phase, done, total, tensor))
