#!/usr/bin/env python3
"""Measure the conversion of a full-size drafter against what its reading and writing takes anyway.

    python scripts/bench_convert.py                        # 3.85 GB of source, 2.04 GB of result
    python scripts/bench_convert.py --scale 0.05 --json    # fewer rows in every matrix

In a folder that is removed afterwards, makes a source with the 81 tensors of the published drafter
and random bfloat16 values, and then measures, in this order and with the files in the page cache:
    files       read and hash the source, write as many of its bytes as the result has, sync, read and
                hash those
    conversion  the whole conversion to 8-bit codes, in a process of its own, and its peak memory
    warm start  finding that conversion again, in a process of its own, and all bytes it reads
Nothing else should run meanwhile; with --repeat the first two take turns and the middle one counts.
"""

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lse_mlx.checkpoints.conversion.convert import convert  # noqa: E402
from lse_mlx.checkpoints.conversion.first_use import prepare_drafter  # noqa: E402
from lse_mlx.checkpoints.conversion.places import CacheSettings  # noqa: E402
from lse_mlx.checkpoints.conversion.plan import plan_conversion  # noqa: E402
from lse_mlx.checkpoints.hashing import CHUNK_BYTES  # noqa: E402
from lse_mlx.checkpoints.progress import Silent  # noqa: E402
from lse_mlx.checkpoints.safetensors_header import StoredTensor, header_bytes  # noqa: E402

HIDDEN, VOCABULARY, RANK, LAYERS = 5120, 248320, 256, 5
MOST_RATIO, MOST_MEMORY = 4.0, 400e6


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the published drafter by name, in the order of its file."""
    found: dict[str, tuple[int, ...]] = {
        "candidate_selector.hidden_projection.weight": (RANK, HIDDEN),
        "candidate_selector.predecessor_codebook": (VOCABULARY, RANK),
        "candidate_selector.successor_codebook": (VOCABULARY, RANK),
        "fc.weight": (HIDDEN, 5 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (4096, HIDDEN),
        "self_attn.k_proj.weight": (1024, HIDDEN),
        "self_attn.v_proj.weight": (1024, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "mlp.gate_proj.weight": (17408, HIDDEN),
        "mlp.up_proj.weight": (17408, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 17408),
        "attention_conv.base_kernel": (2, 2, HIDDEN),
        "mlp_conv.base_kernel": (2, 2, HIDDEN),
        "attention_conv.kernel_projection.weight": (1280, HIDDEN),
        "mlp_conv.kernel_projection.weight": (1280, HIDDEN),
    }
    for index in range(LAYERS):
        found |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return dict(sorted(found.items()))


def make_source(folder: Path, scale: float) -> None:
    """Write a source whose matrices have `scale` times the published rows."""
    tensors, place = {}, 0
    for name, shape in shapes().items():
        if len(shape) == 2:
            shape = (max(1, round(shape[0] * scale)), shape[1])
        size = 2 * int(np.prod(shape))
        tensors[name] = StoredTensor("BF16", shape, place, place + size)
        place += size
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["DFlash2DraftModel"]}\n')
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header_bytes(tensors))
        for start in range(0, place, CHUNK_BYTES):
            bits = np.frombuffer(generator.bytes(min(CHUNK_BYTES, place - start)), np.uint16)
            # Any sign, any fraction, magnitudes from 1/128 to 2.
            file.write(((bits & 0x83FF) | 0x3C00).astype(np.uint16).data)
        file.flush()
        os.fsync(file.fileno())


def handle_files(source: Path, size: int, copy: Path) -> None:
    """Read and hash `source`, write its first `size` bytes to `copy`, sync, read and hash those."""
    buffer = memoryview(bytearray(CHUNK_BYTES))

    def hash_all(path: Path) -> None:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])

    hash_all(source)
    with source.open("rb", buffering=0) as file, copy.open("xb", buffering=0) as written:
        left = size
        while left and (count := file.readinto(buffer[: min(left, CHUNK_BYTES)])):
            written.write(buffer[:count])
            left -= count
        os.fsync(written.fileno())
    hash_all(copy)


def in_own_process(task: str, *paths: Path) -> dict[str, Any]:
    """Run one of TASKS in a fresh interpreter; what it measured."""
    done = subprocess.run(
        [sys.executable, __file__, "--task", task, *map(str, paths)],
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def run_conversion(source: str, destination: str) -> dict[str, Any]:
    """Convert; seconds, and the most memory the process held, in bytes."""
    began = time.perf_counter()
    convert(Path(source), Path(destination), "random/values", "0")
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "peak": peak * (1 if sys.platform == "darwin" else 1024)}


def run_start(source: str) -> dict[str, Any]:
    """Prepare the drafter as a start of the engine does; seconds, bytes read, files opened."""
    opened: list[str] = []

    def hear(event: str, details: tuple[Any, ...]) -> None:
        if event == "open":
            opened.append(str(details[0]))

    sys.addaudithook(hear)
    settings = CacheSettings.from_environment({})
    before, began = _bytes_read(), time.perf_counter()
    folder = prepare_drafter(Path(source), settings, Silent())
    seconds, after = time.perf_counter() - began, _bytes_read()
    read = None if before is None or after is None else after - before
    weights = str(Path(source) / "model.safetensors")
    return {
        "seconds": seconds,
        "read": read,
        "source_opened": opened.count(weights),
        "folder": str(folder),
    }


def _bytes_read() -> int | None:
    """All that this process has read so far, from files or their cache; None where it is not told."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "conversion": run_conversion,
    "start": run_start,
}


def measure(folder: Path, scale: float, repeat: int) -> dict[str, Any]:
    """All figures; times in seconds, sizes in bytes."""
    source = folder / "source"
    make_source(source, scale)
    plan = plan_conversion(source)
    files, conversions, peaks = [], [], []
    for turn in range(repeat):
        copy, converted = folder / "copy", folder / "converted"
        began = time.perf_counter()
        handle_files(plan.weights, plan.output_bytes, copy)
        files.append(time.perf_counter() - began)
        copy.unlink()
        conversion = in_own_process("conversion", source, converted)
        conversions.append(conversion["seconds"])
        peaks.append(conversion["peak"])
        for path in converted.iterdir():
            path.unlink()
        converted.rmdir()
    first, warm = (in_own_process("start", source) for _ in range(2))
    return {
        "source_bytes": plan.weights.stat().st_size,
        "output_bytes": plan.output_bytes,
        "files_seconds": files,
        "conversion_seconds": conversions,
        "ratio": statistics.median(c / f for c, f in zip(conversions, files, strict=True)),
        "peak_bytes": max(peaks),
        "first_start_seconds": first["seconds"],
        "warm_start_seconds": warm["seconds"],
        "warm_start_read_bytes": warm["read"],
        "warm_start_opened_source": warm["source_opened"],
        "warm_start_folder": Path(warm["folder"]).relative_to(folder).as_posix(),
    }


def show(figures: dict[str, Any]) -> None:
    print(f"source      {figures['source_bytes']:>13,} bytes")
    print(f"result      {figures['output_bytes']:>13,} bytes")
    print(f"files       {_seconds(figures['files_seconds'])}")
    print(f"conversion  {_seconds(figures['conversion_seconds'])}")
    print(f"ratio       {figures['ratio']:.2f} (at most {MOST_RATIO:g})")
    print(f"peak memory {figures['peak_bytes'] / 1e6:.0f} MB (less than {MOST_MEMORY / 1e6:.0f})")
    print(f"first start {figures['first_start_seconds']:.2f} s, with its conversion")
    read = figures["warm_start_read_bytes"]
    told = "not told here" if read is None else f"{read:,} bytes read in all"
    print(
        f"warm start  {figures['warm_start_seconds']:.3f} s, {told}, source weights opened "
        f"{figures['warm_start_opened_source']} times, loads {figures['warm_start_folder']}"
    )


def _seconds(times: list[float]) -> str:
    return " ".join(f"{seconds:.2f}" for seconds in times) + " s"


def main() -> int:
    if sys.argv[1:2] == ["--task"]:
        print(json.dumps(TASKS[sys.argv[2]](*sys.argv[3:])))
        return 0
    parser = argparse.ArgumentParser(description="Measure the conversion of a full-size drafter.")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each matrix's rows")
    parser.add_argument("--repeat", type=int, default=1, help="turns of files and conversion")
    parser.add_argument("--folder", type=Path, help="where to work; needs 8 GB at scale 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if not 0 < options.scale <= 1:
        parser.error(f"--scale {options.scale:g} is no share: give more than 0 and at most 1")
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat} measures nothing: give 1 or more")
    if options.folder is not None and not os.path.isdir(options.folder):
        parser.error(f"--folder {options.folder} is no folder: make it, or name another")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(Path(folder).resolve(), options.scale, options.repeat)
    if options.json:
        print(json.dumps(figures))
    else:
        show(figures)
    held = figures["ratio"] <= MOST_RATIO and figures["peak_bytes"] < MOST_MEMORY
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
