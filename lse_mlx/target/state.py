"""What one sequence owns in the target, and how a verify pass becomes part of it or never happened."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from lse_mlx.kernels.gated_delta import Array, DeltaRows


@dataclass
class DeltaState:
    """A Gated DeltaNet layer: the convolution's tail and the recurrent state of committed tokens.

    tail:      [1, kernel - 1, channels], the last committed inputs of the convolution
    recurrent: fp32 [1, Hv, Dv, Dk]; committed rows in `pending` are still to be folded in
    fold:      the recurrence that folds rows into `recurrent`, for this kind of array
    pending:   accepted rows of the last verify pass; the next pass folds them in before its own
    inputs:    while a pass is open, [1, kernel - 1 + rows, channels]: the tail and the pass's rows
    rows:      while a pass of several rows is open, what each would put into the recurrent state

    A pass of several rows leaves `recurrent` as it was and keeps only its small per-row inputs; a
    pass that can only be committed whole (one row, or a piece of the prompt) puts its end state
    here at once. So a pass never holds a state per row, nor two states of a layer after it ran.
    """

    tail: Array
    recurrent: Array
    fold: Callable[[DeltaRows, Array], Array]
    pending: DeltaRows | None = None
    inputs: Array | None = None
    rows: DeltaRows | None = None

    def fold_pending(self) -> None:
        """Make `recurrent` the state of all committed tokens."""
        if self.pending is not None:
            self.recurrent = self.fold(self.pending, self.recurrent)
            self.pending = None

    def open(self, inputs: Array, rows: DeltaRows, after: Array, whole: bool) -> None:
        """Open a pass whose rows would lead to the state `after`."""
        self.inputs = inputs
        if whole:
            self.recurrent = after
        else:
            self.rows = rows

    def commit(self, n: int) -> None:
        """Keep the first `n` rows of the open pass."""
        assert self.inputs is not None
        tail = self.inputs[:, n : n + self.tail.shape[1]]
        # A copy: a slice would keep the inputs of all rows, which a piece of the prompt has many of.
        self.tail = mx.contiguous(tail) if isinstance(tail, mx.array) else tail.copy()
        self.pending = None if self.rows is None else self.rows.first(n)
        self.inputs = self.rows = None

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
                layer.fold_pending()

    def arrays(self) -> list[Array]:
        """Every array held, for evaluation and for counting bytes."""
        held: list[Array] = []
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                held += layer.arrays()
            elif layer.keys is not None:
                held += [layer.keys, layer.values]
        return held
