"""Loops over arrays that are a thread's registers are unrolled: the text says so at each."""

import re

import pytest

from lse_mlx.kernels.kernel_text import read_kernel_text

# A loop whose end is known when the kernel is compiled: capitals are template values and constants.
FIXED = re.compile(r"for \(u?int \w+ = [\w ]+; \w+ < [A-Z0-9][A-Z0-9_ /*]*; \+\+\w\) \{")
MARK = "MLX_MTL_PRAGMA_UNROLL"


@pytest.mark.parametrize(
    "kernel",
    [
        "gated_delta_verify",
        "skinny_qmm",
        "skinny_qmm_matrix",
        "sliding_attention",
        "verify_attention",
    ],
)
def test_every_loop_of_fixed_length_is_marked(kernel: str) -> None:
    text = read_kernel_text(kernel)
    lines = [line.strip() for line in f"{text.helpers}\n{text.body}".splitlines() if line.strip()]
    loops = [n for n, line in enumerate(lines) if FIXED.fullmatch(line)]
    assert len(loops) >= 4
    assert [lines[n] for n in loops if lines[n - 1] != MARK] == []
    assert "#pragma unroll" not in lines, "one spelling for it"
    defined = lines.index(f"#define {MARK}")
    assert defined < lines.index(MARK), "for a compiler that has none"
