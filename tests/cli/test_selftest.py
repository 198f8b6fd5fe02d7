"""`lse-mlx selftest`: a table, or one JSON object; status 1 if anything failed."""

import json
import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lse_mlx.cli.main import app
from lse_mlx.cli.selftest import deliver, show, shown_progress, writable_file, write_whole
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
    assert "phase=checks" in result.stderr and "phase=demo pair" in result.stderr


def refused(output: Path) -> str:
    result = CliRunner().invoke(app, ["selftest", "--output", str(output)])
    assert result.exit_code == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()  # no check was begun
    assert line.startswith("error: ") and line.endswith(".")
    return line


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path):
    assert "is a directory" in refused(tmp_path)
    assert "lies in no directory that exists" in refused(tmp_path / "none" / "report.json")
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


def test_the_table_lists_what_ran_and_sums_up_what_did_not(capsys):
    idle = "no device kernels run here"
    show(
        report(
            Outcome("topk", "some rows", "passed", 0.0, 0.0, "metal"),
            Outcome("selector", "scores", "failed", 0.5, 1e-5, "metal", "above its limit"),
            Outcome("selector", "path", "not run", None, 0.0, "", idle),
            Outcome("topk", "more", "not run", None, 0.0, "", idle),
            Outcome("topk", "most", "not run", None, 0.0, "", idle),
        )
    )
    text = capsys.readouterr().out
    assert "Apple M4 Pro, macOS 26.2, MLX 0.32.4, lse-mlx 0.1.0: kernels run by metal" in text
    [row] = [line for line in text.splitlines() if "scores" in line and "│" in line]
    assert "failed" in row and "0.5" in row and "1e-05" in row
    assert "most" not in text
    assert "not run: selector (1), topk (2), because no device kernels run here" in text
    assert "failed: selector, scores: above its limit" in text
    assert "1 passed, 1 failed, 3 not run, in 1.2 s" in text


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
