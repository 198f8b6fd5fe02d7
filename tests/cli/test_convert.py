"""`lse-mlx convert`: what it makes, where, what it prints, and one sentence for anything else."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lse_mlx import demo_pair
from lse_mlx.cli import convert
from lse_mlx.cli.main import app
from lse_mlx.cli.progress import progress
from tests.checkpoints.conversion.dflash2_sources import problems, write_origin, write_source
from tests.tiny_models import save_checkpoint, save_tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_origin(write_source(tmp_path / "source"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_tokenizer(save_checkpoint(tmp_path / "target"))


def run(*arguments: str | Path, **environ: str | None):
    """Run the command with the environment of a first use, changed by `environ`."""
    clean = {"LSE_DFLASH2_CACHE_DIR": None, "LSE_DFLASH2_AUTOCONVERT": None, **environ}
    return CliRunner().invoke(app, ["convert", *map(str, arguments)], env=clean)


def refusal(*arguments: str | Path) -> str:
    """The one sentence of a command that is refused what was asked, or a checkpoint."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith("error: ")
    assert "Traceback" not in result.stderr
    return sentence


def test_a_drafter_goes_where_the_first_use_looks(source):
    result = run(source)
    place = source / "lse-q8g64"
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{place}\n"
    assert problems(place, source) == []
    lines = result.stderr.splitlines()
    assert all(line.startswith(("[dflash2-convert] phase=", "[lse-mlx] ")) for line in lines)
    for phase in ("hash-source", "quantize", "finish"):
        steps = [line for line in lines if f"phase={phase} " in line]
        assert " done=0 " in steps[0] and " percent=0 " in steps[0]
        assert " percent=100 " in steps[-1]
    assert "tensor=a.weight" in result.stderr
    again = run(source)
    assert again.stdout == result.stdout
    assert again.stderr == f"[lse-mlx] using the conversion in {place}\n"


def test_bits_destination_and_cache_directory(source, tmp_path):
    assert run(source, "--bits", "4").stdout == f"{source / 'lse-q4g64'}\n"
    assert problems(source / "lse-q4g64", source, bits=4) == []
    new = tmp_path / "parent" / "new"
    assert run(source, new).stdout == f"{new}\n"
    assert problems(new, source) == []
    manifest = json.loads((new / "source-repository.json").read_text())
    assert manifest["source_repository"] == "test/fixture"
    cache = tmp_path / "cache"
    result = run(source, LSE_DFLASH2_CACHE_DIR=str(cache))
    assert result.stdout == f"{cache / 'test-fixture@0123abcd-q8g64'}\n"


def test_asked_for_by_hand_it_is_made_also_where_it_is_not_by_itself(source):
    assert run(source, LSE_DFLASH2_AUTOCONVERT="0").stdout == f"{source / 'lse-q8g64'}\n"


def test_json_says_what_was_made(source):
    result = run(source, "--json")
    assert json.loads(result.stdout) == {
        "kind": "drafter",
        "source": str(source),
        "destination": str(source / "lse-q8g64"),
        "bits": 8,
        "verified": False,
        "origin": "test/fixture@0123abcd",
    }


def test_verify_reads_everything_again_and_converts_nothing(source, tmp_path):
    assert "no conversion" in refusal(source, "--verify")
    assert not (source / "lse-q8g64").exists()
    run(source)
    result = run(source, "--verify")
    assert (result.exit_code, result.stdout) == (0, f"{source / 'lse-q8g64'}\n")
    assert "phase=hash-source" in result.stderr and "phase=hash-output" in result.stderr
    assert "quantize" not in result.stderr
    assert json.loads(run(source, "--verify", "--json").stdout)["verified"] is True
    weights = source / "lse-q8g64" / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x5a" if file.read(1) != b"\x5a" else b"\xa5")
    assert "not valid" in refusal(source, "--verify")
    run(source, tmp_path / "new")
    assert run(source, tmp_path / "new", "--verify").stdout == f"{tmp_path / 'new'}\n"
    assert "not valid" in refusal(source, source / "lse-q8g64", "--verify")


def test_verify_takes_the_bits_from_the_conversion(source, target, tmp_path):
    run(source, "--bits", "4")
    verified = json.loads(run(source, "--verify", "--json").stdout)
    assert (verified["destination"], verified["bits"]) == (str(source / "lse-q4g64"), 4)
    run(source, tmp_path / "four", "--bits", "4")
    assert json.loads(run(source, tmp_path / "four", "--verify", "--json").stdout)["bits"] == 4
    run(target, tmp_path / "eight", "--bits", "8", "--yes")
    verified = json.loads(run(target, tmp_path / "eight", "--verify", "--json").stdout)
    assert (verified["kind"], verified["bits"]) == ("target", 8)


def test_a_target_is_converted_after_a_yes(target, tmp_path):
    assert "--yes" in refusal(target)
    assert not list(target.glob("lse-*"))
    result = run(target, "--yes")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{target / 'lse-q4g64'}\n"
    config = json.loads((target / "lse-q4g64" / "config.json").read_text())
    assert config["quantization"]["bits"] == 4
    assert run(target, tmp_path / "new", "--yes", "--bits", "8").exit_code == 0
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["quantization"]["bits"] == 8
    verified = json.loads(run(target, "--verify", "--json").stdout)
    assert (verified["kind"], verified["verified"]) == ("target", True)
    # It is made once, so that nobody needs to say yes again.
    again = run(target)
    assert (again.exit_code, again.stdout) == (0, result.stdout)
    assert again.stderr == f"[lse-mlx] using the conversion in {target / 'lse-q4g64'}\n"


def test_the_drafter_of_the_package_is_converted_elsewhere_only(tmp_path):
    for how in (["demo"], [str(demo_pair.DRAFTER), "--bits", "4"], ["demo", "--verify", "--json"]):
        assert f"{demo_pair.DRAFTER} is used as it is stored: give DEST" in refusal(*how)
    new = tmp_path / "new"
    made = json.loads(run("demo", new, "--bits", "4", "--json").stdout)
    assert (made["kind"], made["destination"], made["bits"]) == ("drafter", str(new), 4)
    assert run("demo", new, "--verify").stdout == f"{new}\n"


def test_the_name_of_a_pair_means_its_drafter():
    said = refusal("qwen3.8-27b", "--offline")
    assert "incoai/Qwen3.8-27B-DFlash2" in said and "mlx-community" not in said


def test_places_that_cannot_be_are_one_sentence(source):
    result = run(source, LSE_DFLASH2_CACHE_DIR="~nobody-is-called-so/x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: LSE_DFLASH2_CACHE_DIR is '~nobody-is-called-so/x'")
    refusal("~nobody-is-called-so/x")
    (source.parent / "link").symlink_to("nowhere")
    assert "exists already" in refusal(source, source.parent / "link")
    assert sorted(os.listdir(source.parent)) == ["link", "source"]


@pytest.mark.parametrize(("answer", "converts"), [("\n", True), ("y\n", True), ("n\n", False)])
def test_a_person_is_asked_and_enter_is_a_yes(target, monkeypatch, answer, converts):
    monkeypatch.setattr(convert, "can_ask", lambda: True)
    result = CliRunner().invoke(app, ["convert", str(target)], input=answer)
    assert f"Convert {target} to 4 bits? [Y/n]" in result.stderr
    assert (result.exit_code == 0) == converts == (target / "lse-q4g64").is_dir()
    assert converts or (result.exit_code == 1 and "as you said no" in result.stderr)


def test_anything_else_is_named_for_what_it_is(source, target, tmp_path):
    run(source)
    assert "is a quantized DFlash2 drafter" in refusal(source / "lse-q8g64")
    assert "is a quantized qwen3_5 target" in refusal(demo_pair.TARGET)
    other = shutil.copytree(target, tmp_path / "other")
    (other / "config.json").write_text('{"model_type": "llama"}')
    assert "is a 'llama' model" in refusal(other)
    (target / "model.safetensors").unlink()
    assert "no model*.safetensors" in refusal(target)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(tmp_path / "empty")
    (source / "model.safetensors").write_bytes(b"short")
    assert "cut short" in refusal(source)
    (source / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(source)


def test_what_cannot_be_asked_for(source, tmp_path):
    assert "--bits 5" in refusal(source, "--bits", "5")
    assert "does not exist" in refusal(tmp_path / "none")
    assert "pull" in refusal("org/not-in-the-cache", "--offline")
    (tmp_path / "taken").mkdir()
    assert "exists already" in refusal(source, tmp_path / "taken")
    assert os.listdir(tmp_path / "taken") == []
    assert "source itself" in refusal(source, source)


def test_a_drafter_of_the_cache_is_found_by_its_repository(source, tmp_path):
    (source / "hf-origin.json").unlink()
    repository = tmp_path / "hub" / "models--org--name"
    commit = "0123456789" * 4
    snapshot = repository / "snapshots" / commit
    shutil.copytree(source, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    command = [sys.executable, "-m", "lse_mlx", "convert", "org/name", "--json", "--offline"]
    environ = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub")}
    ran = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert ran.returncode == 0, ran.stderr
    made = json.loads(ran.stdout)
    assert made["destination"] == str(snapshot / "lse-q8g64")
    assert made["origin"] == f"org/name@{commit}"


# What it looks like


def shown_on_a_terminal(steps: list[tuple[str, int, int]]) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with progress(console=console) as shown:
        shown.note("[bold]a note[/bold]")
        for phase, done, total in steps:
            shown.advance(phase, done, total)
    return stream.getvalue()


def test_a_terminal_shows_a_bar_with_percent_rate_and_time_left():
    steps = [("hash-source", n << 20, 8 << 20) for n in range(9)]
    text = shown_on_a_terminal([*steps, ("quantize", 0, 10), ("quantize", 10, 10)])
    assert "[bold]a note[/bold]" in text
    for part in ("hash-source", "quantize", "100%", "B/s", "0:00"):
        assert part in text
    assert "phase=" not in text


def test_an_unfinished_bar_gives_the_cursor_back():
    hidden, visible = "\x1b[?25l", "\x1b[?25h"
    text = shown_on_a_terminal([("quantize", 0, 10), ("quantize", 3, 10)])
    assert text.count(hidden) == text.count(visible) == 1
    assert text.rindex(visible) > text.rindex(hidden)


def test_phases_of_nothing_and_phases_again_are_shown():
    text = shown_on_a_terminal([("a", 0, 0), ("a", 0, 0), ("b", 0, 2), ("a", 1, 2), ("a", 2, 2)])
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")


def test_elsewhere_lines_are_written(capsys):
    with progress(Console(file=io.StringIO())) as shown:
        shown.note("a note")
        shown.advance("quantize", 1, 2, "x")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[lse-mlx] a note"
    assert lines[1].startswith(
        "[dflash2-convert] phase=quantize done=1 total=2 percent=50 elapsed_s="
    )
    assert lines[1].endswith(" tensor=x")
