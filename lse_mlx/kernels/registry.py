"""The one door to device kernels: picks their form, counts compilations, remembers who served."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, TypeVar

import mlx.core as mx

from lse_mlx.errors import KernelError, reason
from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.cuda_form import cuda_kernel
from lse_mlx.kernels.kernel_text import read_kernel_text

Form = Literal["metal", "cuda", "reference"]
Build = Callable[..., Callable[..., list[mx.array]]]
"""`mx.fast.metal_kernel`, or what takes and returns the same."""

Template = Mapping[str, mx.Dtype | int | bool]
Threads = tuple[int, int, int]
Returned = TypeVar("Returned")

SMALL = 8
"""MLX passes an input of fewer elements in another address space, which is another kernel."""


class DoesNotRun(KernelError):
    """This device cannot compile a kernel, or refuses to launch it."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel as Python calls it: `metal_kernels/<name>.metal`, and its arrays in order.

    One object a kernel, compared as such: it is looked up at every call.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Compilation:
    """One first use of a kernel's variant, or one trace of a compiled function.

    variant: template values, then how each input is passed, then the outputs' dtypes
    milliseconds: the first call less a second one
    """

    name: str
    variant: str
    milliseconds: float


@dataclass(frozen=True)
class KernelCounts:
    """How often kernels were compiled and called, since an engine was loaded or between two moments.

    device_kernel_calls: served by a kernel of this project
    reference_calls:     served by plain MLX or NumPy in its place
    Operations that stock MLX serves by choice are in neither.
    """

    jit_compiles: int = 0
    jit_compile_ms: float = 0.0
    device_kernel_calls: int = 0
    reference_calls: int = 0

    def __add__(self, other: "KernelCounts") -> "KernelCounts":
        return KernelCounts(
            self.jit_compiles + other.jit_compiles,
            self.jit_compile_ms + other.jit_compile_ms,
            self.device_kernel_calls + other.device_kernel_calls,
            self.reference_calls + other.reference_calls,
        )

    def since(self, before: "KernelCounts") -> "KernelCounts":
        """What happened after `before`."""
        return KernelCounts(
            self.jit_compiles - before.jit_compiles,
            self.jit_compile_ms - before.jit_compile_ms,
            self.device_kernel_calls - before.device_kernel_calls,
            self.reference_calls - before.reference_calls,
        )


@dataclass
class Registry:
    """Device kernels of one engine. Holds no weights; use it in the engine's thread.

    form:      how kernels run here: by Metal, by CUDA, or not at all
    build:     makes a callable of a kernel's text; None where the form is "reference"
    choices:   own or stock, for operations that stock MLX has
    required:  a call that no device kernel can serve raises KernelError
    timed:     a first use runs a second time, so that its compilation is timed
    refused:   kernels that do not run on this device after all, and why
    """

    form: Form
    build: Build | None = None
    choices: Choices = field(default_factory=Choices)
    required: bool = False
    timed: bool = True
    refused: dict[str, str] = field(default_factory=dict, init=False)
    compilations: list[Compilation] = field(default_factory=list, init=False)
    served: Counter[tuple[str, str]] = field(default_factory=Counter, init=False)
    _built: dict[Kernel, Callable[..., list[mx.array]]] = field(default_factory=dict, init=False)
    _seen: set[tuple[Any, ...]] = field(default_factory=set, init=False)
    _compiled: dict[Callable[..., Any], Callable[..., Any]] = field(
        default_factory=dict, init=False
    )

    @classmethod
    def for_device(cls, choices: Choices | None = None, required: bool = False) -> "Registry":
        """The registry of MLX's default device.

        Raises KernelError where device kernels are required and the device is the CPU.
        """
        choices = choices or Choices()
        if mx.default_device() == mx.cpu:
            if required:
                raise KernelError(
                    "Device kernels are required, but MLX computes on the CPU here, where none "
                    "runs: use a Mac with Apple silicon or an NVIDIA GPU, or do not require them."
                )
            return cls("reference", None, choices)
        if mx.metal.is_available():
            build: Any = mx.fast.metal_kernel  # its stub says that it returns some object
            return cls("metal", build, choices, required)
        return cls("cuda", cuda_kernel, choices, required)

    @property
    def on_device(self) -> bool:
        """Whether device kernels run here."""
        return self.build is not None

    def launch(
        self,
        kernel: Kernel,
        *,
        inputs: Sequence[mx.array | int | float],
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
        grid: Threads,
        threadgroup: Threads,
        template: Template | None = None,
    ) -> list[mx.array]:
        """Run `kernel` and return its outputs.

        inputs:  arrays, or numbers, which arrive as int32 and fp32 without dimensions
        outputs: shape and dtype of each; nothing in them is initialised
        grid:    threads in all, a multiple of `threadgroup` along each axis
        A variant that was not used before is compiled and timed here, which waits for the device.
        Raises DoesNotRun where the device cannot compile it or refuses to launch it, and ValueError
        where such a variant's grid is no multiple of its threadgroup.
        """
        arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        values = list(template.items()) if template else []
        shapes, dtypes = [shape for shape, _ in outputs], [dtype for _, dtype in outputs]
        call = self._callable(kernel)

        def run() -> list[mx.array]:
            return call(
                inputs=arrays,
                template=values,
                grid=grid,
                threadgroup=threadgroup,
                output_shapes=shapes,
                output_dtypes=dtypes,
            )

        # What MLX compiles anew for, besides the text.
        key = (kernel, *values, *[(a.dtype, _passed(a)) for a in arrays], *dtypes)
        if key in self._seen:
            out = run()
        else:
            if any(g % t for g, t in zip(grid, threadgroup, strict=True)):
                raise ValueError(
                    f"The grid {grid} of the kernel {kernel.name} is no multiple of its threadgroup "
                    f"{threadgroup}: round each axis up, and let threads behind the data do nothing."
                )
            mx.eval(arrays)
            try:
                out = self._first(kernel.name, _variant(values, arrays, dtypes), run)
            except (RuntimeError, ValueError) as error:  # how MLX says so
                raise DoesNotRun(
                    f"The kernel {kernel.name} does not run on this device ({reason(error)}): "
                    "report it with what `lse-mlx selftest --json` prints."
                ) from error
            self._seen.add(key)
        self.served[kernel.name, self.form] += 1
        return out

    def serve(
        self,
        name: str,
        fits: bool,
        kernel: Callable[[], Returned],
        reference: Callable[[], Returned],
    ) -> Returned:
        """What `kernel` returns where it can run here, else what `reference` does.

        name: of the kernel; fits: whether it takes these shapes and dtypes
        A kernel that turns out not to run on this device is not asked again. Raises KernelError for
        what the reference would have to serve where device kernels are required, and DoesNotRun
        where forms are being compared: a reference is not the form that was asked for.
        """
        compared = self.choices.forced
        if self.on_device and fits and (compared or name not in self.refused):
            try:
                return kernel()
            except DoesNotRun as error:
                if self.required or compared:
                    raise
                self.refused[name] = str(error)
        self.reference(name)
        return reference()

    def reference(self, name: str) -> None:
        """Say that plain MLX or NumPy is about to serve a call of the kernel `name`.

        Raises KernelError where device kernels are required.
        """
        if self.required:
            raise KernelError(
                f"The kernel {name} has no form for these shapes here, and device kernels are "
                "required: use another checkpoint, or do not require them."
            )
        self.served[name, "reference"] += 1

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, fused by MLX where device kernels run, its traces counted as compilations.

        function: element-wise, from arrays to one array or a tuple; the same one each time
        """
        if not self.on_device:
            return function
        if function not in self._compiled:
            self._compiled[function] = self._counting(function)
        return self._compiled[function]

    def counts(self) -> KernelCounts:
        """Totals so far."""
        reference = sum(n for (_, form), n in self.served.items() if form == "reference")
        return KernelCounts(
            jit_compiles=len(self.compilations),
            jit_compile_ms=sum((c.milliseconds for c in self.compilations), 0.0),
            device_kernel_calls=self.served.total() - reference,
            reference_calls=reference,
        )

    def forms(self) -> dict[str, dict[str, int]]:
        """For each kernel that was asked for, how many calls each form served."""
        out: dict[str, dict[str, int]] = {}
        for (name, form), calls in sorted(self.served.items()):
            out.setdefault(name, {})[form] = calls
        return out

    def _callable(self, kernel: Kernel) -> Callable[..., list[mx.array]]:
        if kernel not in self._built:
            assert self.build is not None, f"{kernel.name} was called where no kernel runs"
            text = read_kernel_text(kernel.name)
            self._built[kernel] = self.build(
                name=kernel.name,
                input_names=list(kernel.inputs),
                output_names=list(kernel.outputs),
                source=text.body,
                header=text.helpers,
            )
        return self._built[kernel]

    def _first(self, name: str, variant: str, run: Callable[[], Any]) -> Any:
        """Run for the first time, with the time that this took more than the second time."""
        first, out = _timed(run)
        second = 0.0
        if self.timed:
            second, out = _timed(run)
        self.compilations.append(Compilation(name, variant, 1000 * max(0.0, first - second)))
        return out

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        traces = 0
        seen: set[tuple[Any, ...]] = set()

        def body(*arrays: mx.array) -> Any:
            nonlocal traces
            traces += 1
            return function(*arrays)

        # Shapes must not matter: the rows of a prompt's last piece are any number.
        fused = mx.compile(body, shapeless=True)

        def call(*arrays: mx.array) -> Any:
            key = tuple([(a.dtype, a.ndim) for a in arrays])
            before, started = traces, perf_counter()
            if key not in seen:
                mx.eval(arrays)
                variant = ", ".join(f"{_name(a.dtype)} of rank {a.ndim}" for a in arrays)
                out = self._first(function.__name__, variant, lambda: fused(*arrays))
                seen.add(key)
                return out
            out = fused(*arrays)
            if traces != before:  # in another thread or stream MLX traces anew
                spent = 1000 * (perf_counter() - started)
                self.compilations.append(Compilation(function.__name__, "again", spent))
            return out

        return call


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until what `run` returns is computed, and what it returns."""
    mx.synchronize()
    started = perf_counter()
    out = run()
    mx.eval(out)
    mx.synchronize()
    return perf_counter() - started, out


def _passed(array: mx.array) -> int | bool:
    """How MLX hands an input over: without dimensions, or many elements or few."""
    return -1 if array.ndim == 0 else array.size >= SMALL


def _variant(
    template: Sequence[tuple[str, Any]], inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype]
) -> str:
    """A variant in words: template values, how each input is passed, then the outputs' dtypes."""
    words = {-1: " scalar", False: " small", True: ""}
    parts = [f"{name}={_name(value)}" for name, value in template]
    parts += [f"{_name(array.dtype)}{words[_passed(array)]}" for array in inputs]
    return ", ".join([*parts, "->", *map(_name, outputs)])


def _name(value: Any) -> str:
    return str(value).removeprefix("mlx.core.")
