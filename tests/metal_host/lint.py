"""Checks address spaces of a kernel with clang's C++ for OpenCL, which has the same ones as Metal.

Finds what g++ cannot see: a `device` pointer bound to an input that MLX passes in `constant`
because it has fewer than 8 elements, a threadgroup pointer where a device pointer is meant, a
pointer without an address space. Nothing is run.
"""

import functools
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from tests.metal_host.generate import (
    TYPES,
    KernelSource,
    Parameter,
    Template,
    blank_comments,
    parameters,
    place,
    template_argument,
)

DECLARATIONS = Path(__file__).parent / "cpp" / "msl_lint.hpp"
NEWEST_CLANG, OLDEST_CLANG = 30, 14

_ARGUMENTS = (
    *("-x", "clcpp", "-cl-std=clc++2021", "-cl-single-precision-constant", "-fsyntax-only", "-w"),
    # Without the generic address space, a pointer that names none is private.
    "-cl-ext=-__opencl_c_generic_address_space,-__opencl_c_pipes,-__opencl_c_device_enqueue",
    *("-Xclang", "-finclude-default-header", "-include", str(DECLARATIONS)),
    *("-fno-caret-diagnostics", "-"),
)
_BARE_POINTER = re.compile(
    r"(?:^|[;{}(,])[ \t]*((?:const\s+)?"
    r"(?:float|half|bfloat|u?int|u?char|u?short|u?long|bool|size_t|\w+_t|T|vec<[^<>]*>"
    r"|(?:float|half|u?int|u?short|u?char)[234])"
    r"(?:\s+const)?\s*[*&]\s*(?:restrict\s+)?[A-Za-z_]\w*)\s*(?=[=;,)\[{])",
    re.M,
)


@functools.cache
def clang() -> str | None:
    """A clang on PATH that knows C++ for OpenCL, the newest first; None without one."""
    for name in ("clang", *(f"clang-{n}" for n in range(NEWEST_CLANG, OLDEST_CLANG - 1, -1))):
        if shutil.which(name) and not _complaints(name, "__kernel void nothing() {}"):
            return name
    return None


def lint(
    kernel: KernelSource,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Template = (),
) -> str:
    """What is wrong with the address spaces, or an empty string. Needs `clang()`."""
    name = clang()
    assert name is not None, "no clang that knows C++ for OpenCL is on PATH"
    text = lint_text(kernel, inputs, output_dtypes, template)
    return "\n".join(filter(None, [_complaints(name, text), *_bare_pointers(kernel)]))


def lint_text(
    kernel: KernelSource,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Template,
) -> str:
    """The kernel as C++ for OpenCL: address spaces are macros, so its text stays as it is."""
    taken = parameters(kernel, inputs, output_dtypes)
    types, constants = [], []
    for name, value in template:
        kind, argument = template_argument(value)
        if kind == "typename":
            types.append(f"typedef {argument} {name};")
        else:
            constants.append(f"constexpr {kind} {name} = {argument};")
    # A kernel of OpenCL takes no references: the numbers come as pointers.
    numbers = [
        f"{p.space} {p.c_type} {p.name} = *{p.name}_ptr;"
        for p in taken
        if p.kind == "in" and p.c_type.endswith("&")
    ]
    body = re.sub(r"\bstatic_cast<thread ", "static_cast<__private ", blank_comments(kernel.source))
    header = re.sub(r"#include\s*<metal[^>]*>", "", blank_comments(kernel.header))
    return "\n".join(
        [
            f'#line 1 "{kernel.name}.header"',
            header,
            *types,
            f"__kernel void {kernel.name}({', '.join(map(_opencl_parameter, taken))}) {{",
            *constants,
            *numbers,
            f'#line 1 "{kernel.name}.metal"',
            body,
            "}\n",
        ]
    )


def _opencl_parameter(parameter: Parameter) -> str:
    if parameter.kind == "ndim":
        return f"const int {parameter.name}_ndim"
    if parameter.kind is None:
        return f"const {parameter.c_type} {parameter.name}"
    # A kernel's parameters cannot be bool, nor point to it.
    declaration = re.sub(rf"\b{TYPES[mx.bool_]}\b", "uchar", parameter.declaration)
    if parameter.kind == "in" and parameter.c_type.endswith("&"):
        return declaration.replace("&", "*") + "_ptr"
    return declaration


def _bare_pointers(kernel: KernelSource) -> list[str]:
    """Pointers and references that name no address space; clang takes them as private."""
    found: list[str] = []
    for part, text in (("header", kernel.header), ("metal", kernel.source)):
        text = blank_comments(text)
        for match in _BARE_POINTER.finditer(text):
            where = place(text, match.start(1), f"{kernel.name}.{part}")
            found.append(f"{where}: error: no address space: {match[1]}")
    return found


def _complaints(name: str, text: str) -> str:
    done = subprocess.run(
        [name, *_ARGUMENTS], input=text, capture_output=True, text=True, timeout=120
    )
    return "" if done.returncode == 0 else done.stderr or f"{name} fails without a message"
