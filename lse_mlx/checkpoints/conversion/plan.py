"""What a conversion will write, told from the source's config.json and header alone.

Needs the standard library only. Nothing is written, and of the weights only the header is read.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from lse_mlx.checkpoints.json_object import json_text, read_json_object
from lse_mlx.checkpoints.names import (
    ARCHITECTURE,
    CODEBOOKS,
    CONFIG,
    GROUP_SIZE,
    INDEX,
    QUANTIZATION,
    WEIGHTS,
    is_dflash2,
)
from lse_mlx.checkpoints.safetensors_header import StoredTensor, header_bytes, read_header
from lse_mlx.errors import CheckpointError, printable

RENAMED = {name: f"{name}.weight" for name in CODEBOOKS}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the source: its name in the conversion, where it lies, whether it is quantized.

    outputs: what it becomes, by name, in the order of the file; a copy, or codes, scales and biases
    """

    name: str
    source: StoredTensor
    quantized: bool
    outputs: dict[str, StoredTensor]


@dataclass(frozen=True)
class ConversionPlan:
    """All that a conversion will write except what the values of the weights decide.

    source: the folder; weights: its model.safetensors; payload_start: bytes before its first tensor
    config_text: the new config.json; tensors: in the order of the new file
    header: the beginning of the new model.safetensors, its length included
    """

    source: Path
    weights: Path
    payload_start: int
    bits: int
    config_text: str
    tensors: tuple[PlannedTensor, ...]
    header: bytes

    @property
    def output_bytes(self) -> int:
        """Bytes of the new model.safetensors."""
        return len(self.header) + sum(t.size for p in self.tensors for t in p.outputs.values())

    @property
    def output_tensors(self) -> int:
        """How many tensors it holds."""
        return sum(len(p.outputs) for p in self.tensors)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the source's matrices that are quantized."""
        return sum(p.source.size for p in self.tensors if p.quantized)


def plan_conversion(source: Path, bits: int = 8) -> ConversionPlan:
    """Plan the conversion of the DFlash2 checkpoint in the folder `source` to codes of `bits` bits.

    Raises CheckpointError, with its reason, for any checkpoint but an unquantized bfloat16 one in
    one file, whose every matrix falls into groups of 64 columns.
    """
    if bits not in (8, 4):
        raise CheckpointError(f"Codes of {bits!r} bits are not possible: choose 8 or 4.")
    config = _read_config(source)
    weights = source / WEIGHTS
    if not os.path.exists(weights) and os.path.exists(source / INDEX):
        raise CheckpointError(
            f"{source} keeps its weights in several files ({INDEX}), which is not supported: "
            f"pass a checkpoint with one {WEIGHTS}."
        )
    header = read_header(weights)
    stored: dict[str, StoredTensor] = {}
    for name, tensor in header.tensors.items():
        # As in any dict, a later tensor of the same name takes the place of the former.
        stored[RENAMED.get(name, name)] = tensor
    tensors = tuple(_planned(stored, bits, weights))
    if not any(t.quantized for t in tensors):
        raise CheckpointError(
            f"{weights} holds no matrix to quantize: pass the whole published checkpoint."
        )
    outputs = {name: tensor for p in tensors for name, tensor in p.outputs.items()}
    if len(outputs) != sum(len(p.outputs) for p in tensors):
        _refuse_taken_name(tensors, weights)
    return ConversionPlan(
        source=source,
        weights=weights,
        payload_start=header.payload_start,
        bits=bits,
        config_text=converted_config(config, bits),
        tensors=tensors,
        header=header_bytes(outputs),
    )


def is_planned(tensors: dict[str, StoredTensor], bits: int, weights: Path) -> bool:
    """Whether a plan makes `tensors`, of the file `weights`, of any source: which is not opened."""
    stored = {}
    for name, tensor in tensors.items():
        base, _, part = name.rpartition(".")
        whole = tensors.get(f"{base}.weight")
        if whole is None or len(whole.shape) != 2 or part not in ("weight", "scales", "biases"):
            stored[name] = tensor
        elif part == "weight":
            rows, columns = whole.shape[0], whole.shape[1] * 32 // bits
            stored[name] = StoredTensor("BF16", (rows, columns), 0, rows * columns * 2)
    try:
        planned = [item for p in _planned(stored, bits, weights) for item in p.outputs.items()]
    except CheckpointError:
        return False
    return planned == list(tensors.items())


def converted_config(config: dict[str, Any], bits: int) -> str:
    """The text of a conversion's config.json, from the object in its source's."""
    quantization = {"bits": bits, "group_size": GROUP_SIZE, "mode": "affine"}
    return json_text(config | {"quantization": quantization})


def _read_config(source: Path) -> dict[str, Any]:
    path = source / CONFIG
    config = read_json_object(path, "pass the folder of a whole DFlash2 checkpoint")
    names = config.get("architectures")
    if not is_dflash2(names):
        raise CheckpointError(
            f"{path} has architectures = {names!r}, not a {ARCHITECTURE}: pass a DFlash2 drafter."
        )
    for key in QUANTIZATION:
        if config.get(key):
            raise CheckpointError(
                f"{path} has a {key} block, but the source must be unquantized bfloat16: "
                "load this checkpoint as it is, or pass the one it was made from."
            )
    return config


def _planned(stored: dict[str, StoredTensor], bits: int, weights: Path) -> Iterator[PlannedTensor]:
    place = 0
    for name, tensor in stored.items():
        quantized = len(tensor.shape) == 2 and name.endswith(".weight")
        if quantized:
            _check_matrix(name, tensor, weights)
            outputs = _parts(name, tensor, bits)
        else:
            outputs = {name: tensor}
        for part, at in outputs.items():
            size = at.size
            outputs[part] = replace(at, begin=place, end=place + size)
            place += size
        yield PlannedTensor(name, tensor, quantized, outputs)


def _check_matrix(name: str, tensor: StoredTensor, weights: Path) -> None:
    rows, columns = tensor.shape
    if tensor.dtype != "BF16" or tensor.size != rows * columns * 2:
        raise CheckpointError(
            f"The matrix {printable(name)} in {weights} is {tensor.dtype}, but BF16 is needed: "
            "pass the published bfloat16 checkpoint."
        )
    if rows <= 0 or columns <= 0 or columns % GROUP_SIZE:
        raise CheckpointError(
            f"The matrix {printable(name)} in {weights} has the shape {[rows, columns]}, which "
            f"groups of {GROUP_SIZE} columns do not fill: pass the published checkpoint."
        )


def _parts(name: str, tensor: StoredTensor, bits: int) -> dict[str, StoredTensor]:
    """Codes, scales and biases of a matrix, each laid out from 0."""
    rows, columns = tensor.shape
    base = name.removesuffix(".weight")
    parts = {}
    for part, dtype, shape, width in (
        ("weight", "U32", (rows, columns * bits // 32), 4),
        ("scales", "BF16", (rows, columns // GROUP_SIZE), 2),
        ("biases", "BF16", (rows, columns // GROUP_SIZE), 2),
    ):
        parts[f"{base}.{part}"] = StoredTensor(dtype, shape, 0, prod(shape) * width)
    return parts


def _refuse_taken_name(tensors: tuple[PlannedTensor, ...], weights: Path) -> NoReturn:
    seen: set[str] = set()
    taken = next(n for p in tensors for n in p.outputs if n in seen or seen.add(n))
    raise CheckpointError(
        f"The tensor {printable(taken)} in {weights} has the name that a part of a converted "
        "matrix needs: pass the published checkpoint."
    )
