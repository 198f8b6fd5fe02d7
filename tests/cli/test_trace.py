"""`lse-mlx trace`: a folder that holds what was said, and one sentence for whatever cannot be done."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lse_mlx.cli.main import app
from lse_mlx.protocol.trace_files import read_trace

PROMPT = "Write a story about a shy fox."


def run(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, ["trace", *arguments], input=stdin)


def assert_one_sentence(result: Any, *words: str, status: int = 2) -> None:
    assert result.exit_code == status
    assert result.stdout == ""
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def test_it_says_what_generate_says_and_where_the_trace_is(tmp_path: Path) -> None:
    out = tmp_path / "new" / "trace"
    result = run(PROMPT, "--out", str(out), "--max-tokens", "12")
    assert result.exit_code == 0, result.stderr
    said = CliRunner().invoke(app, ["generate", PROMPT, "--max-tokens", "12"])
    assert result.stdout == said.stdout
    assert result.stderr.splitlines()[-1].startswith("12 tokens, ")
    assert str(out) in result.stderr
    names = {path.name for path in out.iterdir()}
    assert names == {"trace.json", "steps.jsonl", "payloads.safetensors"}


def test_json_is_one_object_that_agrees_with_the_trace(tmp_path: Path) -> None:
    out = tmp_path / "trace"
    result = run(
        PROMPT, "--out", str(out), "--max-tokens", "10", "--hidden", "digest",
        "--temperature", "0.8", "--top-p", "0.9", "--seed", "5", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    trace = read_trace(out)
    assert said["token_ids"] == trace.tokens
    assert said["steps"] == len(trace.steps)
    assert said["seed"] == trace.header.seed == 5
    assert said["target_model_revision"] == trace.header.target_model_revision
    assert (trace.header.temperature, trace.header.top_p) == (0.8, 0.9)
    assert trace.payloads == {}


def test_the_target_alone_can_be_traced(tmp_path: Path) -> None:
    result = run(PROMPT, "--out", str(tmp_path / "trace"), "--max-tokens", "4", "--no-drafter")
    assert result.exit_code == 0
    assert read_trace(tmp_path / "trace").header.drafter is None


def test_a_prompt_comes_from_standard_input(tmp_path: Path) -> None:
    for name, typed in (("a", PROMPT), ("b", f"{PROMPT}\n")):
        run("-", "--out", str(tmp_path / name), "--max-tokens", "2", stdin=typed)
    one, another = (read_trace(tmp_path / name).header.prompt_token_ids for name in "ab")
    assert one == another


REFUSED = {
    "another kind of hidden": (["--hidden", "everything"], ["'everything'", "payload"]),
    "no tokens": (["--max-tokens", "0"], ["max_tokens", "0"]),
    "a negative temperature": (["--temperature", "-1"], ["temperature"]),
    "a negative seed": (["--seed", "-3"], ["seed"]),
    "a drafter and none": (["--drafter", "demo", "--no-drafter"], ["contradict"]),
    "a model that is not there": (["--model", "/nowhere"], ["/nowhere"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_asked_wrongly_makes_no_folder(case: str, tmp_path: Path) -> None:
    options, words = REFUSED[case]
    out = tmp_path / "trace"
    # With a model named, nothing else is said on standard error.
    named = [] if "--model" in options else ["--model", "demo"]
    assert_one_sentence(run(PROMPT, "--out", str(out), *named, *options), *words)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    assert_one_sentence(run(" ", "--out", str(tmp_path / "trace"), "--model", "demo"), "empty")


def test_a_place_that_is_taken_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    result = run(PROMPT, "--out", str(tmp_path / "trace"), "--model", "/nowhere")
    assert_one_sentence(result, "exists already", "another place")


def test_a_place_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(PROMPT, "--out", str(tmp_path / "file" / "trace"), "--model", "demo")
    assert_one_sentence(result, "No folder can be made")
