"""CUDA's run-time compiler, which needs no GPU: the check that a kernel's text is CUDA C++17."""

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx

from lse_mlx.kernels.cuda_form import CudaForm, CudaModule, Template

MISSING = "NVRTC is missing (pip install nvidia-cuda-nvrtc)"
UNUSED_VARIABLE = 177

# By MLX 0.32.4: its own types, what stands before a kernel, and the two flags that matter here.
PREAMBLE = """
template <typename T, int N>
struct lse_array {
  T values[N];
  const T& operator[](int i) const { return values[i]; }
};
using Shape = lse_array<int, 10>;
using Strides = lse_array<long, 10>;
struct complex64_t { float re, im; };
struct __half { unsigned short bits; };
struct __nv_bfloat16 { unsigned short bits; };
"""
# To PTX and without optimisation, which is five times as fast and refuses the same text.
FLAGS = ["--device-as-default-execution-space", "--gpu-architecture=compute_90", "--device-debug"]
MLX_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "unsigned char",
    mx.int32: "int",
    mx.uint32: "unsigned int",
    mx.int64: "long",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
}


@cache
def compiler() -> ctypes.CDLL | None:
    """NVRTC as the system or NVIDIA's Python packages have it; None where they do not."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    packaged = [str(f) for place in places for f in Path(place).rglob("libnvrtc.so.*")]
    for name in [*packaged, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def as_mlx_writes_it(
    form: CudaForm, module: CudaModule, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype]
) -> str:
    """The text that `mx.fast.cuda_kernel` compiles, which it shows on a machine with CUDA alone."""
    parameters: list[str] = []
    for name, array in zip(form.input_names, inputs, strict=True):
        parameters.append(f"const {MLX_TYPES[array.dtype]}* {name}")
        for suffix, kind in [("_shape", "Shape"), ("_strides", "Strides"), ("_ndim", "int")]:
            if array.ndim and name + suffix in module.source:
                parameters.append(f"const __grid_constant__ {kind} {name}{suffix}")
    for name, dtype in zip(form.output_names, outputs, strict=True):
        parameters.append(f"{MLX_TYPES[dtype]}* {name}")
    return (
        f"{PREAMBLE}{module.header}namespace mlx::core::cu {{\n"
        f"__global__ void custom_kernel_{form.name}(\n    "
        + ",\n    ".join(parameters)
        + f") {{\n{module.source}\n}}\n}}\n"
    )


def compile_cuda(text: str, flags: Sequence[str] = ()) -> None:
    """Have `text` compiled. Raises AssertionError with the compiler's words."""
    nvrtc = compiler()
    assert nvrtc is not None, MISSING
    program = ctypes.c_void_p()
    _call(
        nvrtc.nvrtcCreateProgram, ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
    )
    options = [flag.encode() for flag in [*FLAGS, *flags]]
    failed = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    _call(nvrtc.nvrtcGetProgramLogSize, program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    _call(nvrtc.nvrtcGetProgramLog, program, log)
    _call(nvrtc.nvrtcDestroyProgram, ctypes.byref(program))
    assert not failed, log.value.decode()


def check(
    form: CudaForm,
    inputs: Sequence[mx.array],
    outputs: Sequence[mx.Dtype],
    template: Template = (),
) -> None:
    """Compile one variant of a kernel, warnings being errors."""
    module = form.module(inputs, outputs, template)
    text = as_mlx_writes_it(form, module, inputs, outputs)
    assert text.isascii()
    compile_cuda(text, ["--warning-as-error=all-warnings", f"-diag-suppress={UNUSED_VARIABLE}"])


def _call(function: "ctypes._FuncPointer", *arguments: object) -> None:
    status = function(*arguments)
    assert status == 0, f"{function.__name__} returned {status}"
