"""Compiles kernels with g++ into shared libraries, which a folder outside the checkout keeps."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.metal_host.generate import KernelSource

CPP = Path(__file__).parent / "cpp"
GXX = "g++"
COMPILER_SECONDS = 300.0
COMPILER_CHARACTERS = 4000
"""Of what g++ says, as much is told."""

# A file with a kernel's text or part of it, as `#line` names it; not one of the system's.
_PLACE = re.compile(r"^(?!/usr/).*?([\w.]+\.(?:metal|header|h):\d+)")

_COMMON = (
    *("-std=c++20", "-fPIC", "-march=native", "-g1", "-w", "-fno-exceptions"),
    *("-fno-strict-aliasing", "-fno-math-errno", "-fvisibility=hidden"),
)
_CHECKED = (
    *("-DMH_CHECKED", "-O1", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"),
    "-fsanitize=bounds,shift-exponent,alignment,object-size",
    *("-fsanitize-undefined-trap-on-error", "-ftrivial-auto-var-init=pattern"),
    "-fno-aggressive-loop-optimizations",  # which let loops end where an array ends
)


class HostError(Exception):
    """The kernel did something that Metal does not define, or does not compile.

    No RuntimeError: the project takes those for what MLX raises where a kernel cannot run.
    """


class CompileError(HostError):
    """g++ refuses the kernel."""


@dataclass(frozen=True)
class HostOptions:
    """How kernels are compiled and run.

    checked:    every load and store is looked at: bounds, races, uninitialised memory
    strict:     divergent barriers, and shuffles from lanes that take no part, are errors
    seed:       the order of threads between barriers: None in turn, an even number at random, an
                odd one by SIMD-group, each as far as it gets
    contract:   a product that is added becomes one fused operation, as Metal may do
    ftz:        float denormals are zero, as on Apple GPUs
    opt:        g++'s optimisation level (checked mode has its own)
    workers:    OS threads that share the threadgroups; 0: all cores, one in checked mode
    lax_bfloat: float converts to bfloat by itself, which Metal refuses
    partial_simd: functions of a SIMD-group may be met by some of its lanes, which is defined for Metal
                and not for CUDA
    seconds:    of CPU time; a launch of which a thread computes for longer is given up
    """

    checked: bool = False
    strict: bool = True
    seed: int | None = None
    contract: bool = False
    ftz: bool = False
    opt: Literal["-O0", "-O1", "-O2", "-O3"] = "-O2"
    workers: int = 0
    lax_bfloat: bool = False
    partial_simd: bool = True
    seconds: float = 60.0


def why_not_here() -> str | None:
    """Why kernels cannot run on this machine, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the Metal host harness needs Linux on x86-64"
    if shutil.which(GXX) is None:
        return "g++ is not installed, and the Metal host harness compiles kernels with it"
    return None


def default_cache() -> Path:
    """Where libraries are kept: a folder in the home directory, or else a temporary one."""
    home = Path("~/.cache/lse-mlx/metal-host").expanduser
    temporary = Path(tempfile.gettempdir()) / f"lse-mlx-metal-host-{os.getuid()}"
    for place in (home, lambda: temporary):
        try:
            folder = place()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # the latter where there is no home directory
            continue
        # A folder of somebody else could hold a library that we would load.
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    return _folder_of_this_process()


@functools.cache
def _folder_of_this_process() -> Path:
    return Path(tempfile.mkdtemp(prefix="lse-mlx-metal-host-"))


@dataclass(frozen=True)
class Library:
    """A compiled kernel, loaded into this process."""

    path: Path
    run: Callable[..., int]

    def line_of(self, offset: int) -> str:
        """The line of the kernel's text before an instruction, as " at name.metal:4", or ""."""
        command = ["addr2line", "-i", "-e", str(self.path), hex(offset - 1)]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        for line in found.stdout.splitlines():
            if where := _PLACE.match(line):
                return f" at {where[1]}"
        return ""


def compiled(text: str, kernel: KernelSource, options: HostOptions, cache: Path) -> Library:
    """The library of a generated text, from `cache` if it is there.

    Raises CompileError with what g++ says.
    """
    root = cache / _key_of_the_harness()
    _load_runtime(_runtime(root))
    flags = _flags(options, kernel.math_mode)
    headers = _precompiled_header(root, flags)
    # The name is in the key: line numbers in errors carry it.
    name = kernel.name[:60]
    library = root / "kernels" / f"{name}-{_hash(text, *flags)[:24]}.so"
    if not library.exists():
        _compile_kernel(text, kernel.name, flags, headers, library)
    return Library(library, _load(str(library)).mh_run)


def _compile_kernel(
    text: str, name: str, flags: Sequence[str], headers: Path, library: Path
) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    # Linking with -ffast-math would change the arithmetic of the whole process.
    link = [flag for flag in flags if not flag.startswith(("-fsanitize", "-ffast-math"))]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, thing = Path(folder, "kernel.cpp"), Path(folder, "kernel.o")
        source.write_text(text)
        search = [f"-I{headers}", f"-I{CPP}", f"-I{CPP}/stubs", "-include", "metal_host.hpp"]
        _make([*flags, *search, "-c", str(source)], thing, f"The kernel {name}")
        _make([*link, "-shared", str(thing)], library, f"The kernel {name}")


def _runtime(root: Path) -> Path:
    """The library that schedules threads and checks accesses."""
    library = root / "libmetal_host.so"
    if not library.exists():
        flags = [flag for flag in _COMMON if "visibility" not in flag]
        sources = [str(source) for source in sorted(CPP.glob("*.cpp"))]
        _make([*flags, "-O3", "-shared", *sources, "-ldl", "-lpthread"], library, "The runtime")
    return library


def _precompiled_header(root: Path, flags: Sequence[str]) -> Path:
    """A folder with metal_host.hpp compiled under `flags`."""
    folder = root / f"headers-{_hash(*flags)[:12]}"
    header = folder / "metal_host.hpp.gch"
    if not header.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = str(CPP / "metal_host.hpp")
        _make([*flags, "-x", "c++-header", source], header, "metal_host.hpp")
    return folder


def _flags(options: HostOptions, math_mode: str) -> list[str]:
    contract = "fast" if options.contract else "off"
    flags = [*_COMMON, options.opt, "-fsingle-precision-constant", f"-ffp-contract={contract}"]
    if options.checked:
        flags += _CHECKED
    if math_mode == "fast":
        flags.append("-ffast-math")
    if options.lax_bfloat:
        flags.append("-DMH_LAX_BFLOAT")
    return flags


def _make(arguments: Sequence[str], target: Path, what: str) -> None:
    """Run g++; `target` appears whole, whoever else makes it at the same moment."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        command = [GXX, *arguments, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILER_SECONDS)
        if done.returncode:
            raise CompileError(f"{what} does not compile:\n{_whole_lines(done.stderr)}")
        made.replace(target)


def _whole_lines(said: str) -> str:
    """The beginning of what g++ said, cut at the end of a line."""
    if len(said) <= COMPILER_CHARACTERS:
        return said
    told = said[:COMPILER_CHARACTERS].rpartition("\n")[0]
    return f"{told}\n... and {said.count(chr(10), len(told)) - 1} more lines"


@functools.cache
def _key_of_the_harness() -> str:
    """Of its own sources, the compiler and the CPU (-march=native)."""
    sources = sorted([*CPP.glob("*.hpp"), *CPP.glob("*.cpp")])
    version = subprocess.run([GXX, "--version"], capture_output=True, text=True, check=True).stdout
    cpu = Path("/proc/cpuinfo").read_text().splitlines()
    features = next((line for line in cpu if line.startswith("flags")), "")
    return _hash(*(source.read_text() for source in sources), version, features)[:16]


@functools.cache
def _load_runtime(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
