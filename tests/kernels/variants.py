"""Every variant of every kernel that the project's models use, found by calling the kernels.

MLX compiles a kernel anew for other template values, dtypes and small inputs. The table below calls
the functions of `lse_mlx/kernels` with a registry that writes launches down and computes nothing,
so it names functions and shapes, and nothing here repeats how they launch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.dynamic_conv import dynamic_conv
from lse_mlx.kernels.gated_delta_verify import DeltaRows, fold_rows, gated_delta_verify
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.selector import select
from lse_mlx.kernels.skinny_qmm import skinny_qmm
from lse_mlx.kernels.sliding_attention import RingView, sliding_attention
from lse_mlx.kernels.topk import topk
from lse_mlx.kernels.verify_attention import verify_attention
from tests.metal_host.generate import KernelSource, Template

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
PASSES = range(1, 9)
"""Rows of a plain step and of verify passes."""

Launches = Callable[[Registry], object]


@dataclass(frozen=True)
class Variant:
    """One launch: what MLX compiles for it, and what it was launched with.

    mlx_text: MLX's own text, with its signature
    """

    kernel: KernelSource
    inputs: list[mx.array]
    output_dtypes: list[mx.Dtype]
    template: Template
    mlx_text: str

    def __str__(self) -> str:
        template = ", ".join(
            f"{name}={str(value).removeprefix('mlx.core.')}" for name, value in self.template
        )
        dtypes = ", ".join(str(a.dtype).removeprefix("mlx.core.") for a in self.inputs)
        return f"{self.kernel.name} <{template}> ({dtypes})"


@dataclass
class LastForm(Choices):
    """Takes the last of the project's forms, where the registry of tests takes the first."""

    def form(self, operation: str, shape: str, own: Sequence[str]) -> str:
        return own[-1]


def variants() -> list[Variant]:
    """All of them, each once."""
    found: dict[str, Variant] = {}
    for launches in table():
        for choices in (Choices(mode="own"), Choices(exact=True), LastForm()):
            for variant in recorded(launches, choices):
                found.setdefault(variant.mlx_text, variant)
    return list(found.values())


def recorded(launches: Launches, choices: Choices) -> list[Variant]:
    """The launches of a call, none of which computes anything: outputs are zeros."""
    variants: list[Variant] = []

    def build(**text: Any) -> Callable[..., list[mx.array]]:
        kernel = KernelSource(
            text["name"],
            tuple(text["input_names"]),
            tuple(text["output_names"]),
            text["source"],
            text["header"],
        )
        mlx_kernel: Any = mx.fast.metal_kernel(**text)

        def launch(*, inputs: list[mx.array], **how: Any) -> list[mx.array]:
            written = generated_by_mlx(mlx_kernel, inputs, how)
            dtypes = how["output_dtypes"]
            variants.append(Variant(kernel, inputs, dtypes, how["template"], written))
            shapes = zip(how["output_shapes"], dtypes, strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return launch

    launches(Registry("metal", build=build, choices=choices))
    return variants


def generated_by_mlx(
    kernel: Callable[..., list[mx.array]], inputs: Sequence[mx.array], how: dict[str, Any]
) -> str:
    """The text that MLX would hand to Metal; exporting a function makes it without a GPU."""
    nodes: list[dict[str, Any]] = []
    mx.export_function(nodes.append, lambda *arrays: kernel(inputs=list(arrays), **how), *inputs)
    (node,) = (n for n in nodes if n.get("name") == "CustomKernel")
    return node["arguments"][1]


# ------------------------------------------------------------------------------ the table
def table() -> Iterator[Launches]:
    """Calls with the shapes that decide a variant; what else is large in a model is small here."""
    yield from _topk()
    yield from _selector()
    yield from _dynamic_conv()
    yield from _sliding_attention()
    yield from _verify_attention()
    yield from _gated_delta()
    yield from _products()


def _topk() -> Iterator[Launches]:
    for dtype in (mx.float32, mx.bfloat16):
        for rows, k in ((7, 16), (1, 1), (1, 32)):
            yield partial(topk, logits=mx.zeros((rows, 4096), dtype), k=k)


def _selector() -> Iterator[Launches]:
    for positions, k, rank in ((7, 16, 256), (7, 16, 64), (1, 8, 64)):
        yield partial(
            select,
            logits=mx.zeros((positions, k)),
            ids=mx.zeros((positions, k), mx.int32),
            predecessors=mx.zeros((positions, k, rank)),
            gates=mx.zeros((positions, rank)),
            successors=mx.zeros((positions, k, rank)),
            vocab_size=4096,
        )


def _dynamic_conv() -> Iterator[Launches]:
    for rows, hidden, group in ((8, 5120, 16), (8, 320, 16), (1, 320, 16)):
        groups = hidden // group
        yield partial(
            dynamic_conv,
            x=mx.zeros((rows, hidden)),
            base=mx.zeros((2, 2, groups, group)),
            dynamic=mx.zeros((rows, 4 * groups)),
            side=1,
        )


def _sliding_attention() -> Iterator[Launches]:
    for heads, kv_heads, head_dim, window in ((32, 8, 128, 2048), (8, 2, 64, 128)):
        for rows in PASSES:
            yield partial(
                sliding_attention,
                queries=mx.zeros((rows, heads, head_dim)),
                ring=mx.zeros((2, kv_heads, 64, head_dim)),
                block=mx.zeros((2, kv_heads, rows, head_dim)),
                view=RingView(position=20, live=20, window=window, slots=64, block=rows),
            )


def _verify_attention() -> Iterator[Launches]:
    for heads, kv_heads, head_dim in ((24, 4, 256), (4, 2, 64)):
        for dtype in FLOATS:
            for rows in (*PASSES, 64):
                yield partial(
                    verify_attention,
                    queries=mx.zeros((1, heads, rows, head_dim), dtype),
                    keys=mx.zeros((1, kv_heads, 256, head_dim), dtype),
                    values=mx.zeros((1, kv_heads, 256, head_dim), dtype),
                    length=100,
                    scale=head_dim**-0.5,
                )


def _gated_delta() -> Iterator[Launches]:
    for key_heads, value_heads, width in ((16, 48, 128), (4, 8, 64)):
        for dtype in FLOATS:
            state = mx.zeros((1, value_heads, width, width))
            new, old = (
                DeltaRows(
                    mx.zeros((1, rows, (2 * key_heads + value_heads) * width), dtype),
                    mx.zeros((1, rows, value_heads)),
                    mx.zeros((1, rows, value_heads)),
                )
                for rows in (1, 8)
            )
            for pending, whole in ((None, True), (None, False), (old, False), (old, True)):
                n_pending = 0 if pending is None else 8
                yield partial(
                    gated_delta_verify,
                    rows=new,
                    pending=pending,
                    n_pending=n_pending,
                    state=state,
                    whole=whole,
                )
            yield partial(fold_rows, rows=new, n=1, state=state)


def _products() -> Iterator[Launches]:
    of_target = [(dtype, dtype, 4) for dtype in FLOATS] + [(mx.float32, mx.bfloat16, 4)]
    of_drafter = [(mx.float32, mx.float32, 8), (mx.float32, mx.bfloat16, 8)]
    for x_dtype, scale_dtype, bits in (*of_target, *of_drafter, (mx.bfloat16, mx.bfloat16, 8)):
        for rows in (*PASSES, 20):
            yield partial(
                skinny_qmm,
                x=mx.zeros((rows, 128), x_dtype),
                weight=mx.zeros((64, 128 * bits // 32), mx.uint32),
                scales=mx.zeros((64, 2), scale_dtype),
                biases=mx.zeros((64, 2), scale_dtype),
                bits=bits,
                group_size=64,
            )
