"""The header of a safetensors file: read and held to the format, or written in its shortest form.

Needs the standard library only. The format: <https://github.com/huggingface/safetensors>.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as in_short
from typing import Any, NoReturn

from lse_mlx.checkpoints.checks import Words, shown
from lse_mlx.checkpoints.regular_file import open_regular
from lse_mlx.errors import CheckpointError, printable, reason

LARGEST_HEADER = 100_000_000
"""Bytes of JSON; the format's own limit."""

METADATA = "__metadata__"
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of one element, by the name of its type."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: bytes [begin, end) after the header, row-major, little endian."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a safetensors file says of itself, checked against its size.

    tensors: by name, in the header's order; payload_start: bytes before the first tensor
    file_size: bytes of the whole file
    """

    tensors: dict[str, StoredTensor]
    payload_start: int
    file_size: int


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of `path` and nothing behind it.

    Raises CheckpointError, naming the file, if it cannot be read, is cut short or longer than its
    header says, or if the header is no JSON object of tensors that fill the file without gaps and
    overlaps, each of a known type and of as many bytes as its shape asks for.
    """
    try:
        with open_regular(path) as file:
            file_size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if file_size < 8 or length > file_size - 8:
                _refuse(path, f"is cut short: {file_size} bytes do not hold its header")
            if length > LARGEST_HEADER:
                _refuse(path, f"claims a header of {length} bytes, more than the format allows")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): name the folder of a whole checkpoint."
        ) from error
    try:
        entries = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        _refuse(path, f"has a header that is no JSON ({reason(error)})")
    if not isinstance(entries, dict):
        _refuse(path, "has a header that is no JSON object")
    entries.pop(METADATA, None)
    tensors = {name: _tensor(path, name, entry) for name, entry in entries.items()}
    _check_layout(path, tensors, file_size - 8 - length)
    return SafetensorsHeader(tensors, 8 + length, file_size)


def header_bytes(tensors: dict[str, StoredTensor]) -> bytes:
    """The shortest header of `tensors`, in their order, padded with spaces to a multiple of 8."""
    entries = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.begin, t.end]}
        for name, t in tensors.items()
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _refuse(path: Path, what: str) -> NoReturn:
    raise CheckpointError(
        f"{printable(str(path))} is damaged (it {what}): download or convert the checkpoint again."
    )


def _named(name: str) -> str:
    """A tensor's name in a sentence, whatever the file has in its place."""
    return shown(Words(name))


def _tensor(path: Path, name: str, entry: Any) -> StoredTensor:
    said = f"its tensor {_named(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"does not give dtype, shape and data_offsets of {said}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _refuse(path, f"gives {said} the type {in_short(dtype)}, which is not known")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        place = f"{in_short(shape)} at {in_short(offsets)}"
        _refuse(path, f"gives {said} the shape {place}, which is no place")
    begin, end = offsets
    size = DTYPE_BYTES[dtype]
    for axis in shape:
        size *= axis
        if size >= 1 << 63:  # at once: the product of many axes takes as long as it has digits
            _refuse(path, f"gives {said} the shape {in_short(shape)}, which no file can hold")
    if end - begin != size:
        _refuse(
            path, f"gives {said} the bytes {begin} to {end}, but {dtype} {in_short(shape)} "
            f"are {size} bytes",
        )  # fmt: skip
    return StoredTensor(dtype, tuple(shape), begin, end)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], payload: int) -> None:
    place, before = 0, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != place:
            fault = "overlaps" if tensor.begin < place else "leaves a gap after"
            _refuse(path, f"has a tensor {_named(name)} that {fault} {before}")
        place, before = tensor.end, _named(name)
    if place != payload:
        kind = "is cut short" if place > payload else "is too long"
        _refuse(path, f"{kind}: its tensors take {place} bytes, but {payload} follow the header")
