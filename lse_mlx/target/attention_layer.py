"""An attention layer run by the project: mlx-lm's weights and cache, our kernel where it is chosen."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import Attention
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from lse_mlx.kernels.choices import STOCK
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.verify_attention import attention_form, verify_attention


@dataclass(frozen=True)
class AttentionLayer:
    """The layer on a device; layer: what mlx-lm has at `self_attn`, with or without an output gate."""

    layer: Qwen3NextAttention | Attention
    registry: Registry

    def __call__(self, x: mx.array, cache: KVCache) -> mx.array:
        """The layer's output for the rows of a pass, which become the last ones of `cache`.

        x: [1, T, hidden], already normed; returns [1, T, hidden]. Where stock MLX is chosen, this is
        the layer's own call. Otherwise a row does not depend on how many are in the pass.
        """
        rows, gated = x.shape[1], isinstance(self.layer, Qwen3NextAttention)
        if isinstance(self.layer, Qwen3NextAttention):
            heads, kv_heads = self.layer.num_attention_heads, self.layer.num_key_value_heads
        else:
            heads, kv_heads = self.layer.n_heads, self.layer.n_kv_heads
        head_dim = self.layer.q_norm.weight.shape[0]
        form = attention_form(self.registry, rows, heads, kv_heads, head_dim)
        if form == STOCK:
            mask: Any = create_attention_mask(x, cache)
            return self.layer(x, mask, cache)

        queries, gate = self.layer.q_proj(x).reshape(1, rows, heads, -1), None
        if gated:
            queries, gate = mx.split(queries, 2, axis=-1)
        keys = self.layer.k_proj(x).reshape(1, rows, kv_heads, -1)
        values = self.layer.v_proj(x).reshape(1, rows, kv_heads, -1)
        queries = self.layer.q_norm(queries).transpose(0, 2, 1, 3)
        keys = self.layer.k_norm(keys).transpose(0, 2, 1, 3)
        queries = self.layer.rope(queries, offset=cache.offset)
        keys = self.layer.rope(keys, offset=cache.offset)
        cache.update_and_fetch(keys, values.transpose(0, 2, 1, 3))

        # The whole buffers: a part of one is no contiguous array, and would be copied.
        assert cache.keys is not None and cache.values is not None
        mixed = verify_attention(
            self.registry, queries, cache.keys, cache.values, cache.offset, self.layer.scale
        )
        mixed = mixed.transpose(0, 2, 1, 3).reshape(1, rows, -1)
        if gate is not None:
            mixed = mixed * mx.sigmoid(gate.reshape(1, rows, -1))
        return self.layer.o_proj(mixed)
