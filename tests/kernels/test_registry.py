"""The registry: which form serves, what counts as a compilation, and what fails closed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from lse_mlx.errors import KernelError
from lse_mlx.kernels.kernel_text import kernel_folder
from lse_mlx.kernels.registry import DoesNotRun, Kernel, KernelCounts, Registry
from tests.tiny_models import on_cpu

TEXT = min(path.stem for path in kernel_folder().glob("*.metal"))
"""Some kernel of the project: its text is read, but what follows never runs it."""

DOUBLE = Kernel(TEXT, ("x",), ("y",))


@dataclass
class Recorder:
    """Builds kernels that double their first input, and keeps what it was asked."""

    built: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    fault: Exception | None = None

    def build(self, **text: Any) -> Callable[..., list[mx.array]]:
        self.built.append(text)

        def call(**arguments: Any) -> list[mx.array]:
            self.calls.append(arguments)
            if self.fault is not None:
                raise self.fault
            outputs = zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
            return [
                (2 * mx.broadcast_to(arguments["inputs"][0], shape)).astype(d)
                for shape, d in outputs
            ]

        return call


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def registry(recorder: Recorder) -> Registry:
    return Registry("metal", recorder.build)


def double(
    registry: Registry, x: mx.array | int | float, kernel: Kernel = DOUBLE, **template: Any
) -> mx.array:
    shape = x.shape if isinstance(x, mx.array) else ()
    dtype = x.dtype if isinstance(x, mx.array) else mx.float32
    return registry.launch(
        kernel,
        inputs=[x],
        outputs=[(shape, dtype)],
        grid=(64, 1, 1),
        threadgroup=(32, 1, 1),
        template=template,
    )[0]


def is_new(registry: Registry, x: mx.array | int | float, **template: Any) -> bool:
    before = registry.counts().jit_compiles
    double(registry, x, **template)
    return registry.counts().jit_compiles > before


def test_an_input_that_crosses_from_seven_to_eight_elements_is_a_new_kernel(registry: Registry):
    found = [is_new(registry, mx.ones((size,))) for size in (1, 7, 8, 64)]
    assert found == [True, False, True, False]


def test_a_number_is_passed_in_a_third_way(registry: Registry):
    assert is_new(registry, mx.ones((1,)))
    assert is_new(registry, 3.0)
    assert not is_new(registry, 4.0)
    assert is_new(registry, 3), "an integer arrives as int32"
    assert not is_new(registry, mx.array(5.0)), "an array without dimensions is a number"


def test_dtypes_and_template_values_are_new_kernels_and_shapes_are_not(registry: Registry):
    assert is_new(registry, mx.ones((8, 9)), rows=1)
    assert not is_new(registry, mx.ones((9, 80)), rows=1)
    assert not is_new(registry, mx.ones((2, 2, 2)), rows=1)
    assert is_new(registry, mx.ones((8, 9)), rows=2)
    assert is_new(registry, mx.ones((8, 9)), rows=2, whole=True)
    assert is_new(registry, mx.ones((8, 9)), rows=2, whole=False)
    assert is_new(registry, mx.ones((8, 9), mx.bfloat16), rows=1)
    assert not is_new(registry, mx.zeros((8, 9)), rows=1)


def test_the_same_text_under_other_names_of_arrays_is_a_new_kernel(
    registry: Registry, recorder: Recorder
):
    double(registry, mx.ones((8,)))
    double(registry, mx.ones((8,)), Kernel(TEXT, ("a",), ("b",)))
    assert registry.counts().jit_compiles == 2
    assert [b["input_names"] for b in recorder.built] == [["x"], ["a"]]


def test_a_kernel_is_built_once_from_its_text(registry: Registry, recorder: Recorder):
    for size in (8, 9, 1):
        double(registry, mx.ones((size,)))
    [text] = recorder.built
    assert text["name"] == TEXT
    assert text["output_names"] == ["y"]
    assert text["source"] and "//" not in text["source"] + text["header"]


def test_what_is_launched_is_what_was_asked_for(registry: Registry, recorder: Recorder):
    y = double(registry, mx.array([[1.0, 2.0]]), rows=2, dtype=mx.float32)
    assert y.tolist() == [[2.0, 4.0]]
    last = recorder.calls[-1]
    assert (last["grid"], last["threadgroup"]) == ((64, 1, 1), (32, 1, 1))
    assert last["template"] == [("rows", 2), ("dtype", mx.float32)]
    assert last["output_shapes"] == [(1, 2)]


def test_a_compilation_is_named_and_timed(registry: Registry):
    double(registry, mx.ones((8, 8), mx.bfloat16), rows=3)
    double(registry, 1.5)
    assert [(c.name, c.variant) for c in registry.compilations] == [
        (TEXT, "rows=3, bfloat16, ->, bfloat16"),
        (TEXT, "float32 scalar, ->, float32"),
    ]
    assert all(c.milliseconds >= 0 for c in registry.compilations)
    counts = registry.counts()
    assert counts.jit_compiles == 2
    assert counts.jit_compile_ms == sum(c.milliseconds for c in registry.compilations)


def test_a_later_use_runs_once_and_waits_for_nothing(registry: Registry, recorder: Recorder):
    double(registry, mx.ones((8,)))
    assert len(recorder.calls) == 2  # the second is what the first is compared with
    double(registry, mx.ones((8,)))
    assert len(recorder.calls) == 3
    assert registry.counts() == KernelCounts(
        1, registry.counts().jit_compile_ms, device_kernel_calls=2
    )


def test_without_timing_a_first_use_runs_once(recorder: Recorder):
    registry = Registry("metal", recorder.build, timed=False)
    double(registry, mx.ones((8,)))
    assert len(recorder.calls) == 1
    assert len(registry.compilations) == 1


def test_a_kernel_that_does_not_compile_is_one_sentence_and_is_tried_again(
    registry: Registry, recorder: Recorder
):
    recorder.fault = RuntimeError("[metal::Device] Unable to build metal library. More lines.")
    with pytest.raises(DoesNotRun, match="Unable to build metal library"):
        double(registry, mx.ones((8,)))
    assert registry.counts() == KernelCounts()
    recorder.fault = None
    assert is_new(registry, mx.ones((8,)))


def served(registry: Registry, fits: bool = True) -> str:
    """Which of the two did it."""

    def kernel() -> str:
        double(registry, mx.ones((8,)))
        return "kernel"

    return registry.serve(TEXT, fits, kernel, lambda: "reference")


def test_a_kernel_serves_what_it_takes_and_the_reference_the_rest(registry: Registry):
    assert served(registry) == "kernel"
    assert served(registry, fits=False) == "reference"
    assert served(Registry("reference")) == "reference"
    assert registry.forms() == {TEXT: {"metal": 1, "reference": 1}}
    assert registry.refused == {}


@pytest.mark.parametrize("fault", [RuntimeError("No such function."), ValueError("Too large.")])
def test_a_kernel_that_the_device_refuses_is_asked_once_and_then_its_reference(
    registry: Registry, recorder: Recorder, fault: Exception
):
    recorder.fault = fault
    assert served(registry) == "reference"
    assert str(fault).rstrip(".") in registry.refused[TEXT]
    recorder.fault, asked = None, len(recorder.calls)
    assert served(registry) == "reference"
    assert len(recorder.calls) == asked
    assert registry.forms() == {TEXT: {"reference": 2}}


def test_a_kernel_that_the_device_refuses_is_an_error_where_kernels_are_required(
    recorder: Recorder,
):
    strict = Registry("metal", recorder.build, required=True)
    recorder.fault = RuntimeError("No such function.")
    with pytest.raises(KernelError, match="No such function"):
        served(strict)
    with pytest.raises(KernelError, match="no form for these shapes"):
        served(strict, fits=False)


def test_the_forms_that_served_are_counted(registry: Registry):
    double(registry, mx.ones((8,)))
    double(registry, mx.ones((8,)))
    registry.reference("topk")
    assert registry.forms() == {TEXT: {"metal": 2}, "topk": {"reference": 1}}
    counts = registry.counts()
    assert (counts.device_kernel_calls, counts.reference_calls) == (2, 1)


def test_counts_of_a_stretch_are_a_difference_and_add_up():
    first, last = KernelCounts(1, 2.0, 3, 4), KernelCounts(5, 7.0, 9, 11)
    stretch = last.since(first)
    assert stretch == KernelCounts(4, 5.0, 6, 7)
    assert first + stretch == last


def test_required_kernels_turn_a_reference_into_an_error(recorder: Recorder):
    strict = Registry("metal", recorder.build, required=True)
    double(strict, mx.ones((8,)))
    with pytest.raises(KernelError, match="kernel topk"):
        strict.reference("topk")
    assert strict.counts().reference_calls == 0


def test_a_cpu_has_references_only_and_says_so_where_kernels_are_required():
    with on_cpu():
        registry = Registry.for_device()
        assert (registry.form, registry.on_device) == ("reference", False)
        registry.reference("topk")
        assert registry.counts() == KernelCounts(reference_calls=1)
        with pytest.raises(KernelError, match="computes on the CPU here"):
            Registry.for_device(required=True)


def scaled(x: mx.array, y: mx.array) -> mx.array:
    return x * 3 + y


def test_traces_of_compiled_functions_are_counted_once_per_dtype_and_rank(registry: Registry):
    fused = registry.compiled(scaled)
    assert registry.compiled(scaled) is fused
    for rows in (1, 7, 8, 300):
        assert fused(mx.ones((rows, 2)), mx.ones((rows, 2))).shape == (rows, 2)
    assert registry.counts().jit_compiles == 1
    fused(mx.ones((2, 2), mx.bfloat16), mx.ones((2, 2), mx.bfloat16))
    fused(mx.ones((2,)), mx.ones((2,)))
    assert [(c.name, c.variant) for c in registry.compilations] == [
        ("scaled", "float32 of rank 2, float32 of rank 2"),
        ("scaled", "bfloat16 of rank 2, bfloat16 of rank 2"),
        ("scaled", "float32 of rank 1, float32 of rank 1"),
    ]
    assert registry.counts().device_kernel_calls == 0


def test_a_trace_that_mlx_does_again_is_counted_again(registry: Registry):
    """On another stream MLX's own cache of traces begins anew."""
    fused, x = registry.compiled(scaled), mx.ones((2, 2))
    mx.eval(fused(x, x))
    with mx.stream(mx.new_stream(mx.Device(mx.cpu))):
        mx.eval(fused(x, x))
        mx.eval(fused(x, x))
    assert len(registry.compilations) == 2


def test_without_a_device_a_function_stays_as_it_is():
    assert Registry("reference").compiled(scaled) is scaled


def test_a_grid_that_is_no_multiple_of_the_threadgroup_is_refused(registry: Registry) -> None:
    with pytest.raises(ValueError, match=r"grid \(65, 1, 1\) of the kernel .* no multiple"):
        registry.launch(
            DOUBLE,
            inputs=[mx.zeros(8)],
            outputs=[((8,), mx.float32)],
            grid=(65, 1, 1),
            threadgroup=(32, 1, 1),
        )
    assert registry.counts() == KernelCounts()
