"""A bfloat16 DFlash2 drafter becomes one of 8-bit or 4-bit codes, reproducible byte for byte.

Needs NumPy and the standard library only. Memory stays bounded whatever the size of the source: its
matrices are read into buffers, quantized and written 128 rows at a time, and never mapped, as mapped
pages count as memory in use. For little-endian machines, as all are that MLX runs on.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from lse_mlx.checkpoints.conversion.affine import GROUP_SIZE, GroupQuantizer, code_bytes
from lse_mlx.checkpoints.conversion.manifest import (
    CHUNK_BYTES,
    CONVERSION,
    MANIFEST,
    REFERENCE_IMPLEMENTATION,
    Manifest,
    format_name,
    hash_file,
)
from lse_mlx.checkpoints.conversion.new_folder import FolderTaken, new_folder
from lse_mlx.checkpoints.conversion.plan import (
    CONFIG,
    WEIGHTS,
    ConversionPlan,
    PlannedTensor,
    plan_conversion,
)
from lse_mlx.checkpoints.progress import Progress, Silent
from lse_mlx.errors import CheckpointError, reason

__all__ = ["ConversionPlan", "Manifest", "convert", "hash_file", "plan_conversion"]

BLOCK_ROWS = 128
"""Rows that are one piece of work; fewer where they are more than CHUNK_BYTES."""
MOST_THREADS = 8
SPARE_BYTES = 16 << 20
"""Disk that must be free besides the new weights."""
GROUP_BYTES = 2 * GROUP_SIZE

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def convert(
    source: Path,
    destination: Path,
    repository: str,
    revision: str,
    *,
    bits: int = 8,
    progress: Progress | None = None,
    threads: int | None = None,
    source_sha256: str | None = None,
) -> Manifest:
    """Convert the checkpoint in the folder `source` into the new folder `destination`.

    repository, revision: of the source, for the manifest; bits: of a code, 8 or 4
    threads: how many quantize side by side, by default one a processor and at most 8; the result
    does not depend on it. source_sha256: of the source's model.safetensors, where it is known.
    progress: of the phases hash-source (left out where the hash is known), quantize and finish.

    The new folder appears whole at the end; on any failure nothing is left of it. Raises FolderTaken
    if the destination exists, FolderNotWritable if it cannot be made, and CheckpointError for all
    else: a source that cannot be converted or changes meanwhile, no room, a failing disk.
    """
    source, destination = _resolved(source), _resolved(destination)
    progress = progress or Silent()
    _check_destination(source, destination)
    plan = plan_conversion(source, bits)
    with _refusals_told(plan, destination):
        _check_room(plan, destination.parent)
        with new_folder(destination) as folder:
            manifest = _fill(folder, plan, repository, revision, progress, threads, source_sha256)
    return manifest


def _fill(
    folder: Path,
    plan: ConversionPlan,
    repository: str,
    revision: str,
    progress: Progress,
    threads: int | None,
    source_sha256: str | None,
) -> Manifest:
    """Write the three files of the conversion into the empty `folder`."""
    before = _stamp(plan.weights)
    source_sha256 = source_sha256 or hash_file(plan.weights, progress, "hash-source")
    _write_weights(plan, folder / WEIGHTS, progress, threads or _processors())
    if _stamp(plan.weights) != before:
        raise CheckpointError(
            f"{plan.weights} changed while it was converted: "
            "wait until nothing writes to it and convert it again."
        )
    manifest = Manifest(
        source_repository=repository,
        source_revision=revision,
        source_sha256=source_sha256,
        reference_implementation=REFERENCE_IMPLEMENTATION,
        format=format_name(plan.bits),
        conversion=CONVERSION,
        bytes=plan.output_bytes,
        sha256=_hash_and_sync(folder / WEIGHTS, progress),
        tensors=plan.output_tensors,
    )
    for name, text in ((CONFIG, plan.config_text), (MANIFEST, manifest.text())):
        (folder / name).write_text(text, encoding="ascii", newline="\n")
    return manifest


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise CheckpointError(
            f"{str(path)!r} is no place for a folder ({reason(error)}): name another."
        ) from error


def _check_destination(source: Path, destination: Path) -> None:
    if destination == source:
        raise CheckpointError(
            f"{destination} is the source itself: name a new folder for the conversion."
        )
    if os.path.lexists(destination):
        raise FolderTaken(
            f"{destination} exists already, but a conversion needs a new folder: name another."
        )


def _check_room(plan: ConversionPlan, parent: Path) -> None:
    existing = next(folder for folder in (parent, *parent.parents) if folder.exists())
    need, free = plan.output_bytes + SPARE_BYTES, shutil.disk_usage(existing).free
    if free < need:
        raise CheckpointError(
            f"The conversion of {plan.source} needs {-(-need >> 20)} MiB free in {parent}, but "
            f"there are {free >> 20}: free some space or name a folder on another disk."
        )


@contextmanager
def _refusals_told(plan: ConversionPlan, destination: Path) -> Iterator[None]:
    """What the system refuses becomes a sentence."""
    try:
        yield
    except BrokenPipeError:  # no file: whoever shows the progress writes to one
        raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise CheckpointError(
                f"The disk of {destination.parent} became full while {plan.source} was converted, "
                f"which takes {-(-plan.output_bytes >> 20)} MiB (nothing of it was left there): "
                "free some space or name a folder on another disk."
            ) from error
        raise CheckpointError(
            f"{plan.source} could not be converted to {destination} ({error.strerror or error}): "
            "see that both can be used and convert it again."
        ) from error


def _stamp(path: Path) -> tuple[int, int, int, int]:
    """What changes when somebody writes to or replaces a file."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # a Mac has none
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MOST_THREADS)


def _hash_and_sync(path: Path, progress: Progress) -> str:
    """The SHA-256 of what was written, read back while it goes to the disk."""
    with path.open("rb+", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        synced = pool.submit(os.fsync, file.fileno())
        sha256 = hash_file(path, progress, "finish")
        synced.result()
    return sha256


def _write_weights(plan: ConversionPlan, path: Path, progress: Progress, threads: int) -> None:
    with ExitStack() as opened:
        output = opened.enter_context(path.open("xb", buffering=0))
        _write(output, 0, memoryview(plan.header))
        output.truncate(plan.output_bytes)
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(threads):
            idle.put(
                _Worker(
                    plan,
                    opened.enter_context(plan.weights.open("rb", buffering=0)),
                    opened.enter_context(path.open("rb+", buffering=0)),
                )
            )

        def work(block: _Block) -> None:
            worker = idle.get()
            try:
                worker.do(block)
            finally:
                idle.put(worker)

        pool = opened.enter_context(ThreadPoolExecutor(threads))
        done, total = 0, plan.quantized_bytes
        progress.advance("quantize", done, total)
        for tensor in plan.tensors:
            blocks = list(_blocks(tensor))
            for block, _ in zip(blocks, pool.map(work, blocks), strict=True):
                if tensor.quantized:
                    done += block.size
                    progress.advance("quantize", done, total, tensor.name)


@dataclass(frozen=True)
class _Block:
    """`size` bytes of a tensor from its byte `start` on; whole groups where it is quantized."""

    tensor: PlannedTensor
    start: int
    size: int


def _blocks(tensor: PlannedTensor) -> Iterator[_Block]:
    most = CHUNK_BYTES
    if tensor.quantized:
        most = min(most, BLOCK_ROWS * tensor.source.shape[1] * 2)
    for start in range(0, tensor.source.size, most):
        yield _Block(tensor, start, min(most, tensor.source.size - start))


class _Worker:
    """One thread's files and buffers; it reads a block, converts it, and writes what it becomes."""

    def __init__(self, plan: ConversionPlan, source: FileIO, output: FileIO):
        self._source, self._output = source, output
        self._source_start, self._output_start = plan.payload_start, len(plan.header)
        self._bits = plan.bits
        self._quantizer = GroupQuantizer(plan.bits)
        groups = CHUNK_BYTES // GROUP_BYTES
        # Memory that is not touched is not used: most blocks are smaller.
        self._values = np.empty(groups * GROUP_SIZE, np.uint16)
        self._codes = np.empty(code_bytes(groups * GROUP_SIZE, plan.bits), np.uint8)
        self._scales, self._biases = np.empty(groups, np.uint16), np.empty(groups, np.uint16)

    def do(self, block: _Block) -> None:
        if block.tensor.quantized:
            self._quantize(block)
        else:
            [output] = block.tensor.outputs.values()
            self._put(output.begin + block.start, self._read(block))

    def _quantize(self, block: _Block) -> None:
        first, groups = block.start // GROUP_BYTES, block.size // GROUP_BYTES
        codes = self._codes[: code_bytes(groups * GROUP_SIZE, self._bits)]
        scales, biases = self._scales[:groups], self._biases[:groups]
        self._quantizer.quantize(self._read(block).view(np.uint16), codes, scales, biases)
        weight, scale, bias = block.tensor.outputs.values()
        self._put(weight.begin + code_bytes(first * GROUP_SIZE, self._bits), codes)
        self._put(scale.begin + first * scales.itemsize, scales)
        self._put(bias.begin + first * biases.itemsize, biases)

    def _read(self, block: _Block) -> np.ndarray:
        """The block's bytes; the buffer is the worker's own and good until it reads again."""
        values = self._values.view(np.uint8)[: block.size]
        self._source.seek(self._source_start + block.tensor.source.begin + block.start)
        rest = values.data
        while rest:
            count = self._source.readinto(rest)
            if not count:
                raise CheckpointError(
                    f"{self._source.name} was cut short while it was converted: "
                    "wait until nothing writes to it and convert it again."
                )
            rest = rest[count:]
        return values

    def _put(self, place: int, data: np.ndarray) -> None:
        _write(self._output, self._output_start + place, data.view(np.uint8).data)


def _write(file: FileIO, place: int, data: memoryview) -> None:
    file.seek(place)
    while data:
        data = data[file.write(data) :]
