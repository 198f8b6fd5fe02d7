"""What one sequence owns in the target, and how a verify pass becomes part of it or never happened."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from lse_mlx.kernels.dynamic_conv import Array

FEW_ROWS = 16
"""A tail keeps in memory the inputs that it was cut from, where they are no more rows than this. Of a
piece of the prompt it is copied, which is one more launch a layer."""

PassRows = Any
"""DeltaRows on a device, HostDeltaRows on a CPU: what has `arrays()`."""


@dataclass
class DeltaState:
    """A Gated DeltaNet layer: the convolution's tail and the recurrent state of committed tokens.

    tail:      [1, kernel - 1, channels], the last committed inputs of the convolution
    recurrent: fp32 [1, Hv, Dv, Dk]; of committed rows, the pending ones are still to be folded in
    fold:      folds the first n of some rows into a state, for this kind of array
    pending:   the rows of the last verify pass, of which the first `n_pending` were accepted; the
               next pass folds these in before its own
    inputs:    while a pass is open, [1, kernel - 1 + rows, channels]: the tail and the pass's rows
    rows:      while a pass of several rows is open, what each would put into the recurrent state

    A pass of several rows keeps only its small per-row inputs and brings `recurrent` to the rows
    committed before it; a pass that can only be committed whole (one row, or a piece of the prompt)
    puts its end state here at once. So a pass never holds a state per row, nor two states of a
    layer after it ran.
    """

    tail: Array
    recurrent: Array
    fold: Callable[[PassRows, int, Array], Array]
    pending: PassRows | None = None
    n_pending: int = 0
    inputs: Array | None = None
    rows: PassRows | None = None

    def open(self, inputs: Array, rows: PassRows, kept: Array, whole: bool) -> None:
        """Open a pass that has folded in what was pending.

        kept: the state after the pass where it can only be committed whole, before it otherwise
        """
        self.inputs, self.recurrent = inputs, kept
        self.pending, self.n_pending = None, 0
        self.rows = None if whole else rows

    def commit(self, n: int) -> None:
        """Keep the first `n` rows of the open pass."""
        assert self.inputs is not None
        self.tail = self.inputs[:, n : n + self.tail.shape[1]]
        if self.inputs.shape[1] > FEW_ROWS:
            own = mx.contiguous if isinstance(self.tail, mx.array) else np.copy
            self.tail = own(self.tail)
        # Whole, not cut to n: the kernel would have to be given a copy of the part.
        self.pending, self.n_pending = self.rows, n if self.rows is not None else 0
        self.inputs = self.rows = None

    def settle(self) -> None:
        """Make `recurrent` the state of all committed tokens."""
        if self.pending is not None:
            self.recurrent = self.fold(self.pending, self.n_pending, self.recurrent)
            self.pending, self.n_pending = None, 0

    def arrays(self) -> list[Array]:
        """Every array held, for evaluation and for counting bytes."""
        held = [self.tail, self.recurrent]
        if self.inputs is not None:
            held.append(self.inputs)
        for rows in (self.pending, self.rows):
            held += rows.arrays() if rows is not None else []
        return held


@dataclass
class TargetState:
    """The state of one sequence: one entry a layer, and how many tokens are committed.

    Between `Target.verify` and `commit` a pass is open: its rows are in the layers but not part of
    the sequence yet. `open_rows` says how many, `whole` that they can only be committed together.
    """

    layers: list[DeltaState | KVCache]
    position: int = 0
    open_rows: int = 0
    whole: bool = True

    def commit(self, n: int) -> None:
        """Make the first `n` rows of the open pass part of the state; the others never happened.

        n: at least 1, at most the rows of the pass, and all of them where the pass had one row or
        was a piece of the prompt. Raises ValueError otherwise, or when no pass is open.
        """
        if not 1 <= n <= self.open_rows or (self.whole and n != self.open_rows):
            raise ValueError(f"cannot commit {n} of {self.open_rows} open rows")
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                layer.commit(n)
            else:
                layer.trim(self.open_rows - n)
        self.position += n
        self.open_rows = 0

    def settle(self) -> None:
        """Fold what is committed but pending, so that the arrays are those of `position` tokens."""
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                layer.settle()

    def arrays(self) -> list[Array]:
        """Every array held, for evaluation and for counting bytes."""
        held: list[Array] = []
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                held += layer.arrays()
            elif layer.keys is not None:
                held += [layer.keys, layer.values]
        return held
