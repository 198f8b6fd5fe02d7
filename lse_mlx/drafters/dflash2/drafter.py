"""The DFlash2 drafter behind the drafter interface: load it once, one context per session."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from lse_mlx.checkpoints.drafter_config import DFlash2Config
from lse_mlx.drafters.base import Proposal, SharedTarget, Uniform
from lse_mlx.drafters.dflash2.model import DFlash2Model
from lse_mlx.drafters.dflash2.operations import Array, device_operations, host_operations
from lse_mlx.drafters.dflash2.projections import project
from lse_mlx.drafters.dflash2.ring import ContextRing
from lse_mlx.drafters.dflash2.selector import Lattice, Selector
from lse_mlx.drafters.dflash2.walk import (
    Ids,
    Scores,
    chances_along,
    greedy_walk,
    sampled_walk,
)
from lse_mlx.drafters.dflash2.weights import DFlash2Weights
from lse_mlx.errors import DraftError
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.skinny_qmm import QuantizedProduct
from lse_mlx.kernels.topk import topk


class DFlash2:
    """A block drafter that reads its target's tapped features and shares its embedding and head."""

    def __init__(
        self,
        config: DFlash2Config,
        weights: DFlash2Weights,
        shared: SharedTarget,
        registry: Registry | None = None,
        on_host: bool | None = None,
    ):
        """Build the drafter.

        registry: the door to device kernels; that of MLX's default device if None.
        on_host: compute with NumPy on weights dequantized once; otherwise keep them as they are and
        compute with MLX. None chooses the first where no device kernels run.
        Raises CheckpointError if `config` does not fit `shared`.
        """
        config.check_target(shared)
        registry = registry or Registry.for_device()
        if on_host is None:
            on_host = not registry.on_device
        operations = host_operations(registry) if on_host else device_operations(registry)
        self.config = config
        self._shared = shared
        self._operations = operations
        self._model = DFlash2Model(config, weights, operations)
        self._selector = Selector(
            operations,
            project([weights.matrices["candidate_selector.hidden_projection.weight"]], operations),
            weights.matrices["candidate_selector.predecessor_codebook.weight"],
            weights.matrices["candidate_selector.successor_codebook.weight"],
            config.vocab_size,
        )

    def __repr__(self) -> str:
        return f"DFlash2(block_size={self.config.block_size}, taps={list(self.taps)})"

    @property
    def name(self) -> str:
        """What timings call it."""
        return "dflash2"

    @property
    def taps(self) -> tuple[int, ...]:
        """Zero-based target blocks whose raw outputs `append` wants, side by side in this order."""
        return self.config.target_layer_ids

    @property
    def depth(self) -> int:
        """Tokens in every proposal: the trained block without its anchor."""
        return self.config.block_size - 1

    def products(self) -> Iterator[QuantizedProduct]:
        """Its products in affine codes, of which a device may have forms to choose from."""
        yield from self._model.products()
        if isinstance(self._selector.gate, QuantizedProduct):
            yield self._selector.gate

    def new_context(self) -> "DFlash2Context":
        """An empty context, at position 0."""
        return DFlash2Context(self, ContextRing(self.config, self._operations))

    def context_rows(self, features: mx.array, first: int) -> Array:
        """Keys and values of committed rows, as `DFlash2Model.context_rows` gives them."""
        return self._model.context_rows(features, first)

    def lattice(self, anchor: int, ring: ContextRing) -> Lattice:
        """The candidates of the block after `anchor`, scored."""
        block = [anchor] + [self.config.mask_token_id] * self.depth
        embedded = self._shared.embed(mx.array(block, mx.int32)).astype(mx.float32)
        hidden = self._model.block_rows(embedded, ring)
        logits = self._shared.head(mx.array(hidden))
        best, ids = topk(self._operations.registry, logits, self.config.selector_top_k)
        return self._selector.lattice(hidden, best, ids, anchor)


class DFlash2Context:
    """One session's committed rows in a DFlash2 drafter."""

    def __init__(self, drafter: DFlash2, ring: ContextRing):
        self._drafter = drafter
        self._ring = ring

    @property
    def position(self) -> int:
        """Absolute position after the last appended row: the position of the next anchor."""
        return self._ring.position

    @property
    def live(self) -> int:
        """How many committed rows before `position` are held."""
        return self._ring.live

    def append(self, features: mx.array, first: int) -> None:
        """Take in committed rows at positions first, first + 1, ...

        features: fp32 [rows, taps * hidden]; used up before this returns, so later changes to the
        caller's buffer do not matter. A `first` below `position` replaces the rows from there on.
        Raises DraftError, and changes nothing, for another shape or dtype, no rows, a negative
        `first`, a gap, or a replacement of more than one block or of more rows than are held.
        """
        config = self._drafter.config
        width = len(config.target_layer_ids) * config.hidden_size
        if (
            features.dtype != mx.float32
            or features.ndim != 2
            or features.shape[1] != width
            or not len(features)
        ):
            raise DraftError(
                f"Features of shape {list(features.shape)} and dtype {features.dtype} cannot be "
                f"appended: pass float32 [rows, {width}] of at least one row, the taps "
                f"{list(config.target_layer_ids)} side by side."
            )
        skipped = max(0, len(features) - config.ring_slots)
        keys_values = self._drafter.context_rows(features[skipped:], first + skipped)
        self._ring.append(keys_values, first, skipped)

    def rewind(self, to: int) -> None:
        """Forget the rows from position `to` on: at most one block, and at most what is held.

        Raises DraftError, and changes nothing, otherwise.
        """
        self._ring.rewind(to)

    def reset(self) -> None:
        """Forget every row: position 0, as a new context."""
        self._ring.reset()

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        """Draft `depth` tokens after `anchor`, which stands at `position`.

        Always the full trained block; use `Proposal.first` for less. Greedy at temperature 0,
        above it one `uniform` a token. Changes no state.
        Raises DraftError for an anchor outside the vocabulary, an empty context, a negative or
        non-finite temperature, non-finite scores on the path, or malformed ids.
        """
        config = self._drafter.config
        if not 0 <= anchor < config.vocab_size:
            raise DraftError(
                f"The anchor {anchor} is outside the vocabulary 0..{config.vocab_size - 1}: "
                "pass the last emitted token."
            )
        if not self._ring.live:
            raise DraftError("A draft needs context: append the prompt's rows before proposing.")
        if not 0 <= temperature < math.inf:
            raise DraftError(
                f"A draft cannot be made at temperature {temperature}: pass 0 or a finite "
                "positive number."
            )
        lattice = self._drafter.lattice(anchor, self._ring)
        if temperature == 0 and lattice.path is not None:
            *tokens, status = np.array(lattice.path).tolist()
            if status == 0:
                return _greedy(tokens, lattice)
            # Walked once more, below, because that names what is wrong and where.
        scores, ids = _on_host(lattice)
        if temperature == 0:
            return _greedy(greedy_walk(scores, ids, config.vocab_size).tokens, lattice)
        return sampled_walk(scores, ids, config.vocab_size, temperature, uniform)


def _greedy(tokens: list[int], lattice: Lattice) -> Proposal:
    certain = Proposal.certain(tokens)
    return replace(certain, candidates=lambda: chances_along(*_on_host(lattice), tokens))


def _on_host(lattice: Lattice) -> tuple[Scores, Ids]:
    mx.eval(lattice.scores, lattice.ids)
    return np.array(lattice.scores), np.array(lattice.ids)


def load_dflash2(folder: Path, shared: SharedTarget, registry: Registry | None = None) -> DFlash2:
    """Load the DFlash2 drafter in `folder` (config.json and model.safetensors) for `shared`.

    registry: the door to device kernels; that of MLX's default device if None.
    Raises CheckpointError if a file is missing or damaged, if the drafter is of a kind that this
    package does not run, or if its dimensions are not the target's.
    """
    config = DFlash2Config.read(folder)
    config.check_target(shared)
    return DFlash2(config, DFlash2Weights.read(folder, config), shared, registry)
