"""Compiled kernels are kept in a folder, made whole, and made anew for another text or options."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels.modes import needs_compiler
from tests.metal_host.build import HostOptions, default_cache
from tests.metal_host.host import CompileError, MetalHost

pytestmark = needs_compiler

CHECKOUT = Path(__file__).parents[2]


def run(cache: Path, number: int = 1, checked: bool = False, contract: bool = False) -> Any:
    kernel = MetalHost(HostOptions(checked=checked, contract=contract), cache).metal_kernel(
        "one", [], ["o"], f"o[0] = {number};"
    )
    (output,) = kernel(
        inputs=[],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
    )
    return output.item()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host")
    assert run(folder) == 1
    return folder


def test_a_kernel_is_compiled_once(cache: Path) -> None:
    before = sorted(cache.rglob("*.so"))
    assert run(cache) == 1
    assert sorted(cache.rglob("*.so")) == before
    assert run(cache, 2) == 2
    assert run(cache, 2, contract=True) == 2
    assert len(sorted(cache.rglob("*.so"))) == len(before) + 2


def test_nothing_half_made_is_left(cache: Path) -> None:
    with pytest.raises(CompileError, match="The kernel one does not compile"):
        MetalHost(cache=cache).metal_kernel("one", [], ["o"], "o[0] = nothing;")(
            inputs=[],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )
    assert {file.suffix for file in cache.rglob("*") if file.is_file()} == {".so", ".gch"}


def test_processes_that_compile_the_same_at_once(cache: Path) -> None:
    script = f"""
import mlx.core as mx
from pathlib import Path
from tests.metal_host.test_build import run
mx.set_default_device(mx.cpu)
assert run(Path({str(cache)!r}), 7) == 7
"""
    processes = [subprocess.Popen([sys.executable, "-c", script], cwd=CHECKOUT) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]


def test_the_default_folder_is_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache().is_relative_to(tmp_path)


def test_without_a_home_directory_it_is_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    folder = default_cache()
    assert folder.is_dir()
    assert folder == default_cache()
    assert not folder.is_relative_to(tmp_path)
    assert folder.stat().st_mode & 0o077 == 0


def test_outputs_are_those_of_the_options(cache: Path) -> None:
    assert np.isfinite(run(cache, 3, checked=True))
