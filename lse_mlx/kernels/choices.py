"""Which form serves an operation that stock MLX has too: its own kernel, or stock."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx

Mode = Literal["auto", "own", "stock"]
STOCK = "stock"


@dataclass
class Choices:
    """The forms of one engine.

    mode:    "own" and "stock" take that form wherever it exists; "auto" takes the winner of a race
    exact:   only forms whose rows do not depend on how many rows are in the pass, one per shape
             whatever the rows
    winners: by operation and shape, what was fastest on this device; for `exact` by `any_rows`
    chosen:  by operation and shape, what was taken last; for `exact` by `any_rows`
    """

    mode: Mode = "auto"
    exact: bool = False
    winners: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict, init=False)
    _forced: str | None = field(default=None, init=False)

    def form(self, operation: str, shape: str, own: Sequence[str]) -> str:
        """One of `own` (the preferred first), or "stock".

        own: may name stock as its last, which then may serve an exact engine too: its rows depend on
        nothing but themselves
        shape: what tells this call from others of the operation; it begins with the number of rows
        """
        if self._forced is not None:
            return self._forced
        key = any_rows(operation, shape) if self.exact else f"{operation} {shape}"
        chosen = self._choose(key, own)
        self.chosen[key] = chosen
        return chosen

    @property
    def forced(self) -> bool:
        """Whether forms are being compared: then nothing else may serve in a form's place."""
        return self._forced is not None

    @contextmanager
    def forcing(self, form: str) -> Iterator[None]:
        """Inside, every call takes `form`: so the forms of an operation are compared."""
        before, self._forced = self._forced, form
        try:
            yield
        finally:
            self._forced = before

    def _choose(self, key: str, own: Sequence[str]) -> str:
        if self.exact or self.mode == "auto":
            otherwise = own[0] if self.exact else STOCK
            winner = self.winners.get(key, otherwise)
            return winner if winner in own else otherwise
        return own[0] if self.mode == "own" else STOCK


def any_rows(operation: str, shape: str) -> str:
    """The key of `shape` whatever its rows are: what an exact engine chooses by."""
    return f"{operation} *{shape.lstrip('0123456789')}"


def dtype_name(dtype: mx.Dtype) -> str:
    """How a dtype is called in shapes: "bfloat16"."""
    return str(dtype).removeprefix("mlx.core.")
