"""The kernels' checks notice a deleted barrier, a shifted index, a comparison moved by one.

Every commit tries a few mutants of each kernel, always the same ones while the text stays as it is;
`-m slow` tries all of them, in minutes.
"""

from pathlib import Path

import pytest

from lse_mlx.kernels.kernel_text import kernel_folder, read_kernel_text
from tests.kernels.equivalent_mutants import EQUIVALENT, is_equivalent
from tests.kernels.modes import needs_compiler
from tests.kernels.mutation_checks import checks_of
from tests.kernels.mutations import Kind, Mutant, edits, few, mutants, noticed

KERNELS = sorted(file.stem for file in kernel_folder().glob("*.metal"))
FEW: dict[Kind, int] = {"barrier deleted": 2, "index shifted": 1, "comparison moved": 1}

each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def real_mutants(kernel: str) -> list[Mutant]:
    return [mutant for mutant in mutants(kernel) if not is_equivalent(mutant)]


@needs_compiler
@each_kernel
def test_the_kernel_itself_passes_its_checks(kernel: str) -> None:
    as_it_is = Mutant(kernel, "index shifted", "", "", 1, read_kernel_text(kernel))
    assert noticed(as_it_is, checks_of(kernel)) == ""


@needs_compiler
@each_kernel
def test_a_few_mutants_are_noticed(kernel: str) -> None:
    checks = checks_of(kernel)
    chosen = few(real_mutants(kernel), FEW)
    assert [str(mutant) for mutant in chosen if not noticed(mutant, checks)] == []


@pytest.mark.slow
@needs_compiler
@each_kernel
def test_all_mutants_are_noticed(kernel: str, tmp_path: Path) -> None:
    checks = checks_of(kernel)
    unnoticed = [str(m) for m in real_mutants(kernel) if not noticed(m, checks, tmp_path)]
    assert unnoticed == []


def test_the_list_of_equivalent_mutants_has_no_others() -> None:
    every = [mutant for kernel in KERNELS for mutant in mutants(kernel)]
    assert [one for one in EQUIVALENT if not any(one.is_it(mutant) for mutant in every)] == []


def changed(text: str) -> list[str]:
    return [text[:start] + instead + text[end:] for _, start, end, instead in edits(text)]


def test_barriers_are_deleted() -> None:
    text = "a(); threadgroup_barrier(mem_flags::mem_threadgroup); simdgroup_barrier(x);"
    assert changed(text) == [
        "a(); ; simdgroup_barrier(x);",
        "a(); threadgroup_barrier(mem_flags::mem_threadgroup); ;",
    ]


def test_indices_are_shifted_and_sizes_are_not() -> None:
    assert changed("float a[N]; threadgroup uint b[2][3]; vec<T, 4> c[8];") == []
    assert changed("a[i] = b[2 * j][k]; return c[d[0]];") == [
        "a[i + 1] = b[2 * j][k]; return c[d[0]];",
        "a[i] = b[2 * j + 1][k]; return c[d[0]];",
        "a[i] = b[2 * j][k + 1]; return c[d[0]];",
        "a[i] = b[2 * j][k]; return c[d[0] + 1];",
        "a[i] = b[2 * j][k]; return c[d[0 + 1]];",
    ]
    assert (
        changed("const float x = a > b[i] ? 1 : 2;")[0] == "const float x = a > b[i + 1] ? 1 : 2;"
    )


def test_comparisons_are_moved() -> None:
    assert changed("for (int i = 0; i < f<float, 2>(x); i++) if (a >= b && c >> 2 > 1) {}") == [
        "for (int i = 0; i <= f<float, 2>(x); i++) if (a >= b && c >> 2 > 1) {}",
        "for (int i = 0; i < f<float, 2>(x); i++) if (a > b && c >> 2 > 1) {}",
        "for (int i = 0; i < f<float, 2>(x); i++) if (a >= b && c >> 2 >= 1) {}",
    ]
