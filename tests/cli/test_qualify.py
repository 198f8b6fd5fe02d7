"""`lse-mlx qualify`: the demo pair climbs every rung that a CPU has; what fails is said, with its status."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lse_mlx import demo_pair
from lse_mlx.cli import qualify as command
from lse_mlx.cli.main import app
from lse_mlx.qualify.ladder import Report
from lse_mlx.qualify.rung import Outcome
from tests.checkpoints.gate.sparse_checkpoints import hollow, read_json, write_json
from tests.tiny_models import save_checkpoint, save_tokenizer


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["qualify", *arguments], env={"COLUMNS": "120"})


def refusal(result: Any) -> str:
    """The one sentence on standard error."""
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture(scope="module")
def demo() -> Any:
    return run("--model", "demo", "--json")


def test_the_demo_pair_passes_every_rung_that_runs_here(demo: Any) -> None:
    assert demo.exit_code == 0, demo.stdout
    said = json.loads(demo.stdout)
    assert said["qualified"] is True
    assert [(rung["name"], rung["status"]) for rung in said["rungs"]] == [
        ("gate", "passed"),
        ("schema validation", "passed"),
        ("golden replay", "passed"),
        ("held-out acceptance", "passed"),
        ("greedy equality", "passed"),
        ("sampling distribution", "passed"),
        ("target-specific training", "not run"),
        ("bytes per accepted token", "not run"),
        ("exposed storage wait", "not run"),
        ("latency on the target hardware", "not run"),
    ]
    assert all(rung["criterion"] and rung["says"] for rung in said["rungs"])


def test_its_figures_stand_behind_it(demo: Any) -> None:
    figures = {rung["name"]: rung["figures"] for rung in json.loads(demo.stdout)["rungs"]}
    assert figures["golden replay"]["changes"] == 12
    assert figures["held-out acceptance"]["prompts"] == 12
    assert figures["greedy equality"]["exact"] is True
    assert all(one["p"] > 0.001 for one in figures["sampling distribution"]["settings"])


def test_progress_goes_to_standard_error(demo: Any) -> None:
    assert 'check="sampling distribution"' in demo.stderr


def test_a_refused_drafter_fails_and_later_rungs_are_not_reached(tmp_path: Path) -> None:
    drafter = hollow(demo_pair.DRAFTER, tmp_path / "drafter")
    config = read_json(drafter / "config.json")
    write_json(drafter / "config.json", config | {"vocab_size": 4095})
    result = run("--model", "demo", "--drafter", str(drafter))
    assert result.exit_code == 1
    lines = [line.split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    cells = {line[1].strip(): line[2].strip() for line in lines if line[1].strip()}
    assert cells["gate"] == "failed"
    assert cells["schema validation"] == cells["latency on the target hardware"] == "not reached"
    assert "vocab_size" in result.stdout


def test_a_drafter_that_breaks_fails_and_nothing_takes_its_place(broken_drafter: Path) -> None:
    result = run("--model", "demo", "--drafter", str(broken_drafter), "--json")
    assert result.exit_code == 1
    first, *others = json.loads(result.stdout)["rungs"]
    assert (first["name"], first["status"]) == ("gate", "failed")
    assert "check the drafter's weights" in first["says"]
    assert {rung["status"] for rung in others} == {"not reached"}


def test_a_target_without_a_drafter_has_nothing_to_qualify(tmp_path: Path) -> None:
    target = save_tokenizer(save_checkpoint(tmp_path / "target", "qwen3"))
    assert "--drafter" in refusal(run("--model", str(target)))


def test_a_file_without_prompts_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("\n")
    said = refusal(run("--model", "/nowhere", "--prompts", str(tmp_path / "prompts")))
    assert "holds no prompt" in said


def test_a_missing_model_is_refused() -> None:
    assert "/nowhere" in refusal(run("--model", "/nowhere"))


def test_the_table_says_why_and_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(command, "Console", lambda **options: Console(file=shown, width=100))
    outcomes = (
        Outcome("gate", "it fits", "passed", "all of it"),
        Outcome("equality", "nothing changes", "failed", "Token 3 differs."),
        Outcome("latency", "it is fast", "not reached", "equality failed"),
    )
    command.show(Report("target", "drafter", outcomes, 1.5))
    text = shown.getvalue()
    assert "equality failed: Token 3 differs." in text
    assert "1 passed, 1 failed, 1 not reached, in 1.5 s; --json has each criterion" in text
    assert "It holds where nothing changes." in text
