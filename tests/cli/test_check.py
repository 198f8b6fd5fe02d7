"""`lse-mlx check`: a table or one JSON object, and an exit status that a script can use."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lse_mlx import demo_pair
from lse_mlx.cli.main import app
from tests.checkpoints.gate.sparse_checkpoints import (
    ROWS,
    WIDTH,
    bytes_read,
    hollow,
    read_json,
    write_json,
    write_sparse,
)
from tests.checkpoints.hub.fake_hub import FakeHub, checkpoint, serving
from tests.tiny_models import save_checkpoint, save_tokenizer

SIDES = ("--model", "demo", "--drafter")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "120"})


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """The demo drafter without its weights."""
    return hollow(demo_pair.DRAFTER, tmp_path / "drafter")


def change(folder: Path, **changes: Any) -> None:
    write_json(folder / "config.json", read_json(folder / "config.json") | changes)


def refusal(result: Any) -> str:
    """The one sentence on standard error."""
    assert result.exit_code == 2
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert line.endswith(".")
    return line


def rows(result: Any) -> list[list[str]]:
    """The cells of the table, a list a row, without the title."""
    lines = [line for line in result.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


@pytest.mark.parametrize("chosen", [("--drafter", "demo"), ()])
def test_the_demo_pair_is_accepted_with_a_table(chosen: tuple[str, ...]) -> None:
    result = run("--model", "demo", *chosen)
    assert result.exit_code == 0
    assert ["hidden_size", f"{WIDTH}", f"{WIDTH}", "holds"] in rows(result)
    tensors = len(read_header(demo_pair.DRAFTER / "model.safetensors"))
    assert rows(result).count([f"{tensors} tensors", "all", "as asked for", "holds"]) == 1
    assert all(row[3] == "holds" for row in rows(result))
    assert result.stdout.splitlines()[-1] == "The drafter belongs to this target."


def read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        held = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry for name, entry in held.items() if name != "__metadata__"}


def test_json_is_one_object_with_every_field(drafter: Path) -> None:
    result = run(*SIDES, str(drafter), "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    said = json.loads(result.stdout)
    assert said["accepted"] is True
    assert said["mismatches"] == said["notes"] == []
    held = {check["field"]: check for check in said["checks"]}
    assert held["embedding"]["drafter"] == held["embedding"]["target"] == [ROWS, WIDTH]


def test_a_refusal_shows_both_sides_in_the_table(drafter: Path) -> None:
    trained = read_json(drafter / "config.json")["rms_norm_eps"]
    change(drafter, hidden_size=2 * WIDTH, rms_norm_eps=0.5, extra="[bold]x[/bold]")
    result = run(*SIDES, str(drafter))
    message = refusal(result)
    for row in (
        ["hidden_size", f"{2 * WIDTH}", f"{WIDTH}", "MISMATCH"],
        ["rms_norm_eps", "0.5", f"{trained}", "MISMATCH"],
        ["extra", "[bold]x[/bold]", "nothing", "MISMATCH"],
        ["tensor norm.weight", f"BF16 [{WIDTH}]", f"BF16 [{2 * WIDTH}]", "MISMATCH"],
    ):
        assert row in rows(result)
    assert f"hidden_size = {2 * WIDTH}, but the target has {WIDTH}" in message
    assert "belongs to this target" not in result.stdout


def test_json_holds_no_numbers_that_json_has_not(drafter: Path) -> None:
    def refuse(number: str) -> None:
        raise AssertionError(f"{number} is no JSON")

    change(drafter, rms_norm_eps=float("nan"), extra=[float("-inf")])
    said = json.loads(run(*SIDES, str(drafter), "--json").stdout, parse_constant=refuse)
    found = {one["field"]: one for one in said["mismatches"]}
    assert found["extra"]["drafter_text"] == "[-inf]"


def test_a_refusal_in_json(drafter: Path) -> None:
    change(drafter, vocab_size=ROWS + 8, rms_norm_eps=0.5)
    result = run(*SIDES, str(drafter), "--json")
    assert f"vocab_size = {ROWS + 8}, but the target has {ROWS}" in refusal(result)
    said = json.loads(result.stdout)
    assert said["accepted"] is False
    found = {one["field"]: one for one in said["mismatches"]}
    assert (found["vocab_size"]["drafter"], found["vocab_size"]["target"]) == (ROWS + 8, ROWS)
    assert found["rms_norm_eps"]["says"] == "the record of demo has"


def test_the_flag_lets_another_revision_pass_and_shows_it(tmp_path: Path) -> None:
    cache = tmp_path / "models--me--drafter" / "snapshots"
    drafter = hollow(demo_pair.DRAFTER, cache / ("b" * 40))
    record = read_json(demo_pair.TARGET.parent / "pair.json")
    record["drafter"] |= {"repository": "me/drafter", "revision": "c" * 40}
    write_json(drafter / "pair.json", record)
    refused = run(*SIDES, str(drafter))
    assert f"drafter revision = '{'b' * 40}', but the record of demo has '{'c' * 40}'" in refusal(
        refused
    )
    assert "another revision" in refused.stdout
    allowed = run(*SIDES, str(drafter), "--allow-revision-mismatch")
    assert allowed.exit_code == 0
    assert "another revision, allowed" in " ".join(allowed.stdout.split())
    as_json = json.loads(run(*SIDES, str(drafter), "--allow-revision-mismatch", "--json").stdout)
    assert as_json["accepted"] is True
    assert [one["field"] for one in as_json["mismatches"]] == ["drafter revision"]


@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize("kind", ["dflash1", "mtp", "qwen", "empty", "missing"])
def test_what_is_no_drafter_is_one_sentence(
    tmp_path: Path, kind: str, as_json: tuple[str, ...]
) -> None:
    folder = tmp_path / "found"
    named = {"dflash1": "DFlashDraftModel", "mtp": "Qwen3_5MTP", "qwen": "Qwen3ForCausalLM"}
    if kind != "missing":
        folder.mkdir()
    if kind in ("dflash1", "mtp", "qwen"):
        shutil.copy(demo_pair.DRAFTER / "config.json", folder)
        write_sparse(folder / "model.safetensors", {"mtp.fc.weight": ("BF16", [4, 4])})
        change(folder, architectures=[named[kind]])
    result = run(*SIDES, str(folder), *as_json)
    message = refusal(result)
    assert str(folder) in message
    if kind in ("dflash1", "mtp", "qwen"):
        assert named[kind] in message
    if as_json:
        assert json.loads(result.stdout) == {
            "accepted": False,
            "error": message.removeprefix("error: "),
        }


def test_a_target_without_a_registered_drafter_asks_for_one(tmp_path: Path) -> None:
    target = str(save_tokenizer(save_checkpoint(tmp_path / "some-target", "qwen3")))
    result = run("--model", target)
    message = refusal(result)
    assert "give one with --drafter" in message
    said = json.loads(run("--model", target, "--json").stdout)
    assert said == {"accepted": False, "error": message.removeprefix("error: ")}


@pytest.mark.parametrize("side", ["--model", "--drafter"])
def test_nothing_is_downloaded(tmp_path: Path, side: str) -> None:
    """The hub has the checkpoint and would give it, but it is not asked."""
    sides = {"--model": "demo", "--drafter": "demo", side: "org/tiny"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LSE_"))}
    with serving(FakeHub(checkpoint())) as hub:
        result = subprocess.run(
            [sys.executable, "-m", "lse_mlx", "check", *itertools.chain(*sides.items())],
            capture_output=True,
            text=True,
            env=kept
            | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.endpoint, "NO_PROXY": "127.0.0.1"},
        )
        assert hub.requests == []
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: org/tiny is not in the cache")
    assert "run `lse-mlx pull org/tiny`" in line
    assert list(tmp_path.iterdir()) == []


def test_odd_names_reach_no_terminal(drafter: Path) -> None:
    odd = "x\x1b[31m\n"
    change(drafter, **{odd: odd})
    (drafter / odd).mkdir()
    for at in (drafter, (drafter / odd)):
        result = run(*SIDES, str(at))
        assert "\x1b" not in result.stdout + result.stderr
        assert r"x\x1b[31m\n" in refusal(result)


def test_only_headers_are_read(tmp_path: Path) -> None:
    """The weights are holes of 64 GiB, which no reader of tensors comes back from."""
    target = hollow(demo_pair.TARGET, tmp_path / "target")
    drafter = hollow(demo_pair.DRAFTER, tmp_path / "drafter")
    entries = {"lm_head.weight": ("BF16", [1 << 18, 1 << 17])}
    write_sparse(target / "model-extra.safetensors", entries)
    write_sparse(drafter / "model.safetensors", {"fc.weight": ("BF16", [1 << 18, 1 << 17])})
    run("--model", "demo")  # whatever Python still has to import is read now
    before = bytes_read()
    result = run("--model", str(target), "--drafter", str(drafter))
    assert bytes_read() - before < 2_000_000
    assert "tensor fc.weight = BF16 [262144, 131072]" in refusal(result)
