"""`lse-mlx warmup`: what was compiled and chosen, as tables and as JSON."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lse_mlx.cli.main import app
from lse_mlx.cli.warmup import _forms, _kernels, _races, _sentences
from lse_mlx.kernels.race import RaceResult
from lse_mlx.kernels.registry import Compilation
from lse_mlx.warmup import WarmupReport
from tests.tiny_models import on_cpu


@pytest.fixture(autouse=True)
def cpu():
    with on_cpu():
        yield


def run(*arguments: str):
    return CliRunner().invoke(app, ["warmup", *arguments])


def test_json_of_the_demo_pair_on_a_cpu():
    result = run("--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["model"] == "demo"
    assert report["form"] == "reference"
    assert report["jit_compiles"] == 0
    assert report["races"] == []
    assert report["spec_tested"] > 16
    kernels = {kernel["name"]: kernel["calls"] for kernel in report["kernels"]}
    assert kernels["topk"]["reference"] > 0
    assert kernels["gated_delta_verify"]["reference"] > 0


def test_tables_of_the_demo_pair_on_a_cpu():
    result = run("--model", "demo")
    assert result.exit_code == 0
    assert "gated_delta_verify" in result.stdout
    assert "topk (topk_chunk, topk_merge)" in result.stdout
    assert "reference" in result.stdout
    assert "variant" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines() if line[:1] in "┏┃┡│└") <= 80
    assert "0 compilations" in result.stdout
    assert "drafted tokens accepted" in result.stdout


def test_a_target_alone():
    report = json.loads(run("--no-drafter", "--json").stdout)
    assert report["spec_tested"] == 0
    # On a CPU there is nothing to compile, and no drafter to judge.
    assert sum(kernel["calls"]["reference"] for kernel in report["kernels"]) < 100
    assert "drafted tokens" not in run("--no-drafter").stdout


def test_a_missing_model_is_one_sentence(tmp_path: Path):
    result = run("--model", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")


def device_report() -> dict[str, Any]:
    """As a Mac would give it."""
    report = WarmupReport(
        device={"chip": "Apple M4 Pro", "system": "macOS 26.2", "mlx": "0.32.4"},
        form="metal",
        mode="auto",
        exact=True,
        compilations=(
            Compilation("skinny_qmm", "ROWS=8", 41.26),
            Compilation("skinny_qmm", "ROWS=4", 39.0),
        ),
        calls={"skinny_qmm": {"metal": 700}, "topk": {"metal": 3}},
        refused={},
        forms={"skinny_qmm 8x64x64 4-bit": "simd", "topk 7x97, 5": "stock"},
        races=(
            RaceResult("skinny_qmm", "8x64x64 4-bit", "simd", {"stock": 9.0, "simd": 5.04}),
            RaceResult("topk", "7x97, 5", "stock", {"stock": 3.0}, {}, {"chunks": "wrong"}),
        ),
        raced=1,
        tested=60,
        accepted=31,
        seconds=2.5,
    )
    return report.as_dict()


def lines(*tables: Any) -> str:
    shown = Console(file=io.StringIO(), width=120)
    for table in tables:
        shown.print(table)
    return shown.file.getvalue()


def test_kernels_are_listed_with_variants_and_times():
    text = lines(_kernels(device_report()))
    for words in ("skinny_qmm", "metal (700)", "ROWS=8", "41.3", "ROWS=4", "39.0", "topk"):
        assert words in text


def test_forms_and_races_are_listed():
    text = lines(_forms(device_report()), _races(device_report()))
    assert [text.count(word) for word in ("skinny_qmm 8x64x64 4-bit", "topk 7x97, 5")] == [2, 2]
    assert "9.0" in text and "5.0" in text
    [refused] = [line for line in text.splitlines() if "topk" in line and "3.0" in line]
    assert "-" in refused


def test_sentences_say_where_and_how():
    first, second, third, fourth = _sentences(device_report())
    assert first == "Apple M4 Pro, macOS 26.2, MLX 0.32.4: kernels run by metal, choice auto, exact"
    assert second == "2 compilations in 80 ms; warm-up 2.50 s"
    assert third == "races won by kernels of lse-mlx: 1, by stock MLX: 1; run now: 1"
    assert fourth == "drafted tokens accepted: 31 of 60"
