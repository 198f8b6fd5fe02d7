"""`lse-mlx replay`: no difference, the first one, or the field that is refused, with its exit status."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lse_mlx import demo_pair
from lse_mlx.cli.main import app
from tests.checkpoints.gate.sparse_checkpoints import hollow, read_json, write_json
from tests.protocol.corruptions import Files
from tests.tiny_models import save_checkpoint, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A greedy trace of the demo pair."""
    out = tmp_path_factory.mktemp("traces") / "greedy"
    arguments = ["Tell me a story about a clever owl.", "--max-tokens", "16", "--out", str(out)]
    result = CliRunner().invoke(app, ["trace", *arguments, "--hidden", "digest"])
    assert result.exit_code == 0, result.stderr
    return out


def run(folder: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["replay", str(folder), "--model", "demo", *options])


def changed(folder: Path, to: Path, **values: Any) -> Path:
    """The trace with fields of its first step changed, or of all records that have them."""
    files = Files.read(shutil.copytree(folder, to))
    for field, value in values.items():
        records = [r for r in (files.header, *files.steps) if field in r]
        for record in records if field in files.header else records[:1]:
            record[field] = value
    files.write(to)
    return to


def test_a_trace_of_this_target_has_no_difference(folder: Path) -> None:
    result = run(folder)
    assert result.exit_code == 0, result.stderr
    steps = len(Files.read(folder).steps)
    assert result.stdout == f"{steps} steps agree.\n"


def test_json_is_the_whole_report(folder: Path) -> None:
    result = run(folder, "--json")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert said["steps"] == len(Files.read(folder).steps)
    assert (said["first"], said["differences"]) == (None, [])
    assert said["compared"] == "every field"
    assert said["state_compared"] is True


def test_a_difference_is_shown_with_step_field_and_both_values(
    folder: Path, tmp_path: Path
) -> None:
    digest = "0" * 64
    result = run(changed(folder, tmp_path / "trace", target_rows_digest=digest))
    assert result.exit_code == 1
    for word in ("step 1", "target_rows_digest", digest):
        assert word in result.stdout
    assert "error" not in result.stderr
    said = json.loads(run(tmp_path / "trace", "--json").stdout)
    assert said["first"]["field"] == "target_rows_digest"
    assert said["first"]["step"] == 1
    assert said["first"]["recorded"] == digest
    assert said["first"]["native"] == Files.read(folder).steps[0]["target_rows_digest"]


REFUSED = {
    "target_model_revision": "sha256:other",
    "tokenizer_revision": "sha256:other",
    "vocab_size": 5000,
    "layer_count": 12,
    "captured_stage": "norm_output",
    "captured_layer_ids": [1, 3, 5, 6],
    "bonus_token": -1,
    "schema_version": 2,
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_refusal_names_its_field(field: str, folder: Path, tmp_path: Path) -> None:
    result = run(changed(folder, tmp_path / "trace", **{field: REFUSED[field]}), "--json")
    assert result.exit_code == 2
    said = json.loads(result.stdout)
    assert said["refused"] == field
    line = result.stderr.splitlines()[-1]
    assert line == f"error: {said['error']}"
    assert field in line


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [("--owner", "somebody", "request_owner"), ("--generation", "99", "request_generation")],
)
def test_a_trace_of_another_request_is_refused(
    option: str, value: str, field: str, folder: Path
) -> None:
    result = run(folder, option, value)
    assert result.exit_code == 2
    assert field in result.stderr
    assert result.stdout == ""


def test_the_request_it_is_of_is_accepted(folder: Path) -> None:
    header = Files.read(folder).header
    owner, generation = header["request_owner"], str(header["request_generation"])
    assert run(folder, "--owner", owner, "--generation", generation).exit_code == 0


def test_a_drafter_of_other_layers_is_refused(folder: Path, tmp_path: Path) -> None:
    drafter = hollow(demo_pair.DRAFTER, tmp_path / "drafter")
    config = read_json(drafter / "config.json")
    config["dflash_config"]["target_layer_ids"] = [0, 2, 4, 6]
    write_json(drafter / "config.json", config)
    result = run(folder, "--drafter", str(drafter))
    assert result.exit_code == 2
    assert "captured_layer_ids" in result.stderr


def test_another_target_refuses_it(folder: Path, tmp_path: Path) -> None:
    other = save_tokenizer(save_checkpoint(tmp_path / "other"))
    result = CliRunner().invoke(app, ["replay", str(folder), "--model", str(other)])
    assert result.exit_code == 2
    assert "target_model_revision" in result.stderr


def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        result = run(place)
        assert result.exit_code == 2
        [line] = result.stderr.strip().splitlines()
        assert line.startswith("error: ")
        assert "trace.json" in line
