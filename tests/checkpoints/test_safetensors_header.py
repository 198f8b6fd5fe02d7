"""A header is taken only if it says exactly what the file holds."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lse_mlx.checkpoints.safetensors_header import StoredTensor, header_bytes, read_header
from lse_mlx.errors import CheckpointError


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(folder: Path, header: Any, payload: int, length: int | None = None) -> Path:
    """A file of that header (an object or bytes) and payload; length: what it claims to be long."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    length = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", length) + text + bytes(payload))
    return path


A, B = entry("BF16", [2, 3], 0, 12), entry("F32", [5], 12, 32)


def test_what_a_header_says(tmp_path: Path) -> None:
    path = write(tmp_path, {"b": B, "__metadata__": {"format": "pt"}, "a": A}, 32)
    header = read_header(path)
    assert list(header.tensors.items()) == [
        ("b", StoredTensor("F32", (5,), 12, 32)),
        ("a", StoredTensor("BF16", (2, 3), 0, 12)),
    ]
    assert header.file_size == path.stat().st_size == header.payload_start + 32
    assert header.tensors["b"].size == 20


def test_scalars_and_empty_tensors_have_their_place(tmp_path: Path) -> None:
    tensors = {
        "scalar": entry("F64", [], 0, 8),
        "none": entry("I64", [0, 7], 8, 8),
        "more": entry("BOOL", [3], 8, 11),
        "last": entry("U8", [0], 11, 11),
    }
    assert list(read_header(write(tmp_path, tensors, 11)).tensors) == list(tensors)
    assert read_header(write(tmp_path, {}, 0)).tensors == {}


@pytest.mark.parametrize(
    ("header", "payload", "words"),
    [
        pytest.param({"a": A, "b": B}, 31, "is cut short", id="truncated"),
        pytest.param({"a": A, "b": B}, 0, "is cut short", id="header only"),
        pytest.param(json.dumps({"a": A}).encode("utf-16-le"), 12, "no JSON", id="UTF-16"),
        pytest.param(b"\xef\xbb\xbf" + json.dumps({"a": A}).encode(), 12, "no JSON", id="BOM"),
        pytest.param({"a": A, "b": B}, 33, "is too long", id="a byte more"),
        pytest.param({}, 1, "is too long", id="bytes of no tensor"),
        pytest.param(
            {"a": A, "b": entry("F32", [5], 8, 28)}, 28, "b that overlaps a", id="overlap"
        ),
        pytest.param({"a": A, "b": A}, 12, "b that overlaps a", id="the same bytes"),
        pytest.param(
            {"a": A, "b": entry("F32", [5], 16, 36)}, 36, "leaves a gap after a", id="gap"
        ),
        pytest.param({"b": B}, 32, "b that leaves a gap after the header", id="gap in front"),
        pytest.param({"a": entry("BF16", [2, 3], 0, 13)}, 13, "are 12 bytes", id="wrong size"),
        pytest.param({"a": entry("BF16", [2, 3], 12, 0)}, 12, "are 12 bytes", id="backwards"),
        pytest.param({"a": entry("BF16", [2, 3], -12, 0)}, 12, "which is no place", id="negative"),
        pytest.param({"a": entry("BF16", [-2, -3], 0, 12)}, 12, "no place", id="negative shape"),
        pytest.param({"a": entry("BF16", [2.0, 3], 0, 12)}, 12, "no place", id="shape of floats"),
        pytest.param({"a": entry("BF16", [True, 6], 0, 12)}, 12, "no place", id="shape of truths"),
        pytest.param({"a": entry("BF16", 6, 0, 12)}, 12, "no place", id="shape is no list"),
        pytest.param({"a": entry("BF16", [6], "0", 12)}, 12, "no place", id="offsets of text"),
        pytest.param({"a": {**A, "data_offsets": [0, 12, 12]}}, 12, "no place", id="three offsets"),
        pytest.param({"a": entry("BF17", [6], 0, 12)}, 12, "'BF17', which is not", id="dtype"),
        pytest.param({"a": entry("bf16", [6], 0, 12)}, 12, "'bf16', which is not", id="lower case"),
        pytest.param({"a": {"dtype": "BF16"}}, 12, "does not give dtype, shape and", id="missing"),
        pytest.param({"a": {**A, "more": 1}}, 12, "does not give dtype, shape and", id="unknown"),
        pytest.param({"a": [1]}, 12, "does not give dtype, shape and", id="no object"),
        pytest.param([], 0, "is no JSON object", id="list"),
        pytest.param(b"{", 0, "is no JSON", id="no JSON"),
        pytest.param(b"\xff\xfe{}", 0, "is no JSON", id="no text"),
        pytest.param(b"[" * 50_000, 0, "is no JSON", id="deep"),
        pytest.param({"a": entry("U8", [1 << 62], 0, 1 << 62)}, 12, "is cut short", id="enormous"),
        pytest.param(
            {"a": entry("U8", [1 << 63], 0, 1 << 63)}, 12, "no place", id="beyond 63 bits"
        ),
        pytest.param({"a": entry("U8", [1 << 62] * 999, 0, 9)}, 9, "no file can", id="digits"),
        pytest.param({"a": entry("U8", [10**4000] * 2, 0, 9)}, 9, "no place", id="more digits"),
    ],
)
def test_what_is_refused(tmp_path: Path, header: Any, payload: int, words: str) -> None:
    path = write(tmp_path, header, payload)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path} is damaged (it ")
    assert str(caught.value).endswith("): download or convert the checkpoint again.")


def test_unhashable_types_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": entry(["BF16"], [6], 0, 12)}, 12)
    with pytest.raises(CheckpointError, match="which is not known"):
        read_header(path)


@pytest.mark.parametrize("axes", [[1 << 62] * 40_000, [3] * 400_000, [1] * 400_000])
def test_a_shape_of_very_many_axes_is_refused_in_a_few_words(
    tmp_path: Path, axes: list[int]
) -> None:
    path = write(tmp_path, {"a": entry("U8", axes, 0, 9)}, 9)
    with pytest.raises(CheckpointError, match=r"no file can|are 1 bytes") as caught:
        read_header(path)
    assert len(str(caught.value)) < 500 + len(str(path))


def test_axes_that_hold_nothing_count_too(tmp_path: Path) -> None:
    """The product of all is 0, but no reader gets there without leaving 64 bits."""
    path = write(tmp_path, {"a": entry("U8", [1 << 62, 1 << 62, 0], 0, 0)}, 0)
    with pytest.raises(CheckpointError, match="which no file can hold"):
        read_header(path)


@pytest.mark.parametrize("length", [3, 1 << 20, (1 << 64) - 1])
def test_a_length_that_lies_is_refused(tmp_path: Path, length: int) -> None:
    path = write(tmp_path, {"a": A}, 12, length)
    with pytest.raises(CheckpointError, match=r"is no JSON|is cut short"):
        read_header(path)


def test_a_header_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = write(tmp_path, {}, 0, 100_000_001)
    os.truncate(path, 200_000_000)  # takes no room on the disk
    with pytest.raises(CheckpointError, match="claims a header of 100000001 bytes"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_too_short_for_a_length_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=f"is cut short: {size} bytes"):
        read_header(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_header(path)


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": A, "b": B}, 32)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_header(path)


def test_what_is_written(tmp_path: Path) -> None:
    tensors = {"b": StoredTensor("U32", (1, 2), 0, 8), "\u00e9": StoredTensor("BF16", (), 8, 10)}
    text = (
        b'{"b":{"dtype":"U32","shape":[1,2],"data_offsets":[0,8]},'
        b'"\\u00e9":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}}'
    )
    padded = text + b" " * (-len(text) % 8)
    assert header_bytes(tensors) == struct.pack("<Q", len(padded)) + padded
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_bytes(tensors) + bytes(10))
    assert read_header(path).tensors == tensors


@given(
    st.dictionaries(
        st.text(max_size=20).filter(lambda name: name != "__metadata__"),
        st.lists(st.integers(0, 5), max_size=3),
        max_size=6,
    )
)
def test_a_written_header_is_a_multiple_of_8_and_says_the_same(shapes: Any) -> None:
    tensors, place = {}, 0
    for name, shape in shapes.items():
        size = 2
        for axis in shape:
            size *= axis
        tensors[name] = StoredTensor("F16", tuple(shape), place, place + size)
        place += size
    written = header_bytes(tensors)
    assert len(written) % 8 == 0 and struct.unpack("<Q", written[:8]) == (len(written) - 8,)
    held = json.loads(written[8:])
    assert list(held) == list(tensors)
    assert all(held[n] == entry("F16", list(t.shape), t.begin, t.end) for n, t in tensors.items())
