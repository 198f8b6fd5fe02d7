"""A Gated DeltaNet layer on a CPU: mlx-lm's weights, everything from projection to output in NumPy.

The products are NumPy's there (`HostLinear`); MLX in between would hand each small operation to its
own thread and wait for it, which costs more than the arithmetic.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from lse_mlx.kernels.gated_delta_verify import KERNEL, NORM_EPS
from lse_mlx.kernels.host_arithmetic import Rows, host_norm, host_sigmoid, host_silu
from lse_mlx.kernels.host_gated_delta import (
    HostDeltaRows,
    host_fold_rows,
    host_gated_delta_verify,
)
from lse_mlx.kernels.host_linear import HostLinear, host_tiles
from lse_mlx.kernels.registry import Registry
from lse_mlx.target.state import DeltaState


@dataclass(frozen=True)
class HostDeltaLayer:
    """The same layer as `DeltaLayer`, in fp32 and with a state of NumPy arrays.

    joined: the four input projections as one: q, k and v, then z, b and a
    taps:   fp32 [kernel, channels], the depthwise convolution, oldest tap first
    rate:   fp32 [Hv], exp(A_log); dt_bias: fp32 [Hv]; gain: fp32 [Dv], of the gated norm
    """

    layer: GatedDeltaNet
    registry: Registry
    joined: HostLinear
    out: HostLinear
    taps: Rows
    rate: Rows
    dt_bias: Rows
    gain: Rows

    @classmethod
    def of(cls, layer: Any, registry: Registry) -> "HostDeltaLayer":
        """From a GatedDeltaNet whose projections are `HostLinear` already.

        Takes the input projections out of it: joined, they would lie in memory twice.
        """
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return cls(
            layer=layer,
            registry=registry,
            joined=HostLinear.joined([layer.pop(name) for name in names]),
            out=layer.out_proj,
            taps=np.array(layer.conv1d.weight[:, :, 0].T),
            rate=np.exp(np.array(layer.A_log)),
            dt_bias=np.array(layer.dt_bias),
            gain=np.array(layer.norm.weight),
        )

    def new_state(self) -> DeltaState:
        """See `DeltaMixer`: all zeros."""
        net = self.layer
        return DeltaState(
            tail=np.zeros((1, net.conv_kernel_size - 1, net.conv_dim), np.float32),
            recurrent=np.zeros((1, net.num_v_heads, net.head_v_dim, net.head_k_dim), np.float32),
            fold=self._fold,
        )

    def __call__(self, x: mx.array, state: DeltaState, whole: bool) -> mx.array:
        """See `DeltaMixer`."""
        net, t = self.layer, x.shape[1]
        ends = np.cumsum([net.conv_dim, net.value_dim, net.num_v_heads])
        qkv, z, b, a = np.split(self.joined.product(host_tiles(x))[None, :t], ends, axis=-1)
        inputs = np.concatenate([state.tail, qkv], axis=1)
        q, k, v = self._heads(host_silu(self._convolve(inputs, t)))
        decay = np.exp(-self.rate * np.logaddexp(a + self.dt_bias, np.float32(0)))
        rows = HostDeltaRows(k, v, decay, host_sigmoid(b))
        self.registry.reference(KERNEL.name)
        y, kept = host_gated_delta_verify(
            q, rows, state.pending, state.n_pending, state.recurrent, whole
        )
        state.open(inputs, rows, kept, whole)
        y = host_norm(y, self.gain, net.layer_norm_epsilon) * host_silu(z.reshape(y.shape))
        return mx.array(self.out.product(host_tiles(y.reshape(1, t, -1)))[None, :t])

    def _fold(self, rows: HostDeltaRows, n: int, state: Rows) -> Rows:
        self.registry.reference(KERNEL.name)
        return host_fold_rows(rows, n, state)

    def _convolve(self, inputs: Rows, t: int) -> Rows:
        y = inputs[:, :t] * self.taps[0]
        for tap in range(1, len(self.taps)):
            y += inputs[:, tap : tap + t] * self.taps[tap]
        return y

    def _heads(self, mixed: Rows) -> tuple[Rows, Rows, Rows]:
        net, lead = self.layer, mixed.shape[:2]
        q, k, v = np.split(mixed, [net.key_dim, 2 * net.key_dim], axis=-1)
        q = _unit(q.reshape(*lead, net.num_k_heads, net.head_k_dim))
        k = _unit(k.reshape(*lead, net.num_k_heads, net.head_k_dim))
        scale = np.float32(net.head_k_dim**-0.5)
        return q * scale, k, v.reshape(*lead, net.num_v_heads, net.head_v_dim)


def _unit(x: Rows) -> Rows:
    # Sums run along a head, so a row's bits do not depend on how many there are.
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(NORM_EPS))
