"""A Gated DeltaNet layer run by the project: mlx-lm's weights, our state and our recurrence."""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import normalize_qk
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from lse_mlx.kernels.gated_delta import DeltaRows, fold_rows, read_rows
from lse_mlx.target.state import DeltaState


class DeltaMixer(Protocol):
    """A Gated DeltaNet layer, in the form that suits the device."""

    def new_state(self) -> DeltaState:
        """The state before the first token."""
        ...

    def __call__(self, x: mx.array, state: DeltaState, whole: bool) -> mx.array:
        """The layer's output for the rows of a pass, opening the pass in `state`.

        x: [1, T, hidden], already normed; returns [1, T, hidden]. `whole` says that the pass can
        only be committed as a whole, so that the state after it replaces the one before at once.
        """
        ...


@dataclass(frozen=True)
class DeltaLayer:
    """The layer in MLX; dtype: that of the activations."""

    layer: GatedDeltaNet
    dtype: mx.Dtype

    def new_state(self) -> DeltaState:
        """See `DeltaMixer`: all zeros."""
        net = self.layer
        return DeltaState(
            tail=mx.zeros((1, net.conv_kernel_size - 1, net.conv_dim), self.dtype),
            recurrent=mx.zeros((1, net.num_v_heads, net.head_v_dim, net.head_k_dim), mx.float32),
            fold=fold_rows,
        )

    def __call__(self, x: mx.array, state: DeltaState, whole: bool) -> mx.array:
        """See `DeltaMixer`."""
        net = self.layer
        inputs = mx.concatenate([state.tail, net.in_proj_qkv(x)], axis=1)
        q, k, v = self._heads(nn.silu(net.conv1d(inputs)))
        rows = DeltaRows(k, v, self._decay(net.in_proj_a(x)), mx.sigmoid(net.in_proj_b(x)))
        state.fold_pending()
        y, after = read_rows(q, rows, state.recurrent)
        state.open(inputs, rows, after, whole)
        z = net.in_proj_z(x).reshape(y.shape)
        return net.out_proj(net.norm(y, z).reshape(1, x.shape[1], -1))

    def _heads(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Split [1, T, channels] into q and k [1, T, Hk, Dk], normalized, and v [1, T, Hv, Dv]."""
        net, lead = self.layer, mixed.shape[:2]
        q, k, v = mx.split(mixed, [net.key_dim, 2 * net.key_dim], axis=-1)
        q = q.reshape(*lead, net.num_k_heads, net.head_k_dim)
        k = k.reshape(*lead, net.num_k_heads, net.head_k_dim)
        q, k = normalize_qk(q, k, inv_scale=net.head_k_dim**-0.5, eps=1e-6)
        return q, k, v.reshape(*lead, net.num_v_heads, net.head_v_dim)

    def _decay(self, a: mx.array) -> mx.array:
        """g = exp(-exp(A_log) softplus(a + dt_bias)), fp32 [1, T, Hv]."""
        rate = mx.exp(self.layer.A_log.astype(mx.float32))
        step = a.astype(mx.float32) + self.layer.dt_bias.astype(mx.float32)
        return mx.exp(-rate * nn.softplus(step))
