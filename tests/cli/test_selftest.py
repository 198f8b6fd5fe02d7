"""`lse-mlx selftest`: a table, or one JSON object; status 1 if anything failed."""

import json
import os
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lse_mlx.cli.main import app
from lse_mlx.cli.progress import shown_progress
from lse_mlx.cli.selftest import deliver, show, writable_file, write_whole
from lse_mlx.selftest.checks import Outcome
from lse_mlx.selftest.report import SelftestReport
from tests.tiny_models import on_cpu


@pytest.fixture(autouse=True)
def cpu():
    with on_cpu():
        yield


def test_json_is_one_object_and_the_file_holds_the_same(tmp_path: Path):
    file = tmp_path / "report.json"
    file.write_text("old")
    result = CliRunner().invoke(app, ["selftest", "--json", "--output", str(file)])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["failed"] == 0
    assert report["form"] == "reference"
    assert file.read_text() == result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert_progress_agrees(result.stderr.splitlines(), report["passed"])


def assert_progress_agrees(lines: list[str], passed: int):
    """About a line for each tenth, each phase to its end, and as many in all as the report counts."""
    assert len(lines) <= 11 + 11
    pattern = (
        r"\[lse-mlx\] phase=(\S+) done=(\d+) total=(\d+) percent=\d+ elapsed_s=\S+( check=.+)?"
    )
    found = [re.fullmatch(pattern, line) for line in lines]
    steps = [(m[1], int(m[2]), int(m[3])) for m in found if m]
    assert len(steps) == len(lines)
    ends = [step for step in steps if step[1] == step[2]]
    assert [phase for phase, _, _ in ends] == ["checks", "demo-pair"]
    assert sum(total for _, _, total in ends) == passed
    assert 'check="stock operations, ' in lines[0]


def refused(output: Path) -> str:
    result = CliRunner().invoke(app, ["selftest", "--output", str(output)])
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()  # no check was begun
    assert line.startswith("error: ") and line.endswith(".")
    return line


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path):
    assert "is a directory" in refused(tmp_path)
    missing = tmp_path / "two words" / "none"
    assert f"make it first with `mkdir -p '{missing}'`" in refused(missing / "report.json")
    (tmp_path / "file").write_text("")
    for output in ("file/report.json", "file/none/report.json"):
        line = refused(tmp_path / output)
        assert f"lies below {tmp_path / 'file'}, which is a file" in line
    assert "cannot be looked for" in refused(tmp_path / ("long" * 100))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is no regular file" in refused(pipe)


def test_a_link_stays_a_link(tmp_path: Path):
    link, file = tmp_path / "link.json", tmp_path / "report.json"
    link.symlink_to(file)
    assert writable_file(link) == file
    write_whole(writable_file(link), "{}\n")
    assert link.is_symlink() and file.read_text() == "{}\n"


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path):
    file = tmp_path / "report.json"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "\ud800")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_progress_names_what_is_next_and_how_far_it_is():
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with shown_progress(console) as progress:
        progress.advance("checks", 3, 80, "topk, [bold]ties")
        progress.advance("warm-up", 1, 9)
    assert "warm-up, 1 of 9" in stream.getvalue()


def report(*outcomes: Outcome) -> SelftestReport:
    return SelftestReport(
        device={"chip": "Apple M4 Pro", "system": "macOS 26.2"},
        versions={"mlx": "0.32.4", "lse-mlx": "0.1.0"},
        form="metal",
        outcomes=list(outcomes),
        compilations=[],
        warmed={},
        races=[],
        seconds=1.25,
    )


IDLE = "no device kernels run here"
MIXED = report(
    Outcome("topk", "some rows", "passed", 0.0, 0.0, "metal"),
    Outcome("selector", "path", "passed", 0.0, 0.0, "metal"),
    Outcome("selector", "large", "passed", 0.009, 1e-2, "metal"),
    Outcome("selector", "scores", "failed", 0.5, 1e-5, "metal", "above its limit"),
    Outcome("selector", "not a number", "passed", 0.25, 0.5, "reference"),
    Outcome("gated_delta_verify", "rows", "failed", None, 1e-5, "", "refused"),
    Outcome("selector", "more path", "not run", None, 0.0, "", IDLE),
    Outcome("topk", "more", "not run", None, 0.0, "", IDLE),
    Outcome("topk", "most", "not run", None, 0.0, "", IDLE),
)


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_the_table_has_a_line_for_each_operation_with_its_worst_check(capsys):
    show(MIXED)
    text = capsys.readouterr().out
    assert "Apple M4 Pro, macOS 26.2, MLX 0.32.4, lse-mlx 0.1.0: kernels run by metal" in text
    assert rows(text) == [
        ["topk", "metal", "1", "0", "0", "0"],
        ["selector", "metal", "3", "1", "0.5", "1e-05"],
        ["selector", "reference", "1", "0", "0.25", "0.5"],
        ["gated_delta_verify", "-", "1", "1", "-", "1e-05"],
    ]
    assert max(len(line) for line in text.splitlines() if line[0] in "┏┃┡│└") <= 80
    assert "most" not in text
    assert "relative to its largest value" in text
    assert "operations and their kernels: topk (topk_chunk, topk_merge)\n" in text
    assert "not run: 1 of selector, 2 of topk, because no device kernels run here" in text
    assert "failed: selector, scores: above its limit" in text
    assert "4 passed, 2 failed, 3 not run, in 1.2 s" in text


def test_a_check_that_is_no_number_is_the_worst(capsys):
    nan = Outcome("topk", "b", "failed", float("nan"), 1.0, "metal", "above its limit")
    show(report(*(Outcome("topk", x, "passed", 1.0, 1.0, "metal") for x in "ac"), nan))
    assert rows(capsys.readouterr().out) == [["topk", "metal", "3", "1", "nan", "1"]]


def test_every_check_is_listed_if_asked_for(capsys):
    show(MIXED, verbose=True)
    text = capsys.readouterr().out
    assert rows(text) == []
    assert "passed: topk, some rows: error 0, limit 0, by metal\n" in text
    assert "failed: selector, scores: error 0.5, limit 1e-05, by metal\n" in text
    assert "failed: gated_delta_verify, rows: error -, limit 1e-05\n" in text
    assert "4 passed, 2 failed, 3 not run, in 1.2 s" in text


def test_the_status_tells_whether_a_check_failed(tmp_path: Path, capsys):
    passed = Outcome("topk", "some rows", "passed", 0.0, 0.0, "metal")
    failed = Outcome("topk", "more rows", "failed", 1.0, 0.0, "metal", "above its limit")
    assert deliver(report(passed), False, None) == 0
    assert "1 passed, 0 failed" in capsys.readouterr().out
    file = tmp_path / "report.json"
    assert deliver(report(passed, failed), True, file) == 1
    assert capsys.readouterr().out == file.read_text()
    assert json.loads(file.read_text())["checks"][1]["why"] == "above its limit"


def test_what_was_found_is_shown_where_its_file_cannot_be_written(tmp_path: Path, capsys):
    with pytest.raises(OSError, match="No such file"):
        deliver(report(), True, tmp_path / "gone" / "report.json")
    assert json.loads(capsys.readouterr().out)["failed"] == 0
