"""An attention layer run by the project: mlx-lm's weights and cache, our kernel where it is chosen."""

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import Attention
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.verify_attention import verify_attention


@dataclass(frozen=True)
class AttentionLayer:
    """The layer, on a device or a CPU.

    layer: what mlx-lm has at `self_attn`, with or without an output gate
    """

    layer: Qwen3NextAttention | Attention
    registry: Registry

    @property
    def heads(self) -> int:
        """How many query heads there are."""
        if isinstance(self.layer, Qwen3NextAttention):
            return self.layer.num_attention_heads
        return self.layer.n_heads

    @property
    def kv_heads(self) -> int:
        """How many key/value heads there are, each for as many query heads."""
        if isinstance(self.layer, Qwen3NextAttention):
            return self.layer.num_key_value_heads
        return self.layer.n_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a head's query, key or value."""
        return self.layer.q_norm.weight.shape[0]

    def __call__(self, x: mx.array, cache: KVCache) -> mx.array:
        """The layer's output for the rows of a pass, which become the last ones of `cache`.

        x: [1, T, hidden], already normed; returns [1, T, hidden]. What mlx-lm's layer computes,
        except that queries and keys are rounded to the values' dtype where norms of another one
        have widened them. Only `verify_attention` knows which form serves, and counts it.
        """
        rows, gate = x.shape[1], None
        queries = self.layer.q_proj(x).reshape(1, rows, self.heads, -1)
        if isinstance(self.layer, Qwen3NextAttention):
            queries, gate = mx.split(queries, 2, axis=-1)
        keys = self.layer.k_proj(x).reshape(1, rows, self.kv_heads, -1)
        values = self.layer.v_proj(x).reshape(1, rows, self.kv_heads, -1)
        queries = self._rotated(self.layer.q_norm(queries).astype(values.dtype), cache.offset)
        keys = self._rotated(self.layer.k_norm(keys).astype(values.dtype), cache.offset)
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

    def _rotated(self, x: mx.array, offset: int) -> mx.array:
        """`x` [1, T, heads, head_dim] by its rows' positions from `offset` on, heads before rows.

        MLX has another kernel for a single row, which may round otherwise. So where decoding is
        exact, one row is rotated as the first of two.
        """
        rows = x.shape[1]
        if rows == 1 and self.registry.choices.exact:
            x = mx.concatenate([x, x], axis=1)
        return self.layer.rope(x.transpose(0, 2, 1, 3), offset=offset)[:, :, :rows]
