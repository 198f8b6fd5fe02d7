"""The converter's script and its benchmark: what they need, print and return."""

import contextlib
import errno
import io
import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints.conversion.conversion_sources import small_tensors, write_source
from tests.checkpoints.conversion.scalar_quantizer import converted_tensors, safetensors_file

SCRIPTS = Path(__file__).parents[2] / "scripts"
CONVERT = SCRIPTS / "convert_dflash2_q8.py"
ORIGIN = ["--source-repository", "org/name", "--source-revision", "0123abcd"]

# Runs a script in an interpreter that has nothing but its library, NumPy and this checkout, and ends
# with status 99 where the script or the checkout asks for anything else. The library and NumPy
# themselves look for some modules that they can do without; they find none.
ALONE = """
import os, runpy, sys

script, numpy_folder, *arguments = sys.argv[1:]
allowed = {*sys.stdlib_module_names, "lse_mlx", "numpy"}
library, numpy = os.path.dirname(os.__file__), os.path.join(numpy_folder, "numpy", "")

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in allowed:
            return None
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        asker = frame.f_code.co_filename
        if asker.startswith(numpy) or asker.startswith(library) and numpy_folder not in asker:
            raise ModuleNotFoundError(name)
        print("asked for", name, file=sys.stderr)
        os._exit(99)

sys.meta_path.insert(0, Refuse())
sys.path.append(numpy_folder)
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


def run(*arguments: str | Path, python: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(python or [str(CONVERT)]), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def alone(*arguments: str | Path, numpy_folder: Path) -> subprocess.CompletedProcess[str]:
    prelude = ["-W", "error", "-I", "-S", "-c", ALONE, str(CONVERT), str(numpy_folder)]
    return run(*arguments, python=prelude)


NUMPY_FOLDER = Path(np.__file__).parents[1]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "a source with spaces, \u00fc")


def test_it_converts_with_numpy_alone(source: Path, tmp_path: Path) -> None:
    made = tmp_path / "converted"
    done = alone(source, made, *ORIGIN, numpy_folder=NUMPY_FOLDER)
    assert (done.returncode, done.stderr) == (0, "")
    expected = safetensors_file(converted_tensors(small_tensors()))
    assert (made / "model.safetensors").read_bytes() == expected
    manifest = (made / "source-repository.json").read_text()
    assert done.stdout == (
        "fc.weight: 5 x 192\n"
        "candidate_selector.predecessor_codebook.weight: 3 x 64\n"
        "layers.0.mlp.up_proj.weight: 131 x 64\n"
        "candidate_selector.successor_codebook.weight: 2 x 128\n" + manifest
    )
    assert json.loads(manifest)["source_revision"] == "0123abcd"


def test_the_guard_of_the_last_test_guards(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    for module in ("mlx.core", "huggingface_hub", "rich"):
        script.write_text(f"import {module}")
        prelude = ["-I", "-S", "-c", ALONE, str(script), str(NUMPY_FOLDER)]
        done = run(python=prelude)
        assert done.returncode == 99 and "asked for" in done.stderr


def test_without_numpy_it_says_so(source: Path, tmp_path: Path) -> None:
    done = run(source, tmp_path / "converted", *ORIGIN, python=["-I", "-S", str(CONVERT)])
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "numpy cannot be imported: install NumPy 2.4 or newer.\n"


def test_a_numpy_that_fails_is_one_sentence_too(source: Path, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('\\n\\nPlease read\\nall of this')")
    prelude = ["-I", "-S", "-c", ALONE, str(CONVERT), str(tmp_path)]
    done = run(source, tmp_path / "converted", *ORIGIN, python=prelude)
    assert one_sentence(done) == "numpy cannot be imported: install NumPy 2.4 or newer.\n"


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.endswith(".\n")
    return done.stderr


def test_what_cannot_be_done_is_one_sentence(source: Path, tmp_path: Path) -> None:
    assert "config.json cannot be read" in one_sentence(run(tmp_path, tmp_path / "new", *ORIGIN))
    assert "is the source itself" in one_sentence(run(source, source, *ORIGIN))
    taken = tmp_path / "taken"
    taken.mkdir()
    assert "exists already" in one_sentence(run(source, taken, *ORIGIN))
    (source / "loop").symlink_to("loop")
    assert "Too many levels" in one_sentence(run(source / "loop", tmp_path / "new", *ORIGIN))
    under_a_file = source / "config.json" / "new"
    assert "config.json" in one_sentence(run(source, under_a_file, *ORIGIN))
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "is cut short" in one_sentence(run(source, tmp_path / "new", *ORIGIN))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([source.name, "taken"])


@pytest.mark.parametrize(
    "arguments", [[], ["a"], ["a", "b"], ["a", "b", *ORIGIN[:2]], ["a", "b", *ORIGIN, "--more"]]
)
def test_a_mistake_on_the_command_line_has_status_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("usage: convert_dflash2_q8.py")


def test_closed_output_is_no_traceback(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(CONVERT), str(source), str(tmp_path / "new"), *ORIGIN]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert script.stdout is not None and script.stderr is not None
    script.stdout.close()
    told = script.stderr.read()
    script.stderr.close()
    assert script.wait() == 1
    assert told == (
        "Standard output failed (Broken pipe): see that it can be written and convert again.\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == [source.name]


def shell(line: str, source: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell's `line`, in which "$@" is the script with its arguments."""
    script = [sys.executable, str(CONVERT), str(source), str(tmp_path / "new"), *ORIGIN]
    return subprocess.run(["sh", "-c", line, "sh", *script], capture_output=True, text=True)


def test_output_that_cannot_be_written_is_one_sentence(source: Path, tmp_path: Path) -> None:
    told = one_sentence(shell('"$@" >&-', source, tmp_path))
    assert told == "Standard output is closed: give the script somewhere to write.\n"
    if Path("/dev/full").exists():
        told = one_sentence(shell('"$@" >/dev/full', source, tmp_path))
        assert told.startswith("Standard output failed (No space left on device): ")
    assert [p.name for p in tmp_path.iterdir()] == [source.name]


def test_where_only_the_manifest_is_not_printed_the_conversion_stays(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        """Takes the lines of the matrices and no more."""

        def write(self, text: str) -> int:
            if text.startswith("{"):
                raise OSError(errno.ENOSPC, "full")
            return len(text)

        def fileno(self) -> int:
            return file.fileno()

    script = runpy.run_path(str(CONVERT))
    with (tmp_path / "out").open("w") as file, contextlib.redirect_stdout(Full()):
        assert script["main"]([str(source), str(tmp_path / "new"), *ORIGIN]) == 1
    told = capsys.readouterr().err
    assert told == f"Standard output failed (full), but {tmp_path / 'new'} is complete.\n"
    expected = safetensors_file(converted_tensors(small_tensors()))
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("files", [5, 6, 7, 8])
def test_too_few_open_files_leave_nothing(source: Path, tmp_path: Path, files: int) -> None:
    assert "Too many open files" in one_sentence(
        shell(f'ulimit -n {files}; "$@"', source, tmp_path)
    )
    assert [p.name for p in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--folder", "missing"),
        ("--repeat", "0"),
        ("--scale", "0"),
        ("--scale", "-1"),
        ("--scale", "nan"),
        ("--scale", "1.5"),
    ],
)
def test_the_benchmark_refuses_what_it_cannot_measure(wrong: tuple[str, str]) -> None:
    done = run(*wrong, python=[str(SCRIPTS / "bench_convert.py")])
    assert done.returncode == 2 and done.stdout == ""
    assert f"error: {wrong[0]} {wrong[1]} " in done.stderr and "Traceback" not in done.stderr


def test_the_benchmark_measures(tmp_path: Path) -> None:
    done = run(
        "--scale", "0.03", "--folder", tmp_path, "--json",
        python=[str(SCRIPTS / "bench_convert.py")],
    )  # fmt: skip
    figures = json.loads(done.stdout)
    # Whole blocks of the widest matrix are at work, so that more rows need no more memory.
    assert 10e6 < figures["peak_bytes"] < 400e6
    # The status tells whether both aims are met; the ratio of two times may miss its own on any day.
    assert done.returncode == (0 if figures["ratio"] <= 4 else 1), done.stderr
    assert figures["source_bytes"] > 3_848_273_920 * 0.03
    assert figures["output_bytes"] < figures["source_bytes"]
    assert len(figures["files_seconds"]) == len(figures["conversion_seconds"]) == 1
    assert figures["warm_start_opened_source"] == 0
    assert figures["warm_start_folder"] == "source/lse-q8g64"
    if sys.platform == "linux":
        # The header of the conversion alone takes most of it.
        assert figures["warm_start_read_bytes"] < 40_000
    assert list(tmp_path.iterdir()) == []
