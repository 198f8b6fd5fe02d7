"""Kernels of `metal_kernels/` on an NVIDIA GPU: the same text through `mx.fast.cuda_kernel`.

MLX writes a CUDA kernel's signature from the names in the Python call, as it does for Metal, but
passes every input as a pointer to CUDA's own types and knows none of Metal's words. So the text
becomes a function of its own, behind `cuda_prelude.h` and in its namespace, and the kernel that
MLX writes does nothing but call that function. The compiler inlines it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from lse_mlx.errors import KernelError

PRELUDE = Path(__file__).with_name("cuda_prelude.h")

SIMD_WIDTH = 32
"""Threads of a SIMD group, and of a warp."""

TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.uint8: "uint8_t",
    mx.int16: "int16_t",
    mx.uint16: "uint16_t",
    mx.int32: "int",
    mx.uint32: "uint",
    mx.int64: "int64_t",
    mx.uint64: "uint64_t",
    mx.float16: "half",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

_LINEAR = "uint(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))"
_GROUPS = f"((blockDim.x * blockDim.y * blockDim.z + 31u) / {SIMD_WIDTH}u)"


def _each_axis(value: str) -> str:
    return f"uint3({', '.join(value.replace('@', axis) for axis in 'xyz')})"


ATTRIBUTES = {
    "thread_position_in_grid": _each_axis("blockIdx.@ * blockDim.@ + threadIdx.@"),
    "thread_position_in_threadgroup": _each_axis("threadIdx.@"),
    "threadgroup_position_in_grid": _each_axis("blockIdx.@"),
    "threads_per_grid": _each_axis("gridDim.@ * blockDim.@"),
    "threads_per_threadgroup": _each_axis("blockDim.@"),
    "threadgroups_per_grid": _each_axis("gridDim.@"),
    "thread_index_in_threadgroup": _LINEAR,
    "thread_index_in_simdgroup": f"{_LINEAR} % {SIMD_WIDTH}u",
    "simdgroup_index_in_threadgroup": f"{_LINEAR} / {SIMD_WIDTH}u",
    "simdgroups_per_threadgroup": _GROUPS,
    "threads_per_simdgroup": f"{SIMD_WIDTH}u",
    "thread_execution_width": f"{SIMD_WIDTH}u",
}
"""Metal's thread attributes in CUDA's terms, which hold where threadgroups divide the grid."""

_MATRIX = re.compile(r"\bsimdgroup_(?:matrix|\w+8x8|load|store|multiply\w*)\b")
_THREADGROUP_MEMORY = re.compile(r"\bthreadgroup\s+([\w:]+(?:\s*<[^<>;{}]*>)?\s+\w+\s*[\[;,])")
_CONSTANT_MEMORY = re.compile(r"(?m)^(\s*)constant\s+(?!constexpr\b)([\w:]+\s+\w+[^;()]*=)")
_ADDRESS_SPACES = re.compile(r"\b(?:device|constant|threadgroup|thread)\b\s*")
_COMMENT_LINE = re.compile(r"(?m)^ *//.*\n")
_METAL_LINES = re.compile(r"(?m)^\s*(?:#include\s*<metal\w*>|using namespace metal;).*$")

Template = Sequence[tuple[str, mx.Dtype | int | bool]]
Threads = tuple[int, int, int]


def has_cuda_form(source: str, header: str = "") -> bool:
    """Whether a kernel's text can be CUDA: not where it works on `simdgroup_matrix`."""
    return not _MATRIX.search(header + "\n" + source)


def cuda_text(text: str) -> str:
    """Metal's helpers or body as CUDA C++17: memory of a threadgroup declared, address spaces gone."""
    text = _METAL_LINES.sub("", text)
    text = _THREADGROUP_MEMORY.sub(r"__shared__ \1", text)
    text = _CONSTANT_MEMORY.sub(r"\1__constant__ \2", text)
    return _ADDRESS_SPACES.sub("", text)


@dataclass(frozen=True)
class CudaModule:
    """What `mx.fast.cuda_kernel` takes.

    header: the prelude, the helpers, and the body as a function of the kernel's arrays
    source: the call of that function, and the names of the shapes that it asks for
    """

    header: str
    source: str


@dataclass(frozen=True)
class CudaForm:
    """A kernel's text, ready to be joined with the dtypes of a call."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    helpers: str
    body: str

    def module(
        self,
        inputs: Sequence[mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: Template = (),
    ) -> CudaModule:
        """The text for these inputs, of which only dtypes matter and whether they have dimensions."""
        parameters: list[str] = []
        arguments: list[str] = []
        for name, array in zip(self.input_names, inputs, strict=True):
            cast = f"reinterpret_cast<const {_outside(array.dtype)}*>({name})"
            if array.ndim == 0:
                parameters.append(f"const {TYPES[array.dtype]}& {name}")
                arguments.append(f"*{cast}")
                continue
            parameters.append(f"const {TYPES[array.dtype]}* __restrict__ {name}")
            arguments.append(cast)
            for suffix, kind, value in _ABOUT_AN_INPUT:
                if f"{name}{suffix}" in self.body:
                    parameters.append(f"const {kind} {name}{suffix}")
                    arguments.append(value.format(f"{name}{suffix}"))
        for name, dtype in zip(self.output_names, output_dtypes, strict=True):
            parameters.append(f"{TYPES[dtype]}* __restrict__ {name}")
            arguments.append(f"reinterpret_cast<{_outside(dtype)}*>({name})")
        header = "\n".join(
            [
                _COMMENT_LINE.sub("", PRELUDE.read_text("ascii")),
                "namespace metal {",
                f'#line 1 "{self.name} helpers"',
                self.helpers,
                f"inline void lse_{self.name}({', '.join(parameters)}) {{",
                *(_definition(name, value) for name, value in template),
                *self._attributes(),
                f'#line 1 "{self.name} body"',
                self.body,
                "}",
                "}  // namespace metal",
                '#line 1 "call"',
                "",
            ]
        )
        return CudaModule(header, f"  metal::lse_{self.name}({', '.join(arguments)});")

    def _attributes(self) -> list[str]:
        named = [name for name in ATTRIBUTES if re.search(rf"\b{name}\b", self.body)]
        return [f"const auto {name} = {ATTRIBUTES[name]};" for name in named]


_ABOUT_AN_INPUT = (
    ("_shape", "int*", "&{}[0]"),
    ("_strides", "int64_t*", "reinterpret_cast<const metal::int64_t*>(&{}[0])"),
    ("_ndim", "int&", "{}"),
)
"""What MLX adds to a signature where the text names it: how it ends, its type, how it is passed."""


def _outside(dtype: mx.Dtype) -> str:
    """A type of the prelude as the kernel names it that MLX writes, in another namespace."""
    name = TYPES[dtype]
    return name if name in ("bool", "int", "float") else f"metal::{name}"


def _definition(name: str, value: mx.Dtype | int | bool) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value]};"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    return f"constexpr int {name} = {value};"


def cuda_form(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
) -> CudaForm:
    """A kernel's text for CUDA.

    Raises KernelError where it works on matrices of a SIMD group, which CUDA has no equal of.
    """
    if not has_cuda_form(source, header):
        raise KernelError(
            f"The kernel {name} multiplies matrices of a SIMD group, for which CUDA has no equal: "
            "use the plain form of this kernel there."
        )
    return CudaForm(
        name, tuple(input_names), tuple(output_names), cuda_text(header), cuda_text(source)
    )


def cuda_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
) -> Callable[..., list[mx.array]]:
    """`mx.fast.metal_kernel` for an NVIDIA GPU: the same text, and the same call.

    name, input_names, output_names, source, header: as `mx.fast.metal_kernel` takes them
    Returns a callable of `inputs`, `output_shapes`, `output_dtypes`, `grid` (threads in all, a
    multiple of `threadgroup`), `threadgroup` and `template`; `init_value`, `verbose` and `stream`
    are passed on. Raises KernelError where the text has no CUDA form.
    """
    form = cuda_form(name, input_names, output_names, source, header)
    built: dict[tuple[Any, ...], Callable[..., list[mx.array]]] = {}

    def call(
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Threads,
        threadgroup: Threads,
        template: Template | None = None,
        **rest: Any,
    ) -> list[mx.array]:
        arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        values = tuple(template or ())
        _check_threads(name, grid, threadgroup)
        variant = (values, tuple([(a.dtype, a.ndim == 0) for a in arrays]), tuple(output_dtypes))
        if variant not in built:
            module = form.module(arrays, output_dtypes, values)
            kernel = mx.fast.cuda_kernel(
                name=name,
                input_names=list(input_names),
                output_names=list(output_names),
                source=module.source,
                header=module.header,
            )
            built[variant] = cast(Callable[..., list[mx.array]], kernel)
        return built[variant](
            inputs=arrays,
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
            grid=grid,
            threadgroup=threadgroup,
            **rest,
        )

    return call


def _check_threads(name: str, grid: Threads, threadgroup: Threads) -> None:
    """Whole threadgroups of whole SIMD groups: CUDA starts no others, and its shuffles need 32."""
    x, y, z = threadgroup
    whole = all(g % t == 0 for g, t in zip(grid, threadgroup, strict=True))
    if not whole or x * y * z % SIMD_WIDTH:
        raise KernelError(
            f"The kernel {name} was launched with a grid of {grid} in threadgroups of "
            f"{threadgroup}: on CUDA a threadgroup divides the grid and has a multiple of "
            f"{SIMD_WIDTH} threads."
        )
