"""How the harness's own tests run a few lines of Metal."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.metal_host.host import HostError, HostOptions, LaunchRecord, MetalHost

WHO = (
    "uint i = thread_position_in_grid.x; uint lane = thread_index_in_simdgroup; "
    "uint sg = simdgroup_index_in_threadgroup;\n"
)
"""The first line of most bodies below: who am I."""

X = np.arange(64, dtype=np.float32)


def run(body: str, inputs: Sequence[Any] = (), **named: Any) -> np.ndarray:
    """The output of `launch`."""
    return launch(body, inputs, **named)[0]


def launch(
    body: str,
    inputs: Sequence[Any] = (),
    *,
    threads: int = 64,
    threadgroup: int = 64,
    shape: tuple[int, ...] = (64,),
    dtype: mx.Dtype = mx.float32,
    header: str = "",
    template: Sequence[tuple[str, Any]] | None = None,
    init: float | None = None,
    atomic: bool = False,
    **options: Any,
) -> tuple[np.ndarray, LaunchRecord]:
    """The output `o` of a kernel "k" over inputs `a0`, `a1`, ..., and what the launch did.

    options: those of HostOptions
    """
    host = MetalHost(HostOptions(**options))
    names = [f"a{n}" for n in range(len(inputs))]
    kernel = host.metal_kernel("k", names, ["o"], body, header=header, atomic_outputs=atomic)
    (output,) = kernel(
        inputs=[mx.array(a) if isinstance(a, np.ndarray) else a for a in inputs],
        template=template,
        grid=(threads, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
        init_value=init,
    )
    return np.array(output), host.launches[-1]


def refused(message: str, *arguments: Any, **named: Any) -> str:
    """`run` ends in an error that matches `message`; returns its text."""
    with pytest.raises(HostError, match=message) as caught:
        run(*arguments, **named)
    return str(caught.value)
