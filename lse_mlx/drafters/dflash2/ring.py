"""The drafter's memory of committed rows: keys and values in a ring, seen by absolute position."""

import mlx.core as mx

from lse_mlx.checkpoints.drafter_config import DFlash2Config
from lse_mlx.drafters.dflash2.operations import Array, Operations
from lse_mlx.drafters.live_rows import LiveRows
from lse_mlx.kernels.sliding_attention import RingView


class ContextRing:
    """Keys and values of the last committed rows of one session, fp32, for every layer.

    The row at absolute position s lies in slot s mod `ring_slots`. Behind the ring each layer has
    `block_size` scratch slots, where attention without a device kernel lays a block's own keys and
    values, so that it reads one array of fixed shape and the ring is never copied.
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
        # Zeros also clear away a NaN, which costs attention on a CPU a second product.
        for layer in self._layers:
            layer[:] = 0

    def view(self) -> RingView:
        """What the next block may see."""
        return RingView(self.position, self.live, self._window, self._slots, self._block)

    def layer(self, index: int) -> Array:
        """Layer `index`'s whole array, fp32 [2, kv heads, ring_slots + block, head_dim].

        To be used up before rows are written: a write copies what is still to be read elsewhere.
        """
        return self._layers[index]
