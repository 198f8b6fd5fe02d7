"""The target: the model that decides every token, run layer by layer with taps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from lse_mlx.kernels.registry import Registry
from lse_mlx.target.attention_layer import AttentionLayer
from lse_mlx.target.delta_layer import DeltaMixer
from lse_mlx.target.expert_layer import ExpertMixer, ExpertSizes
from lse_mlx.target.state import DeltaState, TargetState


@dataclass(frozen=True)
class Pass:
    """What a pass over some rows answers.

    logits:   fp32 [rows, vocab] of a verify pass; fp32 [1, vocab] of the last row otherwise
    features: fp32 [rows, taps * hidden], the outputs of the tapped blocks side by side, before the
              final norm; [rows, 0] where nothing is tapped
    routes:   by the index of each layer of experts, int32 [rows, top_k]: the experts that each row
              chose, the highest score first, of equal ones the lowest id; empty for a dense target
    """

    logits: mx.array
    features: mx.array
    routes: Mapping[int, mx.array] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A loaded target. Holds weights only: any number of sequences can run on it, one at a time.

    trunk:   mlx-lm's inner model: embed_tokens, layers, norm
    lm_head: the output head, or None where the embedding is tied
    mixers:  what mixes the rows of each layer: a Gated DeltaNet, in the form for the device, or
             attention
    registry: the door to device kernels, and what counts their calls
    context_length: the most tokens a sequence may hold
    experts:  by the index of their layer, the mixtures of experts of a target that has any, in the
              form for the device
    """

    trunk: Any = field(repr=False)
    lm_head: Any = field(repr=False)
    mixers: tuple[DeltaMixer | AttentionLayer, ...] = field(repr=False)
    registry: Registry = field(repr=False)
    hidden_size: int
    vocab_size: int
    context_length: int
    experts: Mapping[int, ExpertMixer] = field(default_factory=dict, repr=False)

    @property
    def expert_sizes(self) -> dict[int, ExpertSizes]:
        """The sizes of each layer of experts, by its index; empty for a dense target."""
        return {index: experts.sizes for index, experts in self.experts.items()}

    @property
    def layer_count(self) -> int:
        """How many blocks there are; a tap is an index below it."""
        return len(self.trunk.layers)

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings of `tokens` (int32 [n]) as [n, hidden] in the activation dtype."""
        return self.trunk.embed_tokens(tokens)

    def head(self, hidden: mx.array) -> mx.array:
        """Logits fp32 [n, vocab] of `hidden` [n, hidden], which is already normed."""
        tied = self.lm_head is None  # not a truth test: a module without arrays is falsy
        module = self.trunk.embed_tokens if tied else self.lm_head
        if isinstance(module, nn.Linear | nn.Embedding):
            # A drafter's rows are fp32: a bf16 matrix would be converted whole for each product.
            hidden = hidden.astype(module.weight.dtype)
        return (module.as_linear if tied else module)(hidden).astype(mx.float32)

    def new_state(self) -> TargetState:
        """The state of an empty sequence."""
        return TargetState(
            [
                KVCache() if isinstance(mixer, AttentionLayer) else mixer.new_state()
                for mixer in self.mixers
            ]
        )

    def advance(self, tokens: list[int], state: TargetState, taps: tuple[int, ...]) -> Pass:
        """Take `tokens` (at least one) into `state` for good; logits of the last row only."""
        hidden, features, routes = self._blocks(tokens, state, taps, whole=True)
        logits = self.head(self.trunk.norm(hidden[:, -1]))
        state.commit(len(tokens))
        return _started(Pass(logits, features, routes), state)

    def verify(self, tokens: list[int], state: TargetState, taps: tuple[int, ...]) -> Pass:
        """Run `tokens` (at least one) as an open pass, which `state.commit(n)` must close."""
        hidden, features, routes = self._blocks(tokens, state, taps, whole=len(tokens) == 1)
        logits = self.head(self.trunk.norm(hidden[0]))
        return _started(Pass(logits, features, routes), state)

    def _blocks(
        self, tokens: list[int], state: TargetState, taps: tuple[int, ...], whole: bool
    ) -> tuple[mx.array, mx.array, dict[int, mx.array]]:
        """Every block over the rows; returns [1, rows, hidden], the features and the routes."""
        if not all(0 <= tap < self.layer_count for tap in taps):
            raise ValueError(f"taps {taps} are not blocks of a target of {self.layer_count}")
        if state.open_rows:
            raise ValueError(f"a pass of {state.open_rows} rows is still open: commit it first")
        state.open_rows, state.whole = len(tokens), whole
        x = self.trunk.embed_tokens(mx.array([tokens], mx.int32))
        tapped: dict[int, mx.array] = {}
        routes: dict[int, mx.array] = {}
        stack = zip(self.trunk.layers, self.mixers, state.layers, strict=True)
        for index, (layer, mixer, held) in enumerate(stack):
            normed = layer.input_layernorm(x)
            if isinstance(mixer, AttentionLayer):
                assert isinstance(held, KVCache)
                x = x + mixer(normed, held)
            else:
                assert isinstance(held, DeltaState)
                x = x + mixer(normed, held, whole)
            normed = layer.post_attention_layernorm(x)
            if (experts := self.experts.get(index)) is not None:
                mixed, routes[index] = experts(normed)
            else:
                mixed = layer.mlp(normed)
            x = x + mixed
            if index in taps:
                tapped[index] = x[0].astype(mx.float32)
        if not taps:
            return x, mx.zeros((len(tokens), 0)), routes
        return x, mx.concatenate([tapped[tap] for tap in taps], axis=-1), routes


def _started(answer: Pass, state: TargetState) -> Pass:
    """Let the device begin; a state that nobody evaluates would grow a graph without end."""
    held = [array for array in state.arrays() if isinstance(array, mx.array)]
    mx.async_eval(answer.logits, answer.features, *answer.routes.values(), *held)
    return answer
