"""Runs a kernel's text in every mode of the host harness; all must agree to the last bit."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.registry import Build, Registry
from tests.metal_host.build import why_not_here
from tests.metal_host.host import HostOptions, MetalHost

MODES = {
    "plain": HostOptions(),
    "with fused multiply-add": HostOptions(contract=True),
    "checked, threads in random order": HostOptions(checked=True, seed=0),
    "checked, one SIMD-group as far as it gets": HostOptions(checked=True, seed=1),
}

needs_compiler = pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
"""For modules and tests that run kernels: `pytestmark = needs_compiler`."""


def own_registry(build: Build) -> Registry:
    """A registry that runs every kernel by `build`, and never stock MLX."""
    return Registry("metal", build=build, choices=Choices(mode="own"), timed=False)


def in_every_mode(run: Callable[[Registry], list[mx.array]]) -> list[np.ndarray]:
    """What `run` returns with a registry of the harness, the same bits in every mode.

    bfloat16 arrays come as float32. Any NaN equals any other: Metal does not promise its bits.
    """
    results = {
        mode: [_numpy(array) for array in run(own_registry(MetalHost(options).metal_kernel))]
        for mode, options in MODES.items()
    }
    plain = results["plain"]
    for mode, arrays in results.items():
        assert len(arrays) == len(plain), f"{mode}: {len(arrays)} arrays"
        for n, (wanted, got) in enumerate(zip(plain, arrays, strict=True)):
            assert_same_bits(wanted, got, f"output {n}, plain and {mode}")
    return plain


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


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def _numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
