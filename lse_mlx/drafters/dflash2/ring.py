"""The drafter's memory of committed rows: keys and values in a ring, seen by absolute position."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.checkpoints.drafter_config import DFlash2Config
from lse_mlx.drafters.dflash2.operations import Array, Operations
from lse_mlx.drafters.live_rows import LiveRows


class ContextRing:
    """Keys and values of the last committed rows of one session, fp32, for every layer.

    The row at absolute position s lies in slot s mod `ring_slots`. Behind the ring each layer has
    `block_size` scratch slots, where a draft lays its own keys and values for the length of one
    attention, so that attention reads one array of fixed shape and the ring is never copied.
    Source: DFlash2, context path and state rules.
    """

    def __init__(self, config: DFlash2Config, operations: Operations):
        self._operations = operations
        self._slots = config.ring_slots
        self._window = config.sliding_window
        self._block = config.block_size
        self._rows = LiveRows(self._slots, self._block)
        shape = (2, config.num_key_value_heads, self._slots + self._block, config.head_dim)
        # One array a layer: MLX updates in place only what nothing else still reads.
        self._layers: list[Array] = [
            operations.own(mx.zeros(shape)) for _ in range(config.num_hidden_layers)
        ]

    @property
    def position(self) -> int:
        """Absolute position after the last appended row."""
        return self._rows.position

    @property
    def live(self) -> int:
        """How many rows before `position` are held."""
        return self._rows.live

    def append(self, keys_values: Array, first: int, skipped: int = 0) -> None:
        """Write the rows from `first` on.

        keys_values: fp32 [layers, 2, kv heads, rows - skipped, head_dim] of the last rows.
        skipped:     leading rows left out because the ring would overwrite them at once.
        Raises DraftError, and changes nothing, as `LiveRows.append` says.
        """
        kept = keys_values.shape[3]
        self._rows.append(first, skipped + kept)
        start = (self.position - kept) % self._slots
        before_wrap = min(kept, self._slots - start)
        for layer, rows in enumerate(keys_values):
            self._layers[layer][:, :, start : start + before_wrap] = rows[:, :, :before_wrap]
            if before_wrap < kept:
                self._layers[layer][:, :, : kept - before_wrap] = rows[:, :, before_wrap:]
        self._operations.start(self._layers)

    def rewind(self, to: int) -> None:
        """Forget the rows from position `to` on; raises DraftError as `LiveRows.rewind` says."""
        self._rows.rewind(to)

    def reset(self) -> None:
        """Forget every row."""
        self._rows.reset()
        # Zeros also clear away a NaN, which even an unseen row would spread to all of attention.
        for layer in self._layers:
            layer[:] = 0

    def slot_positions(self) -> NDArray[np.int64]:
        """The absolute position in each slot (int64 [ring_slots]); -1 where none is live."""
        last = self.position - 1
        held = last - (last - np.arange(self._slots)) % self._slots
        return np.where(held >= self.position - self.live, held, -1)

    def mask(self) -> Array:
        """What the next block must not see: fp32 [block, ring_slots + block] of 0 and -inf.

        A live row at s is seen by query i iff position + i - s < window. The block sees all of
        itself, the rows ahead included.
        """
        held = self.slot_positions()
        queries = self.position + np.arange(self._block)
        seen = (held >= 0) & (queries[:, None] - held < self._window)
        hidden = np.zeros((self._block, self._slots + self._block), np.float32)
        hidden[:, : self._slots][~seen] = -np.inf
        return self._operations.own(mx.array(hidden))

    def with_block(self, layer: int, keys_values: Array) -> Array:
        """Layer `layer`'s ring followed by the block's own rows.

        keys_values: fp32 [2, kv heads, block, head_dim]. Returns fp32 [2, kv heads,
        ring_slots + block, head_dim], to be read before the next call for this layer.
        """
        self._layers[layer][:, :, self._slots :] = keys_values
        return self._layers[layer]
