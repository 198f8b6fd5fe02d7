"""`lse-mlx demo`: the comparison that a newcomer sees first."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lse_mlx.cli.demo import _table, built_in_prompts
from lse_mlx.cli.main import app
from tests.tiny_models import save_checkpoint, save_tokenizer


@pytest.fixture(scope="module")
def report() -> dict:
    result = CliRunner().invoke(app, ["demo", "--max-tokens", "16", "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_built_in_prompts_are_twelve_different_ones(report: dict):
    prompts = [entry["prompt"] for entry in report["replies"]]
    assert prompts == built_in_prompts()
    assert len(set(prompts)) == 12


def test_both_ways_emit_the_same_tokens(report: dict):
    assert report["identical"] is True
    assert all(entry["identical"] for entry in report["replies"])


def test_the_report_holds_the_figures_and_they_agree(report: dict):
    assert report["ratio"] == pytest.approx(
        report["speculative_tokens_per_second"] / report["plain_tokens_per_second"]
    )
    assert 1 <= report["tokens_per_pass"] <= 8
    assert len(report["acceptance_by_position"]) == 7
    assert report["mlx_lm_tokens_per_second"] > 0
    assert report["mlx_lm_fp32_tokens_per_second"] > 0
    assert report["tokens"] == sum(entry["tokens"] for entry in report["replies"])


def test_a_rate_that_was_not_measured_is_shown_as_such(report: dict):
    """Weights in fp32 are tried on a CPU only: elsewhere a large model would not fit."""
    shown = Console(file=io.StringIO(), width=100)
    shown.print(_table(report | {"mlx_lm_fp32_tokens_per_second": None}))
    [line] = [x for x in shown.file.getvalue().splitlines() if "fp32" in x]
    assert line.split("│")[2].strip() == "-"


def test_on_a_terminal_it_shows_the_reply_and_the_ratio():
    result = CliRunner().invoke(
        app, ["demo", "--prompt", "Tell me about the moon.", "--max-tokens", "8"]
    )
    assert result.exit_code == 0
    assert result.stdout.strip()
    assert "> Tell me about the moon." in result.stdout
    assert "times as fast" in result.stdout
    assert "the same tokens" in result.stdout
    assert "times as fast" not in result.stderr


def test_a_target_without_a_drafter_has_nothing_to_compare(tmp_path: Path):
    target = save_tokenizer(save_checkpoint(tmp_path / "target", "qwen3"))
    result = CliRunner().invoke(app, ["demo", "--model", str(target)])
    assert result.exit_code == 2
    assert "drafter" in result.stderr


def test_a_drafter_that_breaks_is_no_comparison(broken_drafter: Path):
    """Without it the texts would be the same, which is what is asked."""
    options = ["--prompt", "Tell me about the moon.", "--max-tokens", "8", "--json"]
    result = CliRunner().invoke(app, ["demo", "--drafter", str(broken_drafter), *options])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_a_limit_that_leaves_no_token_is_named_as_the_option():
    result = CliRunner().invoke(app, ["demo", "--max-tokens", "0"])
    assert result.exit_code == 2
    assert result.stderr == "error: --max-tokens is 0: give a count of at least 1.\n"


def test_one_prompt_is_one_prompt(report: dict):
    shown = Console(file=io.StringIO(), width=100)
    shown.print(_table(report), _table(report | {"prompts": 1}))
    text = shown.file.getvalue()
    assert "12 prompts, greedy" in text and " 1 prompt, greedy" in text
