"""The drafter's two passes: committed features into the ring, and one block out of it."""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from lse_mlx.checkpoints.drafter_config import CONV_TAPS, DFlash2Config
from lse_mlx.checkpoints.drafter_tensors import SIDES
from lse_mlx.drafters.dflash2.convolution import Convolution
from lse_mlx.drafters.dflash2.operations import Array, Operations
from lse_mlx.drafters.dflash2.projections import Projection, project
from lse_mlx.drafters.dflash2.ring import ContextRing
from lse_mlx.drafters.dflash2.rotation import Rotation
from lse_mlx.drafters.dflash2.weights import DFlash2Weights
from lse_mlx.kernels.skinny_qmm import QuantizedProduct


@dataclass(frozen=True)
class Layer:
    """One drafter layer's weights; projections of one input are joined."""

    input_norm: Array
    attention_conv: Convolution
    queries_keys_values: Projection
    heads_norm: Array  # fp32 [query heads + kv heads, head_dim]
    attention_out: Projection
    ffn_norm: Array
    ffn_conv: Convolution
    gate_up: Projection
    down: Projection


class DFlash2Model:
    """The forward computation, fp32 throughout. It keeps no state: the ring is the caller's.

    Source: DFlash2, context path and draft pass.
    """

    def __init__(self, config: DFlash2Config, weights: DFlash2Weights, operations: Operations):
        self._config = config
        self._operations = operations
        self._features_in = project([weights.matrices["fc.weight"]], operations)
        self._features_norm = operations.own(weights.vectors["hidden_norm.weight"])
        self._final_norm = operations.own(weights.vectors["norm.weight"])
        layers = range(config.num_hidden_layers)
        # The context path reads one input for all layers: one product serves them.
        self._context_keys_values = project(
            [
                weights.matrices[f"layers.{layer}.self_attn.{part}_proj.weight"]
                for layer in layers
                for part in "kv"
            ],
            operations,
        )
        keys_norm = [weights.vectors[f"layers.{i}.self_attn.k_norm.weight"] for i in layers]
        self._keys_norm = operations.own(mx.stack(keys_norm)[:, None])
        self._layers = [_build_layer(config, weights, layer, operations) for layer in layers]

    def products(self) -> Iterator[QuantizedProduct]:
        """The products in affine codes, in the order in which the two passes run them."""
        projections = [self._features_in, self._context_keys_values]
        for layer in self._layers:
            projections += [layer.attention_conv.coefficients, layer.queries_keys_values]
            projections += [layer.attention_out, layer.ffn_conv.coefficients]
            projections += [layer.gate_up, layer.down]
        return (each for each in projections if isinstance(each, QuantizedProduct))

    def context_rows(self, features: mx.array, first: int) -> Array:
        """Keys and values of committed rows at positions `first`, first + 1, ...

        features: fp32 [rows, taps * hidden]. Returns fp32 [layers, 2, kv heads, rows, head_dim];
        a row depends on its own features and position only.
        """
        config, rows, norm = self._config, len(features), self._operations.norm
        c = self._features_in(self._operations.own(features))
        c = norm(c, self._features_norm, config.rms_norm_eps)
        keys_values = self._context_keys_values(c).reshape(
            rows, config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim
        )
        keys = norm(keys_values[:, :, 0], self._keys_norm, config.rms_norm_eps)
        rotation = self._rotation(first, rows)
        keys = rotation(keys.reshape(rows, -1, config.head_dim)).reshape(keys.shape)
        joined = self._operations.arrays.stack([keys, keys_values[:, :, 1]])
        return joined.transpose(2, 0, 3, 1, 4)

    def block_rows(self, embedded: mx.array, ring: ContextRing) -> Array:
        """The block's rows after the anchor, normed for head and selector.

        embedded: fp32 [block, hidden], the embeddings of anchor and masks, which stand at
        ring.position and after. Returns fp32 [block - 1, hidden].
        """
        operations, eps = self._operations, self._config.rms_norm_eps
        rotation = self._rotation(ring.position, self._config.block_size)
        view = ring.view()
        x = operations.own(embedded)
        for index, layer in enumerate(self._layers):
            normed = operations.norm(x, layer.input_norm, eps)
            dynamic = layer.attention_conv.coefficients(normed)
            queries, keys_values = self._heads(
                layer, layer.attention_conv(normed, dynamic, 0), rotation
            )
            mixed = operations.attend(queries, ring.layer(index), keys_values, view)
            x = x + layer.attention_conv(layer.attention_out(mixed), dynamic, 1)

            normed = operations.norm(x, layer.ffn_norm, eps)
            dynamic = layer.ffn_conv.coefficients(normed)
            gate_up = layer.gate_up(layer.ffn_conv(normed, dynamic, 0))
            x = x + layer.ffn_conv(layer.down(operations.gate(gate_up)), dynamic, 1)
        return operations.norm(x[1:], self._final_norm, eps)

    def _heads(self, layer: Layer, x: Array, rotation: Rotation) -> tuple[Array, Array]:
        """Queries fp32 [rows, heads, head_dim]; keys and values [2, kv heads, rows, head_dim]."""
        config = self._config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        joined = layer.queries_keys_values(x).reshape(len(x), -1, config.head_dim)
        rotated = self._operations.norm(
            joined[:, : heads + kv_heads], layer.heads_norm, config.rms_norm_eps
        )
        rotated = rotation(rotated)
        keys_values = self._operations.arrays.stack(
            [rotated[:, heads:], joined[:, heads + kv_heads :]]
        )
        return rotated[:, :heads], keys_values.transpose(0, 2, 1, 3)

    def _rotation(self, first: int, rows: int) -> Rotation:
        positions = np.arange(first, first + rows)
        config = self._config
        return Rotation.at(positions, config.head_dim, config.rope_theta, self._operations)


def _build_layer(
    config: DFlash2Config, weights: DFlash2Weights, layer: int, operations: Operations
) -> Layer:
    def vector(name: str) -> Array:
        return operations.own(weights.vectors[f"layers.{layer}.{name}"])

    def joined(*names: str) -> Projection:
        return project([weights.matrices[f"layers.{layer}.{n}.weight"] for n in names], operations)

    def convolution(name: str) -> Convolution:
        base = vector(f"{name}.base_kernel")
        return Convolution(
            operations.registry,
            base.reshape(SIDES, CONV_TAPS, config.conv_groups, config.conv_group_size),
            joined(f"{name}.kernel_projection"),
        )

    heads_norm = [vector("self_attn.q_norm.weight")] * config.num_attention_heads
    heads_norm += [vector("self_attn.k_norm.weight")] * config.num_key_value_heads
    return Layer(
        input_norm=vector("input_layernorm.weight"),
        attention_conv=convolution("attention_conv"),
        queries_keys_values=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        heads_norm=operations.arrays.stack(heads_norm),
        attention_out=joined("self_attn.o_proj"),
        ffn_norm=vector("post_attention_layernorm.weight"),
        ffn_conv=convolution("mlp_conv"),
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=joined("mlp.down_proj"),
    )
