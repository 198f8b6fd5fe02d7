"""A trace on disk: the same bytes for the same trace, and a sentence for every damage."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lse_mlx.errors import ProtocolError
from lse_mlx.protocol.trace import Trace, rows_digest
from lse_mlx.protocol.trace_files import LONGEST_LINE, read_trace, write_trace
from tests.golden.cases import CASES, Case
from tests.golden.generate import FOLDER, trace_of

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The golden trace with routes and payloads, to be damaged."""
    write_trace(tmp_path, trace_of(BY_NAME["routes"]))
    return tmp_path


def refused(folder: Path) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        read_trace(folder)
    message = str(caught.value)
    assert message.startswith(str(folder)) and message.endswith(".") and "\n" not in message
    return caught.value


@pytest.mark.parametrize("case", CASES, ids=BY_NAME)
def test_what_is_written_is_read(case: Case, tmp_path: Path) -> None:
    trace = trace_of(case)
    write_trace(tmp_path, trace)
    again = read_trace(tmp_path)
    assert (again.header, again.steps, again.routes) == (trace.header, trace.steps, trace.routes)
    assert again.payloads.keys() == trace.payloads.keys()
    for name, rows in again.payloads.items():
        assert rows.dtype == np.float32 and np.array_equal(rows, trace.payloads[name])


def test_a_folder_may_be_named_by_text(folder: Path) -> None:
    named, as_path = read_trace(str(folder)), read_trace(folder)
    assert (named.header, named.steps) == (as_path.header, as_path.steps)


def test_the_same_trace_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    trace = trace_of(BY_NAME["routes"])
    write_trace(tmp_path / "one", trace)
    order = dict(sorted(trace.payloads.items(), reverse=True))
    turned = {name: np.asfortranarray(rows) for name, rows in order.items()}
    write_trace(tmp_path / "two", replace(trace, payloads=turned))
    names = sorted(os.listdir(tmp_path / "one"))
    assert names == ["payloads.safetensors", "routes.jsonl", "steps.jsonl", "trace.json"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_only_the_files_that_hold_something_are_written(tmp_path: Path) -> None:
    write_trace(tmp_path, trace_of(BY_NAME["limit"]))
    assert sorted(os.listdir(tmp_path)) == ["steps.jsonl", "trace.json"]


def test_lines_are_sorted_json_without_spaces(folder: Path) -> None:
    for name in ("trace.json", "steps.jsonl", "routes.jsonl"):
        for line in (folder / name).read_text("ascii").splitlines():
            held = json.loads(line)
            assert list(held) == sorted(held)
            assert ": " not in line and ", " not in line


@pytest.mark.parametrize("place", ["missing", "full", "file"])
def test_a_trace_goes_into_an_empty_folder(place: str, tmp_path: Path) -> None:
    folder = tmp_path / place
    if place == "full":
        folder.mkdir()
        (folder / "notes").touch()
    elif place == "file":
        folder.touch()
    with pytest.raises(ProtocolError, match="give an empty folder") as caught:
        write_trace(folder, trace_of(BY_NAME["limit"]))
    assert caught.value.field == "folder"
    assert not folder.is_dir() or os.listdir(folder) == ["notes"]


def test_a_folder_that_fills_up_is_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full_at_the_header(path: Path, content: bytes) -> int:
        write(path, content[: len(content) // 2])
        if path.name == "trace.json":
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full_at_the_header)
    with pytest.raises(ProtocolError, match="No space left on device"):
        write_trace(tmp_path, trace_of(BY_NAME["routes"]))
    assert os.listdir(tmp_path) == []


TEXT_FILES = ["trace.json", "steps.jsonl", "routes.jsonl"]
COUNTED_BY = {
    "trace.json": "trace.json",
    "steps.jsonl": "step_count",
    "routes.jsonl": "route_count",
}
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "no UTF-8": lambda held: held.replace(b"golden", b"gold\xffen", 1),
    "no JSON": lambda held: held.replace(b"{", b"<", 1),
    "another encoding": lambda held: held.decode().encode("utf-16"),
    "a byte order mark": lambda held: b"\xef\xbb\xbf" + held,
    "a list": lambda held: b"[1]\n" + held.split(b"\n", 1)[1],
    "a number": lambda held: b"1\n" + held.split(b"\n", 1)[1],
    "a number without end": lambda held: b"1" * 5000 + b"\n" + held.split(b"\n", 1)[1],
    "very deep": lambda held: b"[" * 100_000 + b"\n" + held.split(b"\n", 1)[1],
    "a blank line first": lambda held: b"\n" + held,
    "cut in the last line": lambda held: held[:-10],
    "cut before the line end": lambda held: held[:-1],
    "NUL": lambda held: b"\0" * len(held),
    "two objects on a line": lambda held: held.replace(b"}\n", b"}{}\n", 1),
}


@pytest.mark.parametrize("name", TEXT_FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_names_file_and_line(folder: Path, name: str, damage: str) -> None:
    held = (folder / name).read_bytes()
    (folder / name).write_bytes(DAMAGE[damage](held))
    line = held.count(b"\n") if damage.startswith("cut") else 1
    error = refused(folder)
    assert f"{name}, line {line}: " in str(error)
    assert error.field == name
    assert ("It is blank" in str(error)) == ("blank" in damage)


@pytest.mark.parametrize("name", TEXT_FILES)
@pytest.mark.parametrize("more", [b"\n", b"{}\n", b" ", b"x"], ids=repr)
def test_lines_too_many_are_counted(folder: Path, name: str, more: bytes) -> None:
    held = (folder / name).read_bytes()
    (folder / name).write_bytes(held + more)
    error = refused(folder)
    assert error.field == COUNTED_BY[name]
    assert f"{name}, line {len(held.splitlines()) + 1}: " in str(error)


@pytest.mark.parametrize("name", TEXT_FILES)
def test_lines_too_few_are_counted(folder: Path, name: str) -> None:
    lines = (folder / name).read_bytes().splitlines(keepends=True)
    (folder / name).write_bytes(b"".join(lines[:-1]))
    error = refused(folder)
    assert error.field == COUNTED_BY[name]
    assert f"{name} ends after {len(lines) - 1} lines" in str(error)


@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_field_twice_in_a_line_is_named(folder: Path, name: str) -> None:
    held = (folder / name).read_bytes()
    (folder / name).write_bytes(held.replace(b"{", b'{"schema_version":1,', 1))
    error = refused(folder)
    assert error.field == "schema_version"
    assert "twice" in str(error) and f"{name}, line 1: " in str(error)


def test_a_line_without_end_is_not_read_to_its_end(folder: Path) -> None:
    with (folder / "steps.jsonl").open("wb") as file:
        file.truncate(LONGEST_LINE + (1 << 40))  # no such memory; a hole takes no room on the disk
    error = refused(folder)
    assert error.field == "steps.jsonl" and "more than" in str(error)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("trace.json", "trace.json"),
        ("steps.jsonl", "steps.jsonl"),
        ("routes.jsonl", "route_count"),
        ("payloads.safetensors", "payloads.safetensors"),
    ],
)
def test_a_missing_file_is_named(folder: Path, name: str, field: str) -> None:
    (folder / name).unlink()
    error = refused(folder)
    assert error.field == field
    assert name in str(error)


@pytest.mark.parametrize("name", [*TEXT_FILES, "payloads.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_named(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink()
    (os.mkfifo if kind == "pipe" else os.mkdir)(folder / name)
    error = refused(folder)
    assert error.field == name and "regular file" in str(error)


def test_no_folder_is_no_trace(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere").field == "trace.json"
    assert refused(tmp_path).field == "trace.json"


def test_routes_that_the_header_does_not_count_are_refused(tmp_path: Path) -> None:
    write_trace(tmp_path, trace_of(BY_NAME["limit"]))
    (tmp_path / "routes.jsonl").write_text("{}\n")
    assert refused(tmp_path).field == "route_count"


def test_payloads_that_no_step_names_are_refused(tmp_path: Path) -> None:
    write_trace(tmp_path, trace_of(BY_NAME["limit"]))
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "payloads.safetensors")
    assert refused(tmp_path).field == "hidden_payload"


SIZE = (FOLDER / "routes" / "payloads.safetensors").stat().st_size


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, SIZE - 1])
def test_payloads_cut_short_are_refused(folder: Path, size: int) -> None:
    path = folder / "payloads.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert refused(folder).field == "payloads.safetensors"


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 64, (1 << 62).to_bytes(8, "little") + b"{}", b"\2" + b"\0" * 7 + b"{}" + b"x" * 9],
    ids=["noise", "a header without end", "a payload of no tensor"],
)
def test_payloads_of_no_sense_are_refused(folder: Path, content: bytes) -> None:
    (folder / "payloads.safetensors").write_bytes(content)
    assert refused(folder).field in ("payloads.safetensors", "hidden_payload")


@pytest.mark.parametrize("byte", range(8, SIZE, 3))
def test_no_changed_byte_of_the_payloads_goes_through(folder: Path, byte: int) -> None:
    path = folder / "payloads.safetensors"
    held = bytearray(path.read_bytes())
    held[byte] ^= 1
    path.write_bytes(held)
    try:
        again = read_trace(folder)
    except ProtocolError:
        return
    # Only what the header says beside the tensors may differ, and there is nothing of that.
    whole = trace_of(BY_NAME["routes"]).payloads
    assert {n: r.tolist() for n, r in again.payloads.items()} == {
        n: r.tolist() for n, r in whole.items()
    }


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.uint8])
def test_payloads_of_another_type_are_refused_before_they_are_loaded(
    folder: Path, dtype: type
) -> None:
    path = folder / "payloads.safetensors"
    held = {name: rows.astype(dtype) for name, rows in load_file(path).items()}
    save_file(held, path)
    error = refused(folder)
    assert error.field == "hidden_payload"
    assert "steps.jsonl, line 1: " in str(error)


def test_a_target_of_which_nothing_is_captured_has_rows_without_width(tmp_path: Path) -> None:
    trace = trace_of(BY_NAME["limit"])
    empty = np.zeros((3, 0), np.float32)
    header = replace(trace.header, captured_layer_ids=(), drafter=None)
    [step] = trace.steps
    step = replace(
        step,
        captured_layer_ids=(),
        hidden_shape=(3, 0),
        hidden_digest=rows_digest(empty),
        hidden_payload="nothing",
    )
    write_trace(tmp_path, Trace(header, (step,), (), {"nothing": empty}))
    again = read_trace(tmp_path)
    assert again.steps == (step,)
    assert again.payloads["nothing"].shape == (3, 0)


def test_a_step_alone_is_a_record(folder: Path) -> None:
    """Whoever wants no more than the steps can read them one by one."""
    trace = read_trace(folder)
    lines = (folder / "steps.jsonl").read_text().splitlines()
    assert [type(trace.steps[0]).from_dict(json.loads(line)) for line in lines] == [*trace.steps]


def test_a_trace_is_checked_when_it_is_made() -> None:
    trace = trace_of(BY_NAME["greedy"])
    with pytest.raises(ProtocolError) as caught:
        Trace(trace.header, trace.steps[1:], (), trace.payloads)
    assert caught.value.field == "step_count"
