"""Small defects, one at a time, put into the text of a kernel: do its checks notice them?

No file is changed: a registry builds the changed text in place of the kernel's own.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import mlx.core as mx
import numpy as np

from lse_mlx.kernels.kernel_text import KernelText, read_kernel_text
from lse_mlx.kernels.registry import Registry
from tests.kernels.modes import own_registry
from tests.metal_host.host import CompileError, HostError, HostOptions, MetalHost

Kind = Literal["barrier deleted", "index shifted", "comparison moved"]

_BARRIER = re.compile(r"\b(?:threadgroup|simdgroup)_barrier\([^;]*\);")
_COMPARISON = re.compile(r" (<=?|>=?) ")  # template brackets have no spaces on both sides
_MOVED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_MOST_SECONDS = 3  # a check takes less than one
_NO_TYPES = ("return", "else", "case")


@dataclass(frozen=True)
class Mutant:
    """A kernel with one defect.

    line:   of the kernel's text, as it was, without the spaces around it
    change: what stands there now
    nth:    of the mutants with this line and change, from 1
    """

    kernel: str
    kind: Kind
    line: str
    change: str
    nth: int
    text: KernelText

    def __str__(self) -> str:
        return f"{self.kernel}: `{self.line}` -> `{self.change}` ({self.nth})"


@dataclass(frozen=True)
class Check:
    """A call that puts a kernel to the test.

    run:       what it gives through a registry; the same arrays each time
    wanted:    what it ought to give
    tolerance: largest difference of floats; integers and what is not finite must be equal
    """

    run: Callable[[Registry], Sequence[mx.array]]
    wanted: Callable[[], Sequence[Any]]
    tolerance: float = 0.0


def mutants(kernel: str) -> list[Mutant]:
    """All of one kernel, those of the files it includes among them."""
    text = read_kernel_text(kernel)
    found: list[Mutant] = []
    seen: Counter[tuple[str, str]] = Counter()
    for part in ("helpers", "body"):
        own = getattr(text, part)
        for kind, start, end, instead in edits(own):
            changed = replace(text, **{part: own[:start] + instead + own[end:]})
            before = own[own.rfind("\n", 0, start) + 1 : start]
            after = own[end:].partition("\n")[0]
            line = (before + own[start:end] + after).strip()
            change = (before + instead + after).strip()
            seen[line, change] += 1
            found.append(Mutant(kernel, kind, line, change, seen[line, change], changed))
    return found


def few(candidates: Sequence[Mutant], most: dict[Kind, int]) -> list[Mutant]:
    """Some of each kind, always the same ones while their lines stay as they are."""
    chosen: list[Mutant] = []
    for kind, count in most.items():
        of_kind = [m for m in candidates if m.kind == kind]
        chosen += sorted(of_kind, key=lambda m: crc32(str(m).encode()))[:count]
    return chosen


def noticed(mutant: Mutant, checks: Sequence[Check], cache: Path | None = None) -> str:
    """How one of the checks notices the mutant, in checked mode; "" if none does.

    cache: where the compiled mutants are kept, if not where the host keeps all kernels
    """
    for seed in (0, 1):
        for check in checks:
            try:
                got = check.run(_registry(mutant, seed, cache))
            except CompileError:
                return "does not compile"
            except HostError as error:
                return str(error)
            if said := difference(check, got):
                return said
    return ""


def difference(check: Check, got: Sequence[mx.array]) -> str:
    """What is wrong with the arrays that a check got, or ""."""
    for n, (array, wanted) in enumerate(zip(got, check.wanted(), strict=True)):
        one, other = (_float64(a) for a in (array, wanted))
        finite = np.isfinite(other)
        if one.shape != other.shape or not np.array_equal(finite, np.isfinite(one)):
            return f"output {n}: shape, or what is finite"
        if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
            return f"output {n}: what is not finite"
        off = np.abs(one[finite] - other[finite]).max(initial=0.0)
        if off > check.tolerance:
            return f"output {n}: off by {off:.3g}"
    return ""


def _registry(mutant: Mutant, seed: int, cache: Path | None) -> Registry:
    options = HostOptions(checked=True, seed=seed, seconds=_MOST_SECONDS)
    host = MetalHost(options, cache) if cache else MetalHost(options)

    def build(**text: Any) -> Callable[..., list[mx.array]]:
        if text["name"] == mutant.kernel:
            text |= {"source": mutant.text.body, "header": mutant.text.helpers}
        return host.metal_kernel(**text)

    return own_registry(build)


def edits(text: str) -> Iterator[tuple[Kind, int, int, str]]:
    """Each place that is changed: kind, start, end and what stands there instead."""
    for match in _BARRIER.finditer(text):
        yield "barrier deleted", match.start(), match.end(), ";"
    for start, end in _subscripts(text):
        yield "index shifted", start, end, f"{text[start:end]} + 1"
    for match in _COMPARISON.finditer(text):
        yield "comparison moved", match.start(1), match.end(1), _MOVED[match[1]]


def _subscripts(text: str) -> Iterator[tuple[int, int]]:
    """Where the index of each array access lies; the sizes in declarations are none."""
    declared = False
    for opening in re.finditer(r"\[", text):
        start = opening.end()
        if text[opening.start() - 1] != "]":  # else one more dimension of the same
            declared = _declares(text[: opening.start()])
        end = start
        depth = 1
        while depth:
            depth += {"[": 1, "]": -1}.get(text[end], 0)
            end += 1
        if not declared:
            yield start, end - 1


def _declares(before: str) -> bool:
    """Whether a bracket behind `before` gives the size of a new array: a type stands before it."""
    name = re.search(r"(\S*?)\s+\w+$", before)
    if name is None or name[1] in _NO_TYPES:
        return False
    return re.search(r"\w>?$", name[1]) is not None


def _float64(array: Any) -> np.ndarray:
    if isinstance(array, mx.array) and array.dtype == mx.bfloat16:
        array = array.astype(mx.float32)
    return np.array(array).astype(np.float64)
