"""A Gated DeltaNet layer run by the project: mlx-lm's weights, our state and recurrence."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from lse_mlx.kernels.gated_delta_verify import DeltaRows, fold_rows, gated_delta_verify
from lse_mlx.kernels.registry import Registry
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
    """The layer in MLX and the project's kernel.

    dtype: of the activations; taps: the depthwise convolution, [channels] each, oldest tap first

    Everything between the products is either element-wise or a sum along one row's head, so that a
    row's bits do not depend on how many rows are in the pass.
    """

    layer: GatedDeltaNet
    dtype: mx.Dtype
    registry: Registry
    taps: tuple[mx.array, ...]

    @classmethod
    def of(cls, layer: Any, dtype: mx.Dtype, registry: Registry) -> "DeltaLayer":
        """From a GatedDeltaNet with activations of `dtype`."""
        weight = layer.conv1d.weight  # [channels, kernel, 1]
        taps = tuple(mx.contiguous(weight[:, tap, 0]) for tap in range(weight.shape[1]))
        return cls(layer, dtype, registry, taps)

    def new_state(self) -> DeltaState:
        """See `DeltaMixer`: all zeros."""
        net = self.layer
        return DeltaState(
            tail=mx.zeros((1, net.conv_kernel_size - 1, net.conv_dim), self.dtype),
            recurrent=mx.zeros((1, net.num_v_heads, net.head_v_dim, net.head_k_dim), mx.float32),
            fold=partial(fold_rows, self.registry),
        )

    def __call__(self, x: mx.array, state: DeltaState, whole: bool) -> mx.array:
        """See `DeltaMixer`."""
        net, t, fused = self.layer, x.shape[1], self.registry.compiled
        inputs = mx.concatenate([state.tail, net.in_proj_qkv(x)], axis=1)
        windows = [inputs[:, tap : tap + t] for tap in range(len(self.taps))]
        mixed = fused(short_convolution)(*windows, *self.taps)
        decay, beta = fused(gates)(net.in_proj_a(x), net.in_proj_b(x), net.A_log, net.dt_bias)
        rows = DeltaRows(mixed, decay, beta)
        y, kept = gated_delta_verify(
            self.registry, rows, state.pending, state.n_pending, state.recurrent, whole
        )
        state.open(inputs, rows, kept, whole)
        normed = mx.fast.rms_norm(y, net.norm.weight, net.norm.eps)
        gated = fused(gate_output)(normed, net.in_proj_z(x).reshape(y.shape))
        return net.out_proj(gated.reshape(1, t, -1))


def short_convolution(*windows_and_taps: mx.array) -> mx.array:
    """silu of the sum of each window times its tap, in fp32, rounded to the windows' dtype.

    First the windows, T [1, rows, channels] each, the oldest inputs first; then as many taps
    [channels].
    """
    n = len(windows_and_taps) // 2
    first, *others = (
        window.astype(mx.float32) * tap.astype(mx.float32)
        for window, tap in zip(windows_and_taps[:n], windows_and_taps[n:], strict=True)
    )
    y = sum(others, start=first)
    return (y * mx.sigmoid(y)).astype(windows_and_taps[0].dtype)


def gates(
    a: mx.array, b: mx.array, a_log: mx.array, dt_bias: mx.array
) -> tuple[mx.array, mx.array]:
    """Decay exp(-exp(A_log) softplus(a + dt_bias)) and write strength sigmoid(b).

    a, b: T [1, rows, Hv]; a_log, dt_bias: [Hv]. Returns fp32 [1, rows, Hv] each: near one a decay
    needs more digits than bf16 has.
    """
    step = a.astype(mx.float32) + dt_bias.astype(mx.float32)
    softplus = mx.logaddexp(step, 0.0)
    decay = mx.exp(-mx.exp(a_log.astype(mx.float32)) * softplus)
    return decay, mx.sigmoid(b.astype(mx.float32))


def gate_output(normed: mx.array, z: mx.array) -> mx.array:
    """normed * silu(z) in fp32, rounded to the dtype of `z`; both of the same shape.

    Not to that of `normed`: the norm's weight is fp32 in some checkpoints, and would widen every
    activation and cache behind it.
    """
    gate = z.astype(mx.float32)
    return (gate * mx.sigmoid(gate) * normed.astype(mx.float32)).astype(z.dtype)
