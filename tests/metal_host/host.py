"""Runs kernels of `mx.fast.metal_kernel` on a Linux CPU.

    host = MetalHost(HostOptions(checked=True, seed=3))
    kernel = host.metal_kernel("twice", ["x"], ["y"], "uint i = ...")
    (y,) = kernel(inputs=[x], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(64,)], ...)

Kernels run when called, not lazily: not under `mx.compile`, nor in a transform that traces them.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal_host.build import (
    CompileError,
    HostError,
    HostOptions,
    Library,
    compiled,
    default_cache,
)
from tests.metal_host.generate import Generated, KernelSource, Template, generate

__all__ = ["CompileError", "HostError", "HostOptions", "LaunchRecord", "MetalHost"]

_MATH_MODES = ("safe", "relaxed", "fast")
_STATISTICS = 8
_MESSAGE_BYTES = 4096
_OTHER = "\x01"
"""Where in a message of the runtime the line of the other access of a race belongs."""


@dataclass(frozen=True)
class LaunchRecord:
    """What one launch did.

    partial_simd_operations: met by some lanes of a SIMD-group only
    same_value_writes:       two threads wrote the same value to one place, which is no race here
    threadgroup_bytes:       of one threadgroup
    """

    name: str
    compile_seconds: float
    run_seconds: float
    threads: int
    simd_operations: int
    partial_simd_operations: int
    barriers: int
    matrix_products: int
    same_value_writes: int
    threadgroup_bytes: int
    checked_accesses: int


@dataclass
class MetalHost:
    """A Metal device that is none: one set of options, and a record of what ran.

    cache: where compiled kernels are kept; by default a folder in the home directory
    """

    options: HostOptions = field(default_factory=HostOptions)
    cache: Path = field(default_factory=default_cache)
    launches: list[LaunchRecord] = field(default_factory=list, init=False)

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: dict[str, str] | None = None,
    ) -> Callable[..., list[mx.array]]:
        """What `mx.fast.metal_kernel` takes, and a callable with the same call convention."""
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        for key, value in (compile_options or {}).items():
            if key != "math_mode" or value not in _MATH_MODES:
                raise ValueError(f"[metal_kernel] Unknown compile option {key}={value!r}.")
        kernel = KernelSource(
            name=name,
            input_names=tuple(input_names),
            output_names=tuple(output_names),
            source=source,
            header=header,
            ensure_row_contiguous=ensure_row_contiguous,
            atomic_outputs=atomic_outputs,
            math_mode=(compile_options or {}).get("math_mode", "safe"),
        )

        def call(
            *,
            inputs: Sequence[Any],
            output_shapes: Sequence[Sequence[int]],
            output_dtypes: Sequence[mx.Dtype],
            grid: Sequence[int],
            threadgroup: Sequence[int],
            template: Template | None = None,
            init_value: float | None = None,
            verbose: bool = False,
            stream: object = None,
        ) -> list[mx.array]:
            __tracebackhide__ = True
            _same_length("inputs", inputs, kernel.input_names)
            _same_length("output_shapes", output_shapes, kernel.output_names)
            _same_length("output_dtypes", output_dtypes, kernel.output_names)
            arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
            generated = generate(kernel, arrays, output_dtypes, template or [])
            if verbose:
                print(f"Generated source code for `{name}`:\n```\n{generated.text}\n```")
            outputs = [
                _empty(shape, dtype, init_value)
                for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]
            self._run(kernel, generated, arrays, outputs, grid, threadgroup)
            return [
                _to_mlx(output, dtype, shape)
                for output, dtype, shape in zip(outputs, output_dtypes, output_shapes, strict=True)
            ]

        return call

    def _run(
        self,
        kernel: KernelSource,
        generated: Generated,
        inputs: Sequence[mx.array],
        outputs: Sequence[np.ndarray],
        grid: Sequence[int],
        threadgroup: Sequence[int],
    ) -> None:
        """Compile and launch; fills `outputs`. Raises HostError for what Metal does not define."""
        __tracebackhide__ = True
        began = time.perf_counter()
        library = compiled(generated.text, kernel, self.options, self.cache)
        built = time.perf_counter()
        buffers = _buffers(kernel, generated, inputs, outputs)
        launch, message = _launch(generated, buffers, grid, threadgroup, self.options)
        failed = _interruptible(library, launch)
        ended = time.perf_counter()
        self.launches.append(
            LaunchRecord(kernel.name, built - began, ended - built, *launch.statistics)
        )
        if failed:
            line, other = (
                library.line_of(offset) if offset else ""
                for offset in (launch.fault_offset, launch.other_offset)
            )
            said = message.value.decode().replace(_OTHER, other)
            raise HostError(f"{kernel.name}: {said}{line}")


class _Launch(ctypes.Structure):
    """Launch of cpp/host_api.hpp."""

    _fields_ = (
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("item_size", ctypes.POINTER(ctypes.c_uint32)),
        ("is_output", ctypes.POINTER(ctypes.c_uint8)),
        ("names", ctypes.POINTER(ctypes.c_char_p)),
        ("count", ctypes.c_int32),
        ("workers", ctypes.c_int32),
        ("grid", ctypes.c_int32 * 3),
        ("threadgroup", ctypes.c_int32 * 3),
        ("seed", ctypes.c_uint64),
        ("strict", ctypes.c_uint32),
        ("shuffle", ctypes.c_uint32),
        ("ftz", ctypes.c_uint32),
        ("checked", ctypes.c_uint32),
        ("partial_simd", ctypes.c_uint32),
        ("interrupted", ctypes.c_uint32),
        ("seconds", ctypes.c_double),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_uint64),
        ("fault_offset", ctypes.c_uint64),
        ("other_offset", ctypes.c_uint64),
        ("statistics", ctypes.c_uint64 * _STATISTICS),
    )


def _interruptible(library: Library, launch: _Launch) -> int:
    """Run the launch; an exception meanwhile, such as KeyboardInterrupt, ends it first.

    Python sees a signal only between two of its own steps, so another thread runs the kernel.
    """
    failed: list[int] = []
    # Not Thread.join: interrupted, it takes the thread for ended.
    ended = threading.Event()

    def run() -> None:
        failed.append(library.run(ctypes.byref(launch)))
        ended.set()

    threading.Thread(target=run).start()
    try:
        while not ended.wait(0.5):
            pass
    finally:
        launch.interrupted = not ended.is_set()
        ended.wait()
    return failed[0]


def _launch(
    generated: Generated,
    buffers: Sequence[np.ndarray],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    options: HostOptions,
) -> tuple[_Launch, ctypes.Array[ctypes.c_char]]:
    """The structure for the runtime, and where it writes its message."""
    count = len(buffers)
    kinds = [kind for _, kind in generated.buffers]
    names = [
        name if kind in ("in", "out") else f"{name}_{kind}" for name, kind in generated.buffers
    ]
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    launch = _Launch()
    launch.data = (ctypes.c_void_p * count)(*(buffer.ctypes.data for buffer in buffers))
    launch.bytes = (ctypes.c_uint64 * count)(*(buffer.nbytes for buffer in buffers))
    launch.item_size = (ctypes.c_uint32 * count)(*(buffer.itemsize for buffer in buffers))
    launch.is_output = (ctypes.c_uint8 * count)(*(kind == "out" for kind in kinds))
    launch.names = (ctypes.c_char_p * count)(*(name.encode() for name in names))
    launch.count = count
    launch.workers = options.workers or (1 if options.checked else os.cpu_count() or 1)
    launch.grid[:] = list(grid)
    launch.threadgroup[:] = list(threadgroup)
    launch.seed = options.seed or 0
    launch.shuffle = 0 if options.seed is None else 1 + options.seed % 2
    launch.seconds = options.seconds
    launch.strict, launch.ftz, launch.checked = options.strict, options.ftz, options.checked
    launch.partial_simd = options.partial_simd
    launch.message, launch.message_bytes = ctypes.cast(message, ctypes.c_char_p), _MESSAGE_BYTES
    return launch, message


def _buffers(
    kernel: KernelSource,
    generated: Generated,
    inputs: Sequence[mx.array],
    outputs: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """The memory of every buffer of the signature."""
    views = {
        name: _view(array, kernel.ensure_row_contiguous)
        for name, array in zip(kernel.input_names, inputs, strict=True)
    }
    written = dict(zip(kernel.output_names, outputs, strict=True))
    buffers: list[np.ndarray] = []
    for name, kind in generated.buffers:
        match kind:
            case "in":
                buffers.append(_storage(views[name]))
            case "out":
                buffers.append(written[name])
            case "shape":
                buffers.append(np.array(views[name].shape, np.int32))
            case "strides":
                strides = [step // views[name].itemsize for step in views[name].strides]
                buffers.append(np.array(strides, np.int64))
            case "ndim":
                buffers.append(np.array([views[name].ndim], np.int32))
    return buffers


def _view(array: mx.array, contiguous: bool) -> np.ndarray:
    """MLX's memory with its strides, bfloat16 as uint16."""
    if contiguous and array.ndim:
        array = mx.contiguous(array)
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    mx.eval(array)
    view = np.asarray(array)
    return np.ascontiguousarray(view) if contiguous and array.ndim else view


def _storage(view: np.ndarray) -> np.ndarray:
    """The memory that the strides reach, holes included."""
    if view.size == 0:
        return np.zeros(0, view.dtype)
    if view.flags.c_contiguous:
        return view
    assert min(view.strides) >= 0, "negative strides"
    steps = zip(view.shape, view.strides, strict=True)
    span = sum((size - 1) * step for size, step in steps) // view.itemsize + 1
    return np.lib.stride_tricks.as_strided(view, (span,), (view.itemsize,)).copy()


def _empty(shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> np.ndarray:
    """An output: Metal leaves it undefined, here it is NaN (all bits set) or false."""
    if init_value is not None:
        filled = mx.full(shape, init_value, dtype)
        return np.array(_view(filled, True)).reshape(-1)
    name = "uint16" if dtype == mx.bfloat16 else str(dtype).removeprefix("mlx.core.")
    if dtype == mx.bool_:
        return np.zeros(int(np.prod(shape)), np.bool_)
    output = np.empty(int(np.prod(shape)), np.dtype(name))
    output.view(np.uint8)[:] = 0xFF
    return output


def _to_mlx(output: np.ndarray, dtype: mx.Dtype, shape: Sequence[int]) -> mx.array:
    array = mx.array(output)
    if dtype == mx.bfloat16:
        array = array.view(mx.bfloat16)
    return array.reshape(shape)


def _same_length(what: str, got: Sequence[Any], names: Sequence[str]) -> None:
    if len(got) != len(names):
        raise ValueError(
            f"[metal_kernel] Expected `{what}` to have size {len(names)} but got size {len(got)}."
        )
