"""Results of races on disk: read back as written, and redone where a file is not ours or broken."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lse_mlx.kernels import skinny_qmm
from lse_mlx.kernels.kernel_text import kernel_folder
from lse_mlx.kernels.race import RaceResult
from lse_mlx.kernels.winners import WinnersFile, kernels_hash, this_device

DEVICE = {"chip": "Apple M4 Pro", "system": "macOS 26.2", "mlx": "0.32.4", "kernels": "ab"}
RESULTS = [
    RaceResult(
        "topk", "7x248320, 16", "chunks", {"stock": 900.5, "chunks": 40.25}, {"chunks": 0.0}
    ),
    RaceResult("topk", "1x64, 4", "stock", {"stock": 3.0}, {}, {"chunks": "differs from stock"}),
]


@pytest.fixture
def file(tmp_path: Path) -> WinnersFile:
    return WinnersFile(tmp_path / "lse-mlx" / "kernels", DEVICE)


def test_results_come_back_as_they_were(file: WinnersFile):
    assert file.read() == ({}, "")
    assert file.write(RESULTS) == ""
    found, fault = file.read()
    assert fault == ""
    assert list(found.values()) == RESULTS
    assert list(found) == ["topk 7x248320, 16", "topk 1x64, 4"]
    assert [path.name for path in file.folder.iterdir()] == [file.path.name]


@pytest.mark.parametrize("part", list(DEVICE))
def test_another_device_has_another_file(file: WinnersFile, part: str):
    other = replace(file, device=DEVICE | {part: "another"})
    file.write(RESULTS)
    assert other.path != file.path
    assert other.read() == ({}, "")


def test_a_file_of_another_device_is_not_used(file: WinnersFile):
    other = replace(file, device=DEVICE | {"chip": "Apple M1"})
    other.write(RESULTS)
    other.path.replace(file.path)
    found, fault = file.read()
    assert found == {}
    assert "another device" in fault


def _stored(change: dict) -> str:
    entry = RESULTS[0].as_dict()
    return json.dumps({"device": DEVICE, "races": [entry | change]})


HUGE = "1" + 400 * "0"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"device":' * 100_000,
        _stored({"microseconds": {"stock": 77}}).replace("77", HUGE),
        _stored({"errors": {"chunks": 77}}).replace("77", HUGE),
        _stored({"microseconds": {"stock": 900.5, "chunks": float("nan")}}),
        _stored({"microseconds": {"stock": 900.5, "chunks": float("inf")}}),
        _stored({"microseconds": {"stock": 900.5, "chunks": -1.0}}),
        _stored({"microseconds": {"stock": 900.5, "chunks": 0}}),
        _stored({"microseconds": {"stock": 900.5, "chunks": True}}),
        _stored({"microseconds": {"stock": 900.5, "chunks": "1"}}),
        _stored({"microseconds": {"stock": 900.5, "chunks": None}}),
        _stored({"errors": {"chunks": -1}}),
        _stored({"errors": {"chunks": float("nan")}}),
        _stored({"errors": {"chunks": False}}),
        _stored({"errors": []}),
        _stored({"refused": {"other": 3}}),
        _stored({"refused": {"stock": "wrong"}}),
        _stored({"shape": 3}),
        "{",
        "[]",
        json.dumps({"device": DEVICE}),
        json.dumps({"device": DEVICE, "races": 3}),
        json.dumps({"device": DEVICE, "races": [3]}),
        json.dumps({"device": DEVICE, "races": [{}]}),
        _stored({"winner": "faster"}),
        _stored({"winner": 3}),
        _stored({"refused": {"chunks": "wrong"}}),
        _stored({"microseconds": {"stock": "fast"}}),
        _stored({"microseconds": None}),
    ],
)
def test_a_damaged_file_is_not_used_and_is_written_anew(file: WinnersFile, text: str):
    file.write(RESULTS)
    file.path.write_text(text, "utf-8")
    found, fault = file.read()
    assert found == {}
    assert str(file.path) in fault
    assert file.write(RESULTS) == ""
    assert len(file.read()[0]) == 2


def test_what_another_process_wrote_meanwhile_stays(file: WinnersFile):
    """Both had read before either wrote."""
    first, second = replace(file), replace(file)
    assert first.read() == second.read() == ({}, "")
    assert first.write(RESULTS[:1]) == second.write(RESULTS[1:]) == ""
    assert list(file.read()[0].values()) == RESULTS
    newer = replace(RESULTS[0], microseconds={"stock": 800.5, "chunks": 30.0})
    assert file.write([newer]) == ""
    assert list(file.read()[0].values()) == [newer, RESULTS[1]]


def test_an_error_that_is_not_finite_is_null_in_the_file(file: WinnersFile):
    result = replace(RESULTS[1], errors={"chunks": float("inf")})
    file.write([result])
    [entry] = json.loads(file.path.read_text("utf-8"), parse_constant=pytest.fail)["races"]
    assert entry["errors"] == {"chunks": None}
    assert list(file.read()[0].values()) == [result]


def test_bytes_that_are_no_text_are_not_used(file: WinnersFile):
    file.write(RESULTS)
    file.path.write_bytes(b"\xff\xfe\x00")
    assert file.read()[0] == {}


def test_a_place_that_cannot_be_written_is_said(file: WinnersFile):
    file.folder.parent.parent.mkdir(parents=True, exist_ok=True)
    file.folder.parent.write_text("a file where a folder should be")
    assert "cannot be written" in file.write(RESULTS)


def test_this_device_is_named_without_a_path():
    device = this_device()
    assert device.keys() == {"chip", "architecture", "system", "mlx", "kernels"}
    assert all(isinstance(value, str) for value in device.values())
    assert not any("/" in value for name, value in device.items() if name != "chip")


def test_the_hash_is_of_names_and_texts(tmp_path: Path):
    (tmp_path / "a.metal").write_text("one")
    (tmp_path / "b.h").write_text("two")
    before = kernels_hash(tmp_path)
    (tmp_path / "README.md").write_text("no kernel")
    assert kernels_hash(tmp_path) == before
    (tmp_path / "b.h").write_text("three")
    assert kernels_hash(tmp_path) != before
    (tmp_path / "b.h").write_text("two")
    (tmp_path / "b.h").rename(tmp_path / "c.h")
    assert kernels_hash(tmp_path) != before
    before = kernels_hash(tmp_path)
    (tmp_path / "launch.py").write_text("split = 8")
    assert kernels_hash(tmp_path) != before, "what launches a kernel decides how fast it is"
    assert kernels_hash(tmp_path) != kernels_hash(tmp_path, tmp_path)


def test_a_device_is_named_with_the_code_that_launches_kernels():
    launching = Path(skinny_qmm.__file__).parent
    assert this_device()["kernels"] == kernels_hash(kernel_folder(), launching)
    assert len(this_device()["kernels"]) == 64
