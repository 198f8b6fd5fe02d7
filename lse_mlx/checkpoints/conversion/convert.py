"""A bfloat16 DFlash2 drafter becomes one of 8-bit or 4-bit codes, reproducible byte for byte.

Needs NumPy and the standard library only. Memory stays bounded whatever the size of the source: its
matrices are read into buffers, quantized and written 128 rows at a time, and never mapped, as mapped
pages count as memory in use. For little-endian machines, as all are that MLX runs on.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from lse_mlx.checkpoints.conversion.affine import GroupQuantizer, code_bytes
from lse_mlx.checkpoints.conversion.manifest import (
    CONVERSION,
    REFERENCE_IMPLEMENTATION,
    Manifest,
    format_name,
)
from lse_mlx.checkpoints.conversion.new_folder import FolderTaken, new_folder, refusals_told
from lse_mlx.checkpoints.conversion.plan import ConversionPlan, PlannedTensor, plan_conversion
from lse_mlx.checkpoints.conversion.source_hashes import SourceHashes
from lse_mlx.checkpoints.disk import check_room, full_sync
from lse_mlx.checkpoints.hashing import CHUNK_BYTES, hash_file
from lse_mlx.checkpoints.names import CONFIG, GROUP_SIZE, MANIFEST, WEIGHTS
from lse_mlx.checkpoints.progress import Progress, Silent
from lse_mlx.errors import CheckpointError, reason

BLOCK_ROWS = 128
"""Rows that are one piece of work; fewer where they are more than CHUNK_BYTES."""
MOST_THREADS = 8
GROUP_BYTES = 2 * GROUP_SIZE


def convert(
    source: Path,
    destination: Path,
    repository: str,
    revision: str,
    *,
    bits: int = 8,
    progress: Progress | None = None,
    threads: int | None = None,
    hashes: SourceHashes | None = None,
    way_out: str = "name a folder on another disk",
) -> Manifest:
    """Convert the checkpoint in the folder `source` into the new folder `destination`.

    repository, revision: of the source, for the manifest; bits: of a code, 8 or 4
    threads: how many quantize side by side, by default one a processor and at most 8; the result
    does not depend on it. hashes: of the source's model.safetensors, where they may be known.
    progress: of the phases hash-source (left out where it was hashed before), quantize and finish.
    way_out: what can be done where there is no room, besides making some.

    The new folder appears whole at the end; on any failure nothing is left of it. Raises FolderTaken
    if the destination exists, FolderNotWritable if it cannot be made, and CheckpointError for all
    else: a source that cannot be converted or changes meanwhile, no room, a failing disk.
    """
    source, named = _resolved(source), destination
    destination = _resolved(named)
    progress = progress or Silent()
    _check_destination(source, destination, named)
    plan = plan_conversion(source, bits)
    hashes = hashes or SourceHashes((plan.weights,), (), progress)
    with refusals_told(plan.source, destination):
        check_room(destination.parent, plan.output_bytes, f"The conversion of {source}", way_out)
        with new_folder(destination) as folder:
            manifest = _fill(folder, plan, repository, revision, progress, threads, hashes)
    return manifest


def _fill(
    folder: Path,
    plan: ConversionPlan,
    repository: str,
    revision: str,
    progress: Progress,
    threads: int | None,
    hashes: SourceHashes,
) -> Manifest:
    """Write the three files of the conversion into the empty `folder`."""
    [source_sha256] = hashes.compute()
    _write_weights(plan, folder / WEIGHTS, progress, threads or _processors())
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
    hashes.check_unchanged()
    return manifest


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise CheckpointError(
            f"{str(path)!r} is no place for a folder ({reason(error)}): name another."
        ) from error


def _check_destination(source: Path, destination: Path, named: Path) -> None:
    if destination == source:
        raise CheckpointError(
            f"{destination} is the source itself: name a new folder for the conversion."
        )
    # Also as it was named: a link that leads nowhere is there, though nothing is where it leads.
    if os.path.lexists(destination) or os.path.lexists(named):
        raise FolderTaken(
            f"{named} exists already, but a conversion needs a new folder: name another."
        )


def _processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # a Mac has none
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MOST_THREADS)


def _hash_and_sync(path: Path, progress: Progress) -> str:
    """The SHA-256 of what was written, read back while it goes to the disk."""
    with path.open("rb+", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        synced = pool.submit(full_sync, file.fileno())
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
