"""Sampled replies on disk.

While sampling, every batch is one plain .npz file, so a run that is stopped keeps what it has.
Compression on threads slows the sampling down, so it comes afterwards: `pack_shards` turns the
batches into a few shards, zip files whose members are LZMA-compressed .npz files.
"""

from __future__ import annotations

import io
import lzma
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SHARD_LIMIT = int(15.5 * 2**20)
MAX_SHARDS = 7


@dataclass(frozen=True)
class ReplyBatch:
    """Replies of one batch: row i answers prompt `prompt_ids[i]` in turn `turn` (1 or 2)."""

    turn: int
    prompt_ids: NDArray[np.int32]
    replies: list[NDArray[np.uint16]]


def write_batch(folder: Path, number: int, batch: ReplyBatch) -> None:
    """Write one batch as turn<t>-<number>.npz; the name appears only once the file is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"turn{batch.turn}-{number:03d}.npz"
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.savez(
            file,
            prompt_ids=batch.prompt_ids,
            lengths=np.array([len(reply) for reply in batch.replies], np.uint16),
            tokens=np.concatenate(batch.replies),
        )
    unfinished.rename(path)


def pack_shards(folder: Path, out: Path, threads: int = 16) -> list[Path]:
    """Compress all batches of `folder` into shards in `out`; later batches are left out if full."""
    out.mkdir(parents=True, exist_ok=True)
    # Second turns first: should the shards fill up, a first-turn batch is the smaller loss.
    paths = sorted(folder.glob("turn2-*.npz")) + sorted(folder.glob("turn1-*.npz"))
    with ThreadPoolExecutor(threads) as pool:
        blobs = list(pool.map(lambda path: lzma.compress(path.read_bytes(), preset=4), paths))
    shards: list[list[int]] = [[]]
    size = 0
    for i, blob in enumerate(blobs):
        if size + len(blob) > SHARD_LIMIT:
            shards.append([])
            size = 0
        shards[-1].append(i)
        size += len(blob) + 256
    if len(shards) > MAX_SHARDS:
        print(f"left out: {sum(map(len, shards[MAX_SHARDS:]))} batches beyond {MAX_SHARDS} shards")
    written = []
    for number, members in enumerate(shards[:MAX_SHARDS]):
        written.append(out / f"replies-{number}.zip")
        with zipfile.ZipFile(written[-1], "w", zipfile.ZIP_STORED) as archive:
            for i in members:
                archive.writestr(f"{paths[i].name}.xz", blobs[i])
    return written


def read_shards(folder: Path) -> Iterator[ReplyBatch]:
    """All batches of all shards of a folder, first turns before second turns."""
    members = [
        (name, shard)
        for shard in sorted(folder.glob("replies-*.zip"))
        for name in zipfile.ZipFile(shard).namelist()
    ]
    for name, shard in sorted(members):
        with zipfile.ZipFile(shard) as archive:
            raw = lzma.decompress(archive.read(name))
        yield read_batch(io.BytesIO(raw), turn=int(name.removeprefix("turn")[0]))


def read_batch(file: io.BytesIO | Path, turn: int) -> ReplyBatch:
    """One batch as written by `write_batch`."""
    with np.load(file) as arrays:
        ends = np.cumsum(arrays["lengths"].astype(np.int64))
        replies = np.split(arrays["tokens"], ends[:-1])
        return ReplyBatch(turn, arrays["prompt_ids"], replies)
