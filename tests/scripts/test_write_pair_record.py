"""The script writes the record of a pair, and one sentence where it cannot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.gate.gate import check_pair
from tests.checkpoints.gate.sparse_checkpoints import hollow_demo, read_json

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_pair_record.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_it_writes_the_record_beside_the_drafter(tmp_path: Path) -> None:
    target, drafter = hollow_demo(tmp_path)
    done = run("mine", target, drafter)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote {drafter / 'pair.json'}\n"
    record = read_json(drafter / "pair.json")
    assert record["name"] == "mine"
    assert record["targets"] == [target.name]
    shipped = read_json(demo_pair.TARGET.parent / "pair.json")
    assert record["target"] == shipped["target"]
    assert record["drafter"]["config"] == shipped["drafter"]["config"]
    assert record["drafter"]["sha256"] != shipped["drafter"]["sha256"], "its weights are a hole"
    assert check_pair(target, drafter)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mine", "TARGET", "TARGET"), "is no DFlash2 drafter but a language model"),
        (("mine", "DRAFTER", "DRAFTER"), "is a DFlash2 drafter: name it as the drafter"),
        (("My Pair", "TARGET", "DRAFTER"), "'My Pair'"),
        (("mine", "none", "DRAFTER"), "has no config.json"),
    ],
)
def test_what_cannot_be_recorded_is_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    target, drafter = hollow_demo(tmp_path)
    places = {"TARGET": target, "DRAFTER": drafter, "none": tmp_path / "none"}
    done = run(*(places.get(argument, argument) for argument in arguments))
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not (drafter / "pair.json").exists()


def test_a_name_alone_is_not_enough() -> None:
    done = run("mine")
    assert done.returncode == 2
    assert "give NAME TARGET DRAFTER" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_read_only_folder_is_one_sentence(tmp_path: Path) -> None:
    target, drafter = hollow_demo(tmp_path)
    (drafter / "pair.json").mkdir()
    done = run("mine", target, drafter)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert json.dumps(done.stderr).count("\\n") == 1
