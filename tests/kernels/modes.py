"""Runs a kernel's text in every mode of the host harness; all must agree to the last bit.

Every test of a kernel's values runs in every mode. Where that takes long (many shapes, shapes of
real models) it runs plainly by default, and in every mode with `-m slow`: `each_harness`. Products
that take many minutes in checked mode run plainly alone; their tests say so.

An error names the mode that it came in. Where a kernel lets only some lanes of a SIMD-group come to a
SIMD-group function, which Metal defines and CUDA does not, checked modes refuse it; `partial_simd`
allows it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.registry import Build, Registry
from tests.metal_host.build import why_not_here
from tests.metal_host.host import HostError, HostOptions, MetalHost

# What never ends was given up in the plain mode, and shapes of real models take minutes here.
_CHECKED = HostOptions(checked=True, partial_simd=False, seconds=600)

MODES = {
    "plain": HostOptions(),
    "with fused multiply-add": HostOptions(contract=True),
    "checked, threads in random order": replace(_CHECKED, seed=0),
    "checked, one SIMD-group as far as it gets": replace(_CHECKED, seed=1),
}

needs_compiler = pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
"""For modules and tests that run kernels: `pytestmark = needs_compiler`."""


def own_registry(build: Build) -> Registry:
    """A registry that runs every kernel by `build`, and never stock MLX."""
    return Registry("metal", build=build, choices=Choices(mode="own"), timed=False)


def plain() -> Registry:
    """A registry that runs kernels plainly."""
    return own_registry(MetalHost().metal_kernel)


def every_mode(partial_simd: bool = False) -> Registry:
    """A registry that runs each launch in every mode: the bits must be equal, the plain come back."""
    return own_registry(partial(kernel_in_every_mode, modes(partial_simd)))


def modes(partial_simd: bool) -> dict[str, HostOptions]:
    """The modes; whether some lanes alone may come to a SIMD-group function in the checked ones."""
    return {
        mode: replace(how, partial_simd=how.partial_simd or partial_simd)
        for mode, how in MODES.items()
    }


Harness = Callable[[], Registry]
SLOWLY_IN_EVERY_MODE = pytest.param(
    every_mode, id="every mode", marks=[needs_compiler, pytest.mark.slow]
)
each_harness = pytest.mark.parametrize(
    "harness", [pytest.param(plain, id="plain", marks=needs_compiler), SLOWLY_IN_EVERY_MODE]
)
"""For tests that take `harness: Harness`: plainly by default, in every mode with `-m slow`."""


def kernel_in_every_mode(
    modes: dict[str, HostOptions], **text: Any
) -> Callable[..., list[mx.array]]:
    """`metal_kernel`'s call convention; a launch is one in every mode and returns the plain one's."""
    kernels = {mode: MetalHost(how).metal_kernel(**text) for mode, how in modes.items()}

    def launch(**call: Any) -> list[mx.array]:
        __tracebackhide__ = True
        outputs: dict[str, list[mx.array]] = {}
        for mode, kernel in kernels.items():
            outputs[mode] = _in_mode(mode, partial(kernel, **call))
        _assert_agreed({mode: [_numpy(a) for a in arrays] for mode, arrays in outputs.items()})
        return outputs["plain"]

    return launch


def in_every_mode(
    run: Callable[[Registry], list[mx.array]], partial_simd: bool = False
) -> list[np.ndarray]:
    """What `run` returns with a registry of the harness, the same bits in every mode.

    bfloat16 arrays come as float32. Any NaN equals any other: Metal does not promise its bits.
    """
    __tracebackhide__ = True
    results: dict[str, list[np.ndarray]] = {}
    for mode, options in modes(partial_simd).items():
        arrays = _in_mode(mode, partial(run, own_registry(MetalHost(options).metal_kernel)))
        results[mode] = [_numpy(array) for array in arrays]
    _assert_agreed(results)
    return results["plain"]


def _in_mode(mode: str, run: Callable[[], list[mx.array]]) -> list[mx.array]:
    """What `run` returns; errors of the harness say in which mode they came."""
    __tracebackhide__ = True
    try:
        return run()
    except HostError as error:
        raise type(error)(f"{mode}: {error}") from None


def assert_same_bits(wanted: np.ndarray, got: np.ndarray, what: str = "") -> None:
    """Equal shape, dtype and bits, where a NaN equals any NaN and -0 is not 0."""
    assert (wanted.shape, wanted.dtype) == (got.shape, got.dtype), what
    different = _bits(wanted) != _bits(got)
    if wanted.dtype.kind == "f":
        different &= ~(np.isnan(wanted) & np.isnan(got))
    assert not different.any(), (
        f"{what}: {different.sum()} of {different.size} differ, "
        f"the first at {tuple(int(i) for i in np.argwhere(different)[0])}"
    )


def _assert_agreed(results: dict[str, list[np.ndarray]]) -> None:
    """The same bits from each mode."""
    wanted = results["plain"]
    for mode, arrays in results.items():
        assert len(arrays) == len(wanted), f"{mode}: {len(arrays)} arrays"
        for n, (array, got) in enumerate(zip(wanted, arrays, strict=True)):
            assert_same_bits(array, got, f"output {n}, plain and {mode}")


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def _numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
