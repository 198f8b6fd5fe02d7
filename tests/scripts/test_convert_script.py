"""The two stand-alone scripts: what they need, print and return."""

import json
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
    assert told == "Standard output was closed: let it be read to the end and convert again.\n"
    assert [p.name for p in tmp_path.iterdir()] == [source.name]


def test_the_benchmark_measures(tmp_path: Path) -> None:
    done = run(
        "--scale", "0.001", "--folder", tmp_path, "--json",
        python=[str(SCRIPTS / "bench_convert.py")],
    )  # fmt: skip
    # Its status tells whether the aims are met, which says nothing at this size.
    assert done.returncode in (0, 1) and done.stderr.count("Traceback") == 0
    figures = json.loads(done.stdout)
    assert figures["source_bytes"] > 3_848_273_920 * 0.001
    assert figures["output_bytes"] < figures["source_bytes"]
    assert len(figures["files_seconds"]) == len(figures["conversion_seconds"]) == 1
    assert figures["warm_start_opened_source"] == 0
    assert figures["warm_start_folder"] == "source/lse-q8g64"
    if sys.platform == "linux":
        assert figures["warm_start_read_bytes"] < 20_000
    assert list(tmp_path.iterdir()) == []
