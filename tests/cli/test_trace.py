"""`lse-mlx trace`: a folder that holds what was said, and one sentence for whatever cannot be done."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

from lse_mlx.cli.main import app
from lse_mlx.protocol.trace_files import read_trace
from lse_mlx.routes.store import StoreCosts
from tests.routes.slow_store import SlowPass, SlowStore
from tests.tiny_models import load_tiny, on_cpu, save_checkpoint, save_words

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


# A mixture of experts

WORDS = "t9 t41 t17 t80 t33"
LAYERS, EXPERTS = 5, 12


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("mixture") / "target", "moe-q4")
    save_words(folder)
    return folder


def traced(mixture: Path, out: Path, *options: str) -> Any:
    return run(
        WORDS, "--raw", "--model", str(mixture), "--no-drafter", "--max-tokens", "14",
        "--out", str(out), *options,
    )  # fmt: skip


def expert_bytes(folder: Path) -> int:
    """Of one expert, as the file holds it; every layer's are as large."""
    weights: Any = mx.load(str(folder / "model.safetensors"))
    held = sum(w.nbytes for name, w in weights.items() if ".switch_mlp." in name)
    return held // (LAYERS * EXPERTS)


def slow_run(mixture: Path, out: Path, costs: StoreCosts) -> SlowStore:
    """What is in the folder, run through the slow store of the tests, a row a pass."""
    trace = read_trace(out)
    prompt = list(trace.header.prompt_token_ids)
    with on_cpu():  # what a prediction of the first pass knows
        target = load_tiny(mixture)
        read = target.advance(prompt, target.new_state(), ()).routes
        last = {layer: tuple(np.array(chosen)[-1].tolist()) for layer, chosen in read.items()}
    slow = SlowStore(costs, expert_bytes(mixture), LAYERS)
    for step in trace.steps:
        at = step.sequence_position
        routes = {
            r.target_route_layer: r.target_expert_ids_in_native_rank_order
            for r in trace.routes
            if r.sequence_position == at
        }
        guesses = [(layer, at, last[layer]) for layer in range(LAYERS)]
        slow.run(SlowPass(at, 1, {k: [list(chosen)] for k, chosen in routes.items()}, guesses))
        last = routes
    slow.finish()
    return slow


@pytest.mark.parametrize(
    ("options", "costs"),
    [
        ([], StoreCosts()),
        (
            ["--store-bandwidth", "2", "--store-latency", "5", "--store-cache", "0"],
            StoreCosts(bytes_per_us=2, latency_us=5, cache_bytes=0),
        ),
    ],
    ids=["default store", "slow store"],
)
def test_predicted_experts_are_recorded_and_reported(
    options: list[str], costs: StoreCosts, mixture: Path, tmp_path: Path
) -> None:
    plain = json.loads(traced(mixture, tmp_path / "plain", "--json").stdout)
    result = traced(mixture, tmp_path / "trace", "--predict", "previous", "--json", *options)
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["token_ids"] == plain["token_ids"]
    assert plain["predictions"] is None
    assert said["steps"] > 5 and said["routes"] == plain["routes"] == LAYERS * said["steps"]

    slow = slow_run(mixture, tmp_path / "trace", costs)
    told = said["predictions"]
    hits, native = (sum(held[i] for held in slow.recall.values()) for i in (1, 0))
    assert told["recall"] == hits / native
    assert told["recall_by_layer"] == {str(k): h / n for k, (n, h) in slow.recall.items()}
    assert told["passes"] == told["committed_rows"] == said["steps"]
    assert told["bytes_early"] == slow.bytes_early
    assert told["bytes_used"] == slow.bytes_used
    assert told["bytes_wasted"] == slow.bytes_wasted
    assert told["bytes_on_demand"] == slow.bytes_on_demand > 0
    assert told["bytes_demanded"] == slow.bytes_demanded
    assert told["exposed_wait_ms"] == slow.waited / 1000
    assert told["tickets"] == slow.tickets()
    trace = read_trace(tmp_path / "trace")
    ticketed = {
        (r.sequence_position, r.target_route_layer)
        for r in trace.routes
        if r.prefetch_ticket_owner == said["request_owner"]
    }
    assert ticketed == slow.ticketed
    assert all(len(r.predicted_expert_ids) == 3 for r in trace.routes)


def test_a_report_is_one_line_for_people(mixture: Path, tmp_path: Path) -> None:
    result = traced(mixture, tmp_path / "trace", "--predict", "previous")
    assert result.exit_code == 0, result.stderr
    line = result.stderr.splitlines()[-1]
    for word in (
        "% of ",
        "choices predicted",
        "used and",
        "wasted",
        "on demand",
        "waiting",
        "tickets",
    ):
        assert word in line


def test_a_trace_with_predictions_replays(mixture: Path, tmp_path: Path) -> None:
    traced(mixture, tmp_path / "trace", "--predict", "previous")
    arguments = ["replay", str(tmp_path / "trace"), "--model", str(mixture), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


REFUSED = {
    "predictions for a dense target": (["--predict", "previous"], ["mixture", "leave it out"]),
    "another predictor": (["--predict", "oracle"], ["'oracle'", "'previous'"]),
    "a store for no predictions": (["--store-cache", "3"], ["--store-cache", "--predict"]),
    "a store without a link": (
        ["--predict", "previous", "--store-bandwidth", "0"],
        ["--store-bandwidth", "0", "1"],
    ),
    "a store that gives before it is asked": (
        ["--predict", "previous", "--store-latency", "-1"],
        ["--store-latency", "-1"],
    ),
    "another kind of hidden": (["--hidden", "everything"], ["'everything'", "payload"]),
    "no tokens": (["--max-tokens", "0"], ["--max-tokens", "0"]),
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
