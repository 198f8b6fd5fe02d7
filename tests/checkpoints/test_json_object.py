"""JSON objects in files: read, or refused in one sentence whatever the file holds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lse_mlx.checkpoints.json_object import (
    DEEPEST,
    json_object_or_none,
    json_text,
    read_json_object,
)
from lse_mlx.checkpoints.safetensors_header import read_header
from lse_mlx.errors import CheckpointError


def nested(levels: int) -> bytes:
    """An object that holds lists within lists, `levels` of both together."""
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_an_object_is_read_with_its_order(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"b": 1, "a": [1.5, null]}')
    held = read_json_object(tmp_path / "x.json")
    assert list(held.items()) == [("b", 1), ("a", [1.5, None])]


def test_what_is_nested_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(nested(DEEPEST))
    assert read_json_object(path)
    path.write_bytes(nested(DEEPEST + 1))
    with pytest.raises(CheckpointError, match=f"nests its values more than {DEEPEST} deep"):
        read_json_object(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"[" * 100_000,
        b"\xff\xfe\x00",
        b'{"a": 1' + b"0" * 5000,
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
    ],
)
def test_what_is_no_object_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert json_object_or_none(path) is None
    with pytest.raises(CheckpointError) as refusal:
        read_json_object(path, "try another")
    message = str(refusal.value)
    assert message.startswith(f"{path} ")
    assert message.endswith(": try another.")
    assert "\n" not in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        assert json_object_or_none(path) is None
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_json_object(path)


@pytest.mark.parametrize("read", [read_json_object, read_header])
def test_what_is_no_regular_file_is_not_waited_for(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "x"
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"x cannot be read \(not a regular file\)"):
        read(path)


def test_text_is_indented_ascii() -> None:
    assert json_text({"ä": [1, {}], "b": []}) == (
        '{\n  "\\u00e4": [\n    1,\n    {}\n  ],\n  "b": []\n}\n'
    )
