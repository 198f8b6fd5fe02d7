"""A check of the self-test, and what came of it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from lse_mlx.errors import LseError
from lse_mlx.kernels.race import finite_or_none
from lse_mlx.kernels.registry import Registry

Status = Literal["passed", "failed", "not run"]

REFUSALS = (
    LseError,
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    MemoryError,
    AssertionError,
)
"""What MLX and this package raise where a kernel does not compile or run, or MLX has changed."""

STOCK_OPERATIONS = "stock operations"
"""The subject of what no kernel of the project serves, and exact decoding relies on."""


@dataclass(frozen=True)
class Outcome:
    """What came of a check.

    subject: the operation, see `kernels_of`; `STOCK_OPERATIONS`, or the demo pair
    error, limit: the largest error found and allowed. Where the limit is above 0 it is the largest
            difference from a definition in float64, relative to the largest value of that. Where
            it is 0 nothing may differ: the share of numbers that do, or how many tokens or
            compilations, or 1 for a list that does
    served: by which form, "metal", "cuda" or "reference"; "stock" for operations of MLX as such
    why:    what failed, or why it was not run
    """

    subject: str
    name: str
    status: Status
    error: float | None = None
    limit: float | None = None
    served: str = ""
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, ready for JSON: an error that is not finite is None, and `why` says so."""
        return {
            "subject": self.subject,
            "name": self.name,
            "status": self.status,
            "error": finite_or_none(self.error),
            "limit": self.limit,
            "served": self.served,
            "why": self.why,
        }


@dataclass(frozen=True)
class Check:
    """One statement about an operation of the kernels, or about operations of stock MLX.

    subject: the operation, or `STOCK_OPERATIONS`; name: what is stated
    arrays:  what is run with `registry`, and all that comes of it
    error:   the largest error in that
    limit:   how large it may be; 0 where the bits must agree
    forms:   the kernel's own forms, where it has several or MLX has the operation too
    reference_limit: how large the error of its plain-MLX reference may be
    """

    subject: str
    name: str
    arrays: Callable[[Registry], list[mx.array]]
    error: Callable[[list[mx.array]], float]
    limit: float
    forms: tuple[str, ...] = ("",)
    reference_limit: float | None = None

    def runs_with(self, registry: Registry) -> bool:
        """Whether there is anything to run with `registry`, besides its reference."""
        return registry.on_device or self.subject == STOCK_OPERATIONS

    def run(self, registry: Registry) -> Iterator[Outcome]:
        """Run it in every form with the kernels of `registry`."""
        for form in self.forms:
            name = f"{self.name}, {form}" if form else self.name
            if not self.runs_with(registry):
                why = "no device kernels run here"
                yield Outcome(self.subject, name, "not run", None, self.limit, "", why)
            elif form:
                with registry.choices.forcing(form):
                    outcome = self._outcome(registry, name, self.limit)
                yield outcome
            else:
                yield self._outcome(registry, name, self.limit)

    def run_reference(self) -> Iterator[Outcome]:
        """Run its reference, if there is something to say of it."""
        if self.reference_limit is not None:
            name = f"{self.name}, reference"
            yield self._outcome(Registry("reference"), name, self.reference_limit)

    def _outcome(self, registry: Registry, name: str, limit: float) -> Outcome:
        before = registry.counts()
        try:
            error = self.error(self.arrays(registry))
        except REFUSALS as refused:
            return Outcome(self.subject, name, "failed", None, limit, "", why_not(refused))
        calls = registry.counts().since(before)
        why = ""
        if self.subject == STOCK_OPERATIONS:
            served = "stock"
        else:
            served = registry.form if calls.device_kernel_calls else "reference"
            if registry.on_device and (calls.reference_calls or not calls.device_kernel_calls):
                why = "the kernel was not called: its reference or stock MLX was"
        if not why and not error <= limit:  # written so that NaN fails
            why = "the error is above its limit"
            if not isfinite(error):
                why = f"the error is not finite ({error})"
        status: Status = "failed" if why else "passed"
        return Outcome(self.subject, name, status, error, limit, served, why)


def why_not(refused: BaseException) -> str:
    """What an error says, and what the one behind it says: for a kernel, the compiler's own words."""
    texts = [str(refused) or type(refused).__name__]
    if refused.__cause__ is not None:
        texts.append(str(refused.__cause__))
    return without_paths("\n".join(texts))


def without_names(value: Any) -> Any:
    """`value`, as JSON has it, with `without_paths` of every text in it."""
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, dict):
        return {key: without_names(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(held) for held in value]
    return value


def without_paths(text: str, home: Path | None = None) -> str:
    """`text` without the folders in it, which may hold a person's name, and not too long.

    home: that of the person, where a folder's name may hold spaces; found out if None
    """
    text = text.replace(str(home or Path.home()), "~")
    return re.sub(r"(?<![\w./])~?(?:/[^\s/:'\"()]+)*/(?=[^\s/])", "", text)[:2000]
