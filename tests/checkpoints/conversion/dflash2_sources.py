"""Small bf16 DFlash2 sources on disk, and a look at conversions that trusts nobody's word."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lse_mlx.checkpoints.conversion.first_use import CacheSettings, prepare_drafter

SMALL = {"a.weight": (8, 128), "b.weight": (4, 64), "norm.weight": (64,)}
REVISION = "0123abcd"


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """Write bf16 tensors of random bits that are neither NaN nor infinite."""
    entries: dict[str, Any] = {}
    rng, parts, place = np.random.default_rng(seed), [], 0
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32)
        parts.append((values.view(np.uint32) >> 16).astype("<u2").tobytes())
        end = place + len(parts[-1])
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(parts))


def write_source(
    folder: Path, shapes: dict[str, tuple[int, ...]] | None = None, seed: int = 0, **config: Any
) -> Path:
    """Write a source of `shapes` to `folder` and return the folder; `config` goes into its config."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"architectures": ["DFlash2DraftModel"], "hidden_size": 64, **config}
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    write_safetensors(folder / "model.safetensors", shapes or SMALL, seed)
    return folder


def write_origin(folder: Path, repository: str = "test/fixture", revision: str = REVISION) -> Path:
    """Leave the note of a download in `folder` and return the folder."""
    note = {"repository": repository, "revision": revision}
    (folder / "hf-origin.json").write_text(json.dumps(note), "utf-8")
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def problems(place: Path, source: Path, bits: int = 8) -> list[str]:
    """What is wrong with the conversion in `place`, by its manifest and by the source's header."""
    if sorted(os.listdir(place)) != ["config.json", "model.safetensors", "source-repository.json"]:
        return [f"files: {sorted(os.listdir(place))}"]
    manifest = json.loads((place / "source-repository.json").read_text("ascii"))
    weights, config = place / "model.safetensors", json.loads((place / "config.json").read_bytes())
    stated = json.loads((source / "config.json").read_bytes())
    stated["quantization"] = {"bits": bits, "group_size": 64, "mode": "affine"}
    tensors = 0
    for name, entry in _header(source / "model.safetensors").items():
        tensors += 3 if len(entry["shape"]) == 2 and name.endswith(".weight") else 1
    expected = {
        "bytes": (manifest["bytes"], weights.stat().st_size),
        "sha256": (manifest["sha256"], sha256(weights)),
        "source_sha256": (manifest["source_sha256"], sha256(source / "model.safetensors")),
        "tensors": (manifest["tensors"], tensors),
        "header": (len(_header(weights)), tensors),
        "config": (config, stated),
        "format": (manifest["format"], f"MLX affine Q{bits} group64"),
    }
    return [f"{name}: {a} is not {b}" for name, (a, b) in expected.items() if a != b]


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))


def unfinished(parent: Path) -> list[str]:
    """Names in `parent` that a process which was killed left there."""
    return [name for name in os.listdir(parent) if ".unfinished-" in name]


@dataclass
class Said:
    """Progress that keeps what it is told."""

    notes: list[str] = field(default_factory=list)
    steps: list[tuple[str, int, int]] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        self.steps.append((phase, done, total))

    @property
    def phases(self) -> list[str]:
        """The phases in the order of their beginnings."""
        return list(dict.fromkeys(phase for phase, _, _ in self.steps))

    def mentions(self, *words: str) -> bool:
        return any(all(word in note for word in words) for note in self.notes)


def prepare(folder: Path, settings: CacheSettings, bits: int = 8) -> tuple[Path, Said]:
    """What `prepare_drafter` returns, and what it said."""
    said = Said()
    return prepare_drafter(folder, settings, said, bits), said


def overwrite_keeping_stat(path: Path, last: int | None = None) -> None:
    """Other bytes in the same file, of the same size and time: all, or the `last` so many."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(0 if last is None else -last, os.SEEK_SET if last is None else os.SEEK_END)
        old = file.read()
        file.seek(-len(old), os.SEEK_CUR)
        file.write(bytes(255 - byte for byte in old))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )


CHILD = """
import sys
from pathlib import Path
from lse_mlx.checkpoints.conversion.first_use import CacheSettings, prepare_drafter
from lse_mlx.checkpoints.progress import Lines
from lse_mlx.errors import LseError
settings = CacheSettings(user_cache=Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
try:
    print(prepare_drafter(Path(sys.argv[1]), settings, Lines()), flush=True)
except LseError as error:
    sys.exit(f"error: {error}")
"""


def start(source: Path, user_cache: Path, before: str = "") -> subprocess.Popen[str]:
    """A process that prepares the drafter in `source` once a line comes on its standard input.

    before: what it does first
    """
    command = [sys.executable, "-c", before + CHILD, str(source), str(user_cache)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
