"""The DFlash2 drafter behind the drafter interface: load it once, one context per session."""

import math
from pathlib import Path

import mlx.core as mx
import numpy as np

from lse_mlx.checkpoints.drafter_config import DFlash2Config
from lse_mlx.drafters.base import Proposal, SharedTarget, Uniform
from lse_mlx.drafters.dflash2.candidates import top_candidates
from lse_mlx.drafters.dflash2.model import DFlash2Model
from lse_mlx.drafters.dflash2.operations import DEVICE, HOST, Array, Operations
from lse_mlx.drafters.dflash2.projections import project
from lse_mlx.drafters.dflash2.ring import ContextRing
from lse_mlx.drafters.dflash2.selector import Selector
from lse_mlx.drafters.dflash2.walk import greedy_walk, sampled_walk
from lse_mlx.drafters.dflash2.weights import DFlash2Weights
from lse_mlx.errors import DraftError


class DFlash2:
    """A block drafter that reads its target's tapped features and shares its embedding and head."""

    def __init__(
        self,
        config: DFlash2Config,
        weights: DFlash2Weights,
        shared: SharedTarget,
        operations: Operations | None = None,
    ):
        """Build the drafter for MLX's default device, or with the given form of operations.

        Raises CheckpointError if `config` does not fit `shared`.
        """
        config.check_target(shared)
        if operations is None:
            operations = HOST if mx.default_device() == mx.cpu else DEVICE
        self.config = config
        self._shared = shared
        self._operations = operations
        self._model = DFlash2Model(config, weights, operations)
        self._selector = Selector(
            project([weights.matrices["candidate_selector.hidden_projection.weight"]], operations),
            weights.matrices["candidate_selector.predecessor_codebook.weight"],
            weights.matrices["candidate_selector.successor_codebook.weight"],
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

    def new_context(self) -> "DFlash2Context":
        """An empty context, at position 0."""
        return DFlash2Context(self, ContextRing(self.config, self._operations))

    def context_rows(self, features: mx.array, first: int) -> Array:
        """Keys and values of committed rows, as `DFlash2Model.context_rows` gives them."""
        return self._model.context_rows(features, first)

    def scored_candidates(self, anchor: int, ring: ContextRing) -> tuple[mx.array, mx.array]:
        """Scores fp32 [depth, k, k] and ids int32 [depth, k] of the block after `anchor`."""
        block = [anchor] + [self.config.mask_token_id] * self.depth
        embedded = self._shared.embed(mx.array(block, mx.int32)).astype(mx.float32)
        hidden = self._model.block_rows(embedded, ring)
        logits, ids = top_candidates(
            self._shared.head(mx.array(hidden)), self.config.selector_top_k
        )
        return self._selector.scores(hidden, logits, ids, anchor), ids


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
        pending = self._drafter.scored_candidates(anchor, self._ring)
        mx.eval(pending)
        scores, ids = (np.array(part) for part in pending)
        if temperature == 0:
            return greedy_walk(scores, ids, config.vocab_size)
        return sampled_walk(scores, ids, config.vocab_size, temperature, uniform)


def load_dflash2(folder: Path, shared: SharedTarget) -> DFlash2:
    """Load the DFlash2 drafter in `folder` (config.json and model.safetensors) for `shared`.

    Raises CheckpointError if a file is missing or damaged, if the drafter is of a kind that this
    package does not run, or if its dimensions are not the target's.
    """
    config = DFlash2Config.read(folder)
    config.check_target(shared)
    return DFlash2(config, DFlash2Weights.read(folder, config), shared)
