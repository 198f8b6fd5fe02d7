"""A Gated DeltaNet layer run by the project: mlx-lm's weights, our state and our recurrence."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import normalize_qk
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from lse_mlx.kernels.gated_delta import DeltaRows, read_rows
from lse_mlx.target.state import DeltaState


def new_delta_state(layer: GatedDeltaNet, dtype: mx.Dtype) -> DeltaState:
    """The state before the first token: all zeros."""
    return DeltaState(
        tail=mx.zeros((1, layer.conv_kernel_size - 1, layer.conv_dim), dtype),
        recurrent=mx.zeros((1, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim), mx.float32),
    )


def mix(layer: GatedDeltaNet, x: mx.array, state: DeltaState, whole: bool) -> mx.array:
    """The layer's output for the rows of a pass, opening the pass in `state`.

    x: [1, T, hidden], already normed; returns [1, T, hidden]. `whole` says that the pass can only
    be committed as a whole, so that the state after it replaces the one before at once.
    """
    t = x.shape[1]
    inputs = mx.concatenate([state.tail, layer.in_proj_qkv(x)], axis=1)
    q, k, v = _heads(layer, nn.silu(_convolve(layer, inputs, t)))
    rows = DeltaRows(k, v, _decay(layer, layer.in_proj_a(x)), mx.sigmoid(layer.in_proj_b(x)))
    state.fold_pending()
    y, after = read_rows(q, rows, state.recurrent)
    state.inputs = inputs
    if whole:
        state.recurrent = after
    else:
        state.rows = rows
    z = layer.in_proj_z(x).reshape(y.shape)
    return layer.out_proj(layer.norm(y, z).reshape(1, t, -1))


def _convolve(layer: GatedDeltaNet, inputs: mx.array, t: int) -> mx.array:
    """The depthwise causal convolution: [1, kernel - 1 + T, channels] to [1, T, channels]."""
    if mx.default_device() != mx.cpu:
        return layer.conv1d(inputs)
    # Tap by tap: on a CPU MLX's grouped convolution goes channel by channel, ten times as slow.
    taps = layer.conv1d.weight[:, :, 0]
    y = inputs[:, :t] * taps[:, 0]
    for tap in range(1, taps.shape[1]):
        y = y + inputs[:, tap : tap + t] * taps[:, tap]
    return y


def _heads(layer: GatedDeltaNet, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Split [1, T, channels] into q and k [1, T, Hk, Dk], normalized, and v [1, T, Hv, Dv]."""
    lead = mixed.shape[:2]
    q, k, v = mx.split(mixed, [layer.key_dim, 2 * layer.key_dim], axis=-1)
    q = q.reshape(*lead, layer.num_k_heads, layer.head_k_dim)
    k = k.reshape(*lead, layer.num_k_heads, layer.head_k_dim)
    q, k = normalize_qk(q, k, inv_scale=layer.head_k_dim**-0.5, eps=1e-6)
    return q, k, v.reshape(*lead, layer.num_v_heads, layer.head_v_dim)


def _decay(layer: GatedDeltaNet, a: mx.array) -> mx.array:
    """g = exp(-exp(A_log) softplus(a + dt_bias)), fp32 [1, T, Hv]."""
    rate = mx.exp(layer.A_log.astype(mx.float32))
    return mx.exp(-rate * nn.softplus(a + layer.dt_bias).astype(mx.float32))
