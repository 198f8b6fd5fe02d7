"""What MLX writes around a kernel's body, as C++ that g++ compiles.

MLX makes a signature from the names in the Python call and from what it finds in the text of the
body; here the same parameters, in the same order, get their values from an entry point.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

CONSTANT_BELOW = 8
"""MLX passes an input of fewer elements in the address space `constant`."""

ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
"""The thread attributes that MLX adds where their name occurs in the body, and their types."""

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

Template = Sequence[tuple[str, mx.Dtype | int | bool]]
Kind = Literal["in", "out", "shape", "strides", "ndim"]

_SHAPE_INFO: dict[Kind, str] = {"shape": "int*", "strides": "int64_t*", "ndim": "int&"}
_LINE = re.compile(r'^#line (\d+) "([^"]*)"\n', re.M)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
# threadgroup <type> <names and dimensions>;   not a pointer, not a parameter, not an initializer
_THREADGROUP_VARIABLE = re.compile(
    r"(?:alignas\s*\([^)]*\)\s*)?\bthreadgroup\s+(?!const\b)"
    r"([A-Za-z_][\w:]*(?:\s*<[^;{}()]*?>)?(?:\s+(?:int|long|char|short))?)\s+(?=[A-Za-z_])"
    r"([^;(){}&*=]*(?:\[[^\]]*\][^;(){}&*=]*)*|[^;{}&=]*?\][^;{}&=]*);"
)
_CONSTANT_GLOBAL = re.compile(
    r"(^|[;}\n])(\s*)(?:static\s+)?constant\s+"
    r"(?=(?:constexpr\s+)?[A-Za-z_][\w:<>, ]*\s+\w+\s*(?:\[[^\]]*\]\s*)*(?:=|\{))"
)


@dataclass(frozen=True)
class KernelSource:
    """The arguments of `mx.fast.metal_kernel`."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False
    math_mode: str = "safe"


@dataclass(frozen=True)
class Parameter:
    """One parameter of the signature.

    space:  its address space with `const`, "" for a value
    c_type: with `*` or `&` where it is not a value
    name:   of the array or the thread attribute that it takes
    kind:   what of the array is passed; None for a thread attribute
    """

    space: str
    c_type: str
    name: str
    kind: Kind | None

    @property
    def declaration(self) -> str:
        variable = f"{self.name}_{self.kind}" if self.kind in _SHAPE_INFO else self.name
        return f"{self.space} {self.c_type} {variable}".strip()


@dataclass(frozen=True)
class Generated:
    """A translation unit, and the buffers that its entry point takes, in order."""

    text: str
    buffers: list[tuple[str, Kind]]


def blank_comments(text: str) -> str:
    """`text` with comments as spaces, lines as they were."""
    return _COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), text)


def place(text: str, at: int, name: str) -> str:
    """Where character `at` of `text` stands, as "file:line"; `name` is the file if no `#line` says."""
    first, begin = 1, 0
    for mark in _LINE.finditer(text, 0, at):
        first, name, begin = int(mark[1]), mark[2], mark.end()
    return f"{name}:{first + text.count(chr(10), begin, at)}"


def template_argument(value: mx.Dtype | int | bool) -> tuple[str, str]:
    """The kind of template parameter that MLX makes for `value`, and the argument."""
    if isinstance(value, bool):
        return "bool", "true" if value else "false"
    if isinstance(value, int):
        return "int", str(value)
    if isinstance(value, mx.Dtype):
        return "typename", TYPES[value]
    raise TypeError(f"Template argument {value!r}: expected bool, int or Dtype.")


def parameters(
    kernel: KernelSource, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]
) -> list[Parameter]:
    """The parameters of MLX's signature, in its order.

    MLX looks for `<input>_shape` and for attributes in the body only, by substring.
    """
    found: list[Parameter] = []
    for name, array in zip(kernel.input_names, inputs, strict=True):
        space = "const constant" if array.size < CONSTANT_BELOW else "const device"
        reference = "&" if array.ndim == 0 else "*"
        found.append(Parameter(space, f"{TYPES[array.dtype]}{reference}", name, "in"))
        if array.ndim == 0:
            continue
        for kind, c_type in _SHAPE_INFO.items():
            if f"{name}_{kind}" in kernel.source:
                found.append(Parameter("const constant", c_type, name, kind))
    for name, dtype in zip(kernel.output_names, output_dtypes, strict=True):
        c_type = f"atomic<{TYPES[dtype]}>" if kernel.atomic_outputs else TYPES[dtype]
        found.append(Parameter("device", f"{c_type}*", name, "out"))
    for name, c_type in ATTRIBUTES.items():
        if name in kernel.source:
            found.append(Parameter("", c_type, name, None))
    return found


def generate(
    kernel: KernelSource,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Template,
) -> Generated:
    """The whole text for g++: helper functions, MLX's signature around the body, an entry point.

    A text that has `#line` itself, as `read_kernel_text` makes it, says where its lines stand.
    """
    taken = parameters(kernel, inputs, output_dtypes)
    buffers: list[tuple[str, Kind]] = [(p.name, p.kind) for p in taken if p.kind is not None]
    values = [(name, *template_argument(value)) for name, value in template]
    template_line = ", ".join(f"{kind} {name}" for name, kind, _ in values)
    template_use = ", ".join(argument for *_, argument in values)
    arguments = ", ".join(_arguments(taken))
    declarations = ",\n  ".join(p.declaration for p in taken)
    name = kernel.name
    text = f"""\
namespace metal {{ namespace mh_user {{
using namespace metal;
#line 1 "{name}.header"
{_translate_helpers(kernel.header)}
#line 1 "{name}.signature"
{f"template <{template_line}>" if values else ""}
void custom_kernel_{name}(
  {declarations}) {{
#line 1 "{name}.metal"
{_translate_body(kernel.source)}
}}
#line 1 "{name}.entry"
static void mh_entry(void* const* mh_b, const mh::Attr& mh_t) {{
  custom_kernel_{name}{f"<{template_use}>" if values else ""}({arguments});
}}
}} }}
extern "C" __attribute__((visibility("default"))) int mh_run(mh::Launch* l) {{
  return mh::launch(l, &metal::mh_user::mh_entry);
}}
"""
    return Generated(text, buffers)


def _arguments(taken: Sequence[Parameter]) -> list[str]:
    """What the entry point passes: pointers into the buffers, and the thread's attributes."""
    arguments: list[str] = []
    buffers = 0
    for parameter in taken:
        if parameter.kind is None:
            arguments.append(f"mh_t.{parameter.name}")
            continue
        const = "const " if parameter.space.startswith("const ") else ""
        pointer = f"static_cast<{const}{parameter.c_type[:-1]}*>(mh_b[{buffers}])"
        arguments.append(f"*{pointer}" if parameter.c_type.endswith("&") else pointer)
        buffers += 1
    return arguments


def _translate_body(text: str) -> str:
    """`threadgroup float x[N];` becomes a reference into the memory of the threadgroup.

    Nothing else is rewritten (address spaces are macros), and lines keep their numbers.
    """
    count = 0

    def declaration(found: re.Match[str]) -> str:
        nonlocal count
        parts: list[str] = []
        for variable in _split_at_commas(found[2]):
            name, dimensions = re.match(r"\s*(\w+)\s*(.*)", variable, re.S).groups()
            parts.append(
                f"using mh_tg{count} = {found[1]}{dimensions.strip()}; "
                f'mh_tg{count}& {name} = mh::tg_var<mh_tg{count}>({count}, "{name}");'
            )
            count += 1
        return " ".join(parts) + "\n" * found[0].count("\n")

    return _THREADGROUP_VARIABLE.sub(declaration, blank_comments(text))


def _translate_helpers(text: str) -> str:
    """A `constant` at file scope is a `static const`."""
    text = _CONSTANT_GLOBAL.sub(r"\1\2static const ", blank_comments(text))
    return text.replace("const constexpr", "constexpr")


def _split_at_commas(text: str) -> list[str]:
    """`a[2], b[f(1, 2)]` at the commas outside of brackets."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "[(<{") - (character in "])>}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
