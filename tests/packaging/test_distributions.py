"""What is in the wheel and the sdist, and what they declare."""

import email
import hashlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MACHINES = {
    "mac": {"sys_platform": "darwin", "platform_system": "Darwin"},
    "linux": {"sys_platform": "linux", "platform_system": "Linux"},
    "windows": {"sys_platform": "win32", "platform_system": "Windows"},
}


def build(kind: str, source: Path, into: Path) -> Path:
    """The one file that `hatchling build` makes of `source`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    [built] = into.iterdir()
    return built


def contents(wheel: Path) -> dict[str, str]:
    """Each file of a wheel with its SHA-256."""
    with zipfile.ZipFile(wheel) as archive:
        return {n: hashlib.sha256(archive.read(n)).hexdigest() for n in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def declared(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def of_machine(requirements: list[str], machine: str, extra: str = "") -> set[str]:
    """Names, with their extras, of what is required on `machine`."""
    wanted = set()
    for text in requirements:
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate(MACHINES[machine] | {"extra": extra}):
            wanted.add(one.name + "".join(f"[{e}]" for e in sorted(one.extras)))
    return wanted


def test_the_wheel_holds_the_package_and_its_data(wheel: Path) -> None:
    inside = set(contents(wheel))
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "lse_mlx").rglob("*")
        if path.is_file() and not re.search(r"/(__pycache__|\.[^/]*)/", path.as_posix())
    }
    kernels = {
        f"lse_mlx/metal_kernels/{path.name}"
        for path in (ROOT / "metal_kernels").iterdir()
        if path.is_file()
    }
    assert "lse_mlx/py.typed" in here
    assert "lse_mlx/metal_kernels/README.md" in kernels
    assert {name for name in inside if ".dist-info/" not in name} == here | kernels


def test_the_wheel_lays_nothing_beside_the_package(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in contents(wheel)}
    assert tops == {"lse_mlx", f"lse_mlx-{PROJECT['version']}.dist-info"}


def test_the_wheel_carries_the_licence(wheel: Path, declared: email.message.Message) -> None:
    assert declared["License-Expression"] == "Apache-2.0"
    assert declared.get_all("License-File") == ["LICENSE"]
    assert [n for n in contents(wheel) if n.endswith(".dist-info/licenses/LICENSE")]


def test_the_wheel_starts_the_command_line(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        assert archive.read(name).decode().split("\n")[:2] == [
            "[console_scripts]",
            "lse-mlx = lse_mlx.cli:run",
        ]


def test_python_and_dependencies_of_each_machine(declared: email.message.Message) -> None:
    assert declared["Requires-Python"] == ">=3.11"
    requirements = declared.get_all("Requires-Dist", [])
    everywhere = {"mlx-lm", "huggingface_hub", "jinja2", "numpy", "rich"}
    everywhere |= {"safetensors", "transformers", "typer"}
    everywhere = {name.replace("_", "-") for name in everywhere}
    assert of_machine(requirements, "mac") == everywhere | {"mlx"}
    assert of_machine(requirements, "linux") == everywhere | {"mlx[cpu]"}
    assert of_machine(requirements, "windows") == everywhere


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_a_cuda_extra_brings_the_backend_on_linux_only(
    declared: email.message.Message, extra: str
) -> None:
    requirements = declared.get_all("Requires-Dist", [])
    added = {m: of_machine(requirements, m, extra) - of_machine(requirements, m) for m in MACHINES}
    assert added == {"mac": set(), "linux": {f"mlx[{extra}]"}, "windows": set()}


def test_every_dependency_has_a_lower_bound_and_no_upper_one() -> None:
    for text in PROJECT["dependencies"]:
        assert [s.operator for s in Requirement(text).specifier] == [">="], text


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "sdist").mkdir()
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [source] = (tmp_path / "unpacked").iterdir()
    again = build("wheel", source, tmp_path / "again")
    assert contents(again) == contents(wheel)
    assert (source / ".ci" / "run").is_file()
    assert (source / "tests" / "packaging").is_dir()
