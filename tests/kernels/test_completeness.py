"""What each kernel needs beside its text is there: the list is in metal_kernels/README.md."""

import re
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.kernel_text import kernel_folder
from lse_mlx.kernels.registry import Registry
from lse_mlx.selftest.checks import STOCK_OPERATIONS
from lse_mlx.selftest.report import kernel_checks
from tests.kernels.modes import needs_compiler
from tests.kernels.mutation_checks import checks_of

KERNELS = sorted(file.stem for file in kernel_folder().glob("*.metal"))
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
RULES = Path(__file__).parents[2] / "metal_kernels" / "README.md"

each_kernel = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(scope="module")
def launched_by_the_selftest() -> set[str]:
    """The kernels that the self-test's checks launch, found with kernels that compute nothing."""
    launched: set[str] = set()

    def build(*, name: str, **text: Any) -> Callable[..., list[mx.array]]:
        def launch(**call: Any) -> list[mx.array]:
            launched.add(name)
            shapes = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return launch

    registry = Registry("metal", build=build, choices=Choices(mode="own"), timed=False)
    for check in kernel_checks(registry):
        if check.subject == STOCK_OPERATIONS:
            continue
        for form in check.forms:
            with registry.choices.forcing(form) if form else nullcontext():
                check.arrays(registry)
    return launched


@each_kernel
def test_the_selftest_launches_it(kernel: str, launched_by_the_selftest: set[str]) -> None:
    assert kernel in launched_by_the_selftest, (
        f"no check of the self-test launches the kernel {kernel}: add one to lse_mlx/selftest/values.py"
    )


@each_kernel
def test_the_page_has_it(kernel: str) -> None:
    assert re.search(rf"\b{kernel}\b", PAGE.read_text("utf-8")), (
        f"docs/kernels.md does not name the kernel {kernel}: say there what it does, and why so"
    )


def test_a_kernel_without_a_check_is_named() -> None:
    with pytest.raises(LookupError, match=r"kernel row_max has no check .*mutation_checks\.py"):
        checks_of("row_max")


@needs_compiler
def test_the_example_of_a_test_passes() -> None:
    [block] = re.findall(r"^   ```\n(.*?)^   ```$", RULES.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(block), names)
    [test] = [value for name, value in names.items() if name.startswith("test_")]
    test()
