"""Errors name lines of a kernel's own files: of its helpers, its body and what it includes."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from lse_mlx.kernels.kernel_text import read_kernel_text
from tests.kernels.modes import needs_compiler
from tests.metal_host.build import COMPILER_CHARACTERS
from tests.metal_host.generate import KernelSource, place
from tests.metal_host.host import HostError, HostOptions, MetalHost
from tests.metal_host.lint import clang, lint
from tests.metal_host.running import WHO, X, refused

CHECKOUT = Path(__file__).parents[2]
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

INCLUDED = """\
// A comment
inline float from_include(const device float* x, uint i) {
  return x[i];  // line 3
}
"""
FILE = """\
// The contract
//
#include "some.h"

inline float from_helper(const device float* x, uint i) {
  return x[i];  // line 6
}

//// body
const uint i = thread_position_in_grid.x;  // line 10
%s
"""


def kernel(folder: Path, line: str, **others: str) -> KernelSource:
    """FILE with `line` as line 11, read as the project reads its kernels."""
    (folder / "some.h").write_text(others.get("included", INCLUDED))
    (folder / "k.metal").write_text(FILE % line)
    text = read_kernel_text("k", folder)
    return KernelSource("k", ("x",), ("o",), text.body, text.helpers)


def error(source: KernelSource, **options: Any) -> str:
    """What the harness says of it."""
    call = MetalHost(HostOptions(**options)).metal_kernel(
        source.name, source.input_names, source.output_names, source.source, source.header
    )
    with pytest.raises(HostError) as caught:
        call(
            inputs=[mx.array(X)],
            grid=(64, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.float32],
        )
    return str(caught.value)


@needs_compiler
@pytest.mark.parametrize(
    ("line", "at"),
    [
        ("o[i] = x[i + 1];", "k.metal:11"),
        ("o[i] = from_helper(x, i + 1);", "k.metal:6"),
        ("o[i] = from_include(x, i + 1);", "some.h:3"),
    ],
)
def test_an_access_outside(tmp_path: Path, line: str, at: str) -> None:
    assert error(kernel(tmp_path, line), checked=True).endswith(f" at {at}")


@needs_compiler
def test_what_does_not_compile(tmp_path: Path) -> None:
    assert "k.metal:11:8: error" in error(kernel(tmp_path, "o[i] = nothing;"))
    wrong = INCLUDED.replace("x[i]", "nothing")
    assert "some.h:3:10: error" in error(kernel(tmp_path, "o[i] = 0;", included=wrong))


@needs_compiler
def test_what_the_compiler_says_ends_with_a_line() -> None:
    body = WHO + "\n".join(f"o[i] = this_is_not_declared_{n};" for n in range(100))
    said = refused("does not compile", body)
    assert len(said) < COMPILER_CHARACTERS + 200
    assert re.search(r"\n\.\.\. and \d+ more lines$", said)


@needs_compiler
def test_a_barrier(tmp_path: Path) -> None:
    assert "at k.metal:11 reached by 60" in error(kernel(tmp_path, f"if (i < 60) {BARRIER}"))


@needs_compiler
def test_a_race_names_both_places(tmp_path: Path) -> None:
    source = kernel(tmp_path, "threadgroup float t[64];\nt[i] = i;\no[i] = t[i ^ 32];")
    said = error(source, checked=True, seed=1)
    written = r"at byte \d+, written by simdgroup \d lane \d+ at k\.metal:12 \[.*\] at k\.metal:13$"
    assert re.search("read-after-write race on 't' " + written, said) or "uninitialised" in said
    half = "if (i >= 32)\n  o[i] = t[i - 32];\nelse\n  t[i] = 0;"
    source = kernel(tmp_path, f"threadgroup float t[64]; t[i] = i; {BARRIER}\n{half}")
    said = error(source, checked=True)
    read = r", read by simdgroup \d lane \d+ at k\.metal:13 \[.*\] at k\.metal:15$"
    assert re.search("write-after-read race on 't' at byte \\d+" + read, said)


@needs_compiler
def test_a_race_of_writes_names_both_places(tmp_path: Path) -> None:
    source = kernel(tmp_path, "if (i < 32)\n  o[i] = 1;\nelse\n  o[i - 32] = 2;")
    said = error(source, checked=True)
    other = r"device memory: write-write race on 'o' at element 0, written by simdgroup 0 lane 0"
    assert re.search(other + r" at k\.metal:12 \[.* simdgroup 1 lane 0\] at k\.metal:14$", said)


@needs_compiler
def test_a_race_of_threadgroups_names_the_other() -> None:
    body = WHO + "o[thread_position_in_threadgroup.x] = i;"
    said = refused("another threadgroup", body, threads=128, checked=True)
    assert "at element 0, written by simdgroup 0 lane 0 of threadgroup (0,0,0) at k.metal:2" in said
    assert "[threadgroup (1,0,0) thread (0,0,0)" in said


@needs_compiler
@pytest.mark.parametrize("checked", [False, True])
def test_where_a_kernel_is_that_never_ends(tmp_path: Path, checked: bool) -> None:
    waiting = "if (i < 3) return;\nvolatile device float* flag = o;\nwhile (flag[i] != 5.0f) {}"
    said = error(kernel(tmp_path, waiting), checked=checked, seconds=0.2)
    assert "still running after 0.2 s of CPU time; of 64 threads 61 run or can run, 3 have" in said
    assert said.endswith(" at k.metal:13")


@needs_compiler
def test_where_threads_wait_that_others_never_meet(tmp_path: Path) -> None:
    waiting = (
        f"volatile device float* flag = o;\nif (i == 63) while (flag[i] != 5.0f) {{}}\n{BARRIER}"
    )
    said = error(kernel(tmp_path, waiting), seconds=0.2)
    assert (
        "1 run or can run, 0 have returned, 63 wait, one at the threadgroup_barrier of k.m" in said
    )
    assert "of k.metal:13 [" in said
    assert said.endswith(" at k.metal:12")


@needs_compiler
def test_a_signal_ends_a_kernel_that_never_ends() -> None:
    script = """
import signal
import mlx.core as mx
from tests.metal_host.running import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # this process may ignore it
mx.set_default_device(mx.cpu)
run("o[0] = 1;", threads=1)
print("begun", flush=True)
try:
    run("volatile device float* flag = o; while (flag[0] != 5.0f) {} o[0] = 0;", threads=1)
except KeyboardInterrupt:
    assert run("o[0] = 2;", threads=1)[0] == 2  # another launch is as good as before
    print("interrupted")
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=CHECKOUT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
            process.send_signal(signal.SIGINT)
            said, complaint = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, said, complaint) == (0, "interrupted\n", "")


@pytest.mark.skipif(clang() is None, reason="clang is not installed, and the lint needs it")
def test_a_pointer_without_an_address_space(tmp_path: Path) -> None:
    wrong = "inline float f(const float* p) { return p[0]; }\n"
    source = kernel(tmp_path, "const float* p = x; o[i] = p[1];", included="\n" + wrong)
    said = lint(source, [mx.zeros(8)], [mx.float32])
    assert "some.h:2: error: no address space" in said
    assert "k.metal:11: error: no address space" in said


def test_a_place_without_a_line_mark() -> None:
    assert place("a\nb\nc", 2, "k.metal") == "k.metal:2"
    assert place('a\n#line 7 "b.h"\nb\nc', len('a\n#line 7 "b.h"\nb\n'), "k.metal") == "b.h:8"
