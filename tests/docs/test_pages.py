"""The pages stay true: the paths they name exist, and their commands and examples are run."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "metal_kernels" / "README.md", *(ROOT / "docs").glob("*.md")]
# Their commands take a GPU, hours, or files that are not here.
OTHER_PAGES = [ROOT / "scripts" / "README.md", ROOT / "lse_mlx" / "demo_pair" / "README.md"]
BIN = Path(sys.executable).parent

STORY = '.venv/bin/lse-mlx generate "Write a story about a shy fox." --model demo --max-tokens 64'
OCEAN = '.venv/bin/lse-mlx generate "Tell me about the ocean." --model demo --max-tokens 64'

# Every command that a page shows, by how it is run. A new one has to be put into one of the three.
RUN_BY_CI = {  # the command, and the words of .ci/run that run it
    "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/lse-mlx demo": (
        'as_typed "$first" "${setup[0]}"'
    ),
    "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest": (
        'as_typed "$second" "${setup[1]}"'
    ),
    ".ci/run": "#!/usr/bin/env bash",
}
RUN_HERE = [
    STORY,
    f"{STORY} --no-drafter",
    f"{OCEAN} --temperature 0.7 --seed 7 --json",
    f'{OCEAN} --stop "." --stop "!"',
    f"{OCEAN} --repetition-penalty 1.1 --repetition-window 32 --min-tokens 8",
    f"{OCEAN.replace('64', '8')} --top-logprobs 3 --json",
    '.venv/bin/lse-mlx demo --prompt "Tell me about the moon." --max-tokens 64',
    ".venv/bin/lse-mlx models",
    ".venv/bin/lse-mlx warmup --model demo",
    ".venv/bin/lse-mlx warmup --model demo --json",
    ".venv/bin/lse-mlx selftest",
    ".venv/bin/lse-mlx check --model demo --drafter demo",
    ".venv/bin/lse-mlx check --model demo --drafter demo --json",
]
RUN_ON_A_COPY = [  # of the demo drafter, in a folder of its own: they write files, or read those
    ".venv/bin/lse-mlx selftest --output report.json",
    ".venv/bin/lse-mlx convert path/to/drafter path/to/conversion",
    ".venv/bin/lse-mlx convert path/to/drafter path/to/conversion --verify",
    ".venv/bin/lse-mlx convert path/to/drafter path/to/other --bits 4",
    '.venv/bin/lse-mlx trace "Tell me about the moon." --model demo --out path/to/trace',
    ".venv/bin/lse-mlx replay path/to/trace --model demo",
]
NOT_RUN = {  # the command, and why
    ".venv/bin/pip install '.[cuda13]' && "
    ".venv/bin/pip install --force-reinstall --no-deps mlx-cuda-13": "needs an NVIDIA GPU",
    ".venv/bin/python -m pytest -m gpu -n 0": "needs a GPU",
    ".venv/bin/python -m pytest -m slow": "takes most of an hour",
    ".venv/bin/lse-mlx qualify --model demo --drafter demo": "takes half a minute; "
    "tests/cli/test_qualify.py runs it",
    ".venv/bin/lse-mlx pull qwen3.8-27b": "downloads 20 GB; tests/cli/test_pull.py pulls from a hub "
    "on this machine",
}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of `page` in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def commands(page: Path) -> list[str]:
    """The commands of `page`, one a line."""
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line]


def run(command: list[str] | str, cwd: Path = ROOT, **how) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False, **how
    )


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=name_of)
def test_every_path_exists(page: Path) -> None:
    named = re.findall(
        r"`((?:\.ci|docs|examples|lse_mlx|metal_kernels|scripts|tests)/[^`\s]*)`",
        page.read_text("utf-8"),
    )
    # In an installed package only: the wheel's own tests look there.
    missing = [p for p in named if p != "lse_mlx/metal_kernels" and not (ROOT / p).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    opening = re.findall(r"^```(.*)$", page.read_text("utf-8"), re.M)[::2]
    assert set(opening) <= {"sh", "python", ""}, "commands are in sh blocks, examples in python"


def test_every_command_is_accounted_for() -> None:
    shown = {line for page in PAGES for line in commands(page)}
    assert shown == {*RUN_BY_CI, *RUN_HERE, *RUN_ON_A_COPY, *NOT_RUN}


@pytest.mark.parametrize("command", RUN_BY_CI)
def test_ci_runs_it(command: str) -> None:
    assert RUN_BY_CI[command] in (ROOT / ".ci" / "run").read_text("utf-8")


def test_setting_up_is_two_commands() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    section = readme.split("## Set up\n")[1].split("\n## ")[0]
    [block] = re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S)
    assert block.splitlines() == list(RUN_BY_CI)[:2]


@pytest.mark.parametrize("command", RUN_HERE)
def test_command(command: str) -> None:
    assert_it_works(command, ROOT)


def test_commands_that_write(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lse_mlx" / "demo_pair" / "drafter", tmp_path / "path/to/drafter")
    for command in RUN_ON_A_COPY:  # in the order of the page
        assert_it_works(command, tmp_path)
    made = {path.name for path in (tmp_path / "path/to").iterdir()}
    assert made == {"drafter", "conversion", "other", "trace"}
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["failed"] == 0


def assert_it_works(command: str, folder: Path) -> None:
    assert command.startswith(".venv/bin/")
    here = command.replace(".venv/bin/lse-mlx", f"'{BIN / 'lse-mlx'}'", 1)
    done = run(here, shell=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


EXAMPLES = [code for page in PAGES for code in blocks(page, "python")]


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_on_a_page(code: str) -> None:
    done = run([sys.executable, "-W", "error::DeprecationWarning:lse_mlx", "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=name_of)
def test_example_file(script: Path) -> None:
    done = run([sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_architecture_names_every_part() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    package = ROOT / "lse_mlx"
    parts = [f"lse_mlx/{p.parent.name}/" for p in package.glob("*/__init__.py")]
    files = [f"lse_mlx/{p.name}" for p in package.glob("*.py")]
    stages = [f"lse_mlx/decode/{p.name}" for p in package.glob("decode/[!_]*.py")]
    assert not [name for name in [*parts, *files, *stages] if f"`{name}`" not in page]


def test_the_page_of_checkpoints_names_every_file() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text("utf-8").split("## The files\n")[1]
    folder = ROOT / "lse_mlx" / "checkpoints"
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("[!_]*.py")}
    assert set(re.findall(r"^\| `([^`]+)` \|", page, re.M)) == files
