"""What a target state holds, as NumPy arrays, and whether two hold the same bits."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lse_mlx.target.state import DeltaState, TargetState

Held = list[dict[str, NDArray[np.float32]]]


def in_numpy(array: Any) -> NDArray[np.float32]:
    """An array of either kind; NumPy has no bf16, and fp32 holds each of its values."""
    return np.array(array.astype(mx.float32) if isinstance(array, mx.array) else array)


def held_by(state: TargetState) -> Held:
    """The arrays of every layer for the committed tokens; the state itself is left as it is."""
    assert state.open_rows == 0
    held: Held = []
    for layer in state.layers:
        if isinstance(layer, DeltaState):
            assert layer.inputs is None
            assert layer.rows is None
            settled = replace(layer)
            settled.settle()
            held.append({"tail": in_numpy(layer.tail), "recurrent": in_numpy(settled.recurrent)})
        elif layer.keys is None:
            held.append({})
        else:
            assert layer.offset == state.position
            cut = slice(0, layer.offset)
            held.append(
                {
                    "keys": in_numpy(layer.keys[:, :, cut]),
                    "values": in_numpy(layer.values[:, :, cut]),
                }
            )
    return held


def assert_same(state: TargetState | Held, expected: TargetState | Held) -> None:
    """Both hold the same bits, layer by layer."""
    got, wanted = (held_by(s) if isinstance(s, TargetState) else s for s in (state, expected))
    assert len(got) == len(wanted)
    for index, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert np.array_equal(mine[name], theirs[name]), f"{name} of layer {index} differ"
