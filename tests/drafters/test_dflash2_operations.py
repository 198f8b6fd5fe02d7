"""Attention, gate, norm and rotation by hand, in both forms, and both models."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.drafters.dflash2 import DFlash2Config
from lse_mlx.drafters.dflash2.model import DFlash2Model
from lse_mlx.drafters.dflash2.operations import Operations, device_operations
from lse_mlx.drafters.dflash2.ring import ContextRing
from lse_mlx.drafters.dflash2.rotation import Rotation
from lse_mlx.drafters.dflash2.weights import DFlash2Weights
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.sliding_attention import RingView
from tests.drafters.forms import FORMS
from tests.drafters.reference_dflash2 import ReferenceDrafter
from tests.drafters.tiny_dflash2 import (
    BLOCK,
    dense64,
    quantize,
    random_features,
    save,
    tiny_config,
    tiny_target,
    tiny_tensors,
)
from tests.kernels.modes import assert_same_bits


@FORMS
def test_attention_by_hand(form: Operations) -> None:
    """Two query heads on one pair of keys and values; NaN in a slot where no row is live."""
    queries = mx.array([[[1.0, 0.0], [0.0, 2.0]]])
    ring = mx.array([[[[1.0, 0.0], [np.nan, 9.0], [0.0, 0.0]]], [[[1.0, 0], [np.nan, 5], [0, 0]]]])
    block = mx.array([[[[0.0, 1.0]]], [[[0.0, 1.0]]]])
    view = RingView(position=5, live=1, window=3, slots=2, block=1)  # the row at 4 is in slot 0
    mixed = form.attend(form.own(queries), form.own(ring), form.own(block), view)
    near, far = (np.exp(s / np.sqrt(2)) / (1 + np.exp(s / np.sqrt(2))) for s in (1.0, 2.0))
    np.testing.assert_allclose(np.array(mixed), [[near, 1 - near, 1 - far, far]], atol=1e-6)


@FORMS
def test_the_mask_by_hand(form: Operations) -> None:
    """Three queries that weigh alike what they see: rows at 1 and 2 by the window, and the block."""
    rows = [(np.nan, np.nan), (2, 4), (6, 8), (10, 12), (14, 16), (18, 20)]
    values = np.array(rows, np.float32).reshape(1, 1, 6, 2)
    keys = np.zeros_like(values)
    scratch = np.zeros((2, 1, 3, 2), np.float32)
    ring, block = np.split(np.concatenate([keys, values]), 2, axis=2)
    ring = np.concatenate([ring, scratch], axis=2)
    view = RingView(position=3, live=2, window=3, slots=3, block=3)
    arrays = (form.own(mx.array(a)) for a in (np.zeros((3, 2, 2), np.float32), ring, block))
    expected = [[10, 12, 10, 12], [12, 14, 12, 14], [14, 16, 14, 16]]
    np.testing.assert_allclose(np.array(form.attend(*arrays, view)), expected, rtol=1e-6)


@FORMS
def test_heads_share_keys_in_order_and_the_last_block_row_reaches_the_first(
    form: Operations,
) -> None:
    rng = np.random.default_rng(0)
    queries = form.own(mx.array(rng.standard_normal((8, 6, 4)).astype(np.float32)))
    ring = form.own(mx.array(rng.standard_normal((2, 2, 20, 4)).astype(np.float32)))
    block = form.own(mx.array(rng.standard_normal((2, 2, 8, 4)).astype(np.float32)))
    view = RingView(position=12, live=12, window=100, slots=12, block=8)
    before = np.array(form.attend(queries, ring, block, view)).reshape(8, 6, 4)
    block[1, 1, 7] += 1.0
    after = np.array(form.attend(queries, ring, block, view)).reshape(8, 6, 4)
    assert (after[:, :3] == before[:, :3]).all(), "heads 0..2 read key/value head 0"
    assert (after[:, 3:] > before[:, 3:]).all(), "every row sees the last one, row 0 too"


@FORMS
def test_gate(form: Operations) -> None:
    gate_up = mx.array([[0.0, 1.0, -200.0, 30.0, 3.0, 2.0, 5.0, -1.0]])
    expected = [0.0, 2 / (1 + np.exp(-1.0)), 0.0, -30.0]
    np.testing.assert_allclose(np.array(form.gate(form.own(gate_up)))[0], expected, atol=1e-6)


def test_the_gate_of_a_device_is_one_fused_function_that_is_counted() -> None:
    """Compiled once, whatever the rows; the bits of the same arithmetic, one operation after another."""

    def build(**text: Any) -> Any:
        raise AssertionError(text["name"])

    registry = Registry("metal", build)
    fused, plain = device_operations(registry), device_operations(Registry("reference"))
    values = np.random.default_rng(2).standard_normal((8, 2 * 24)).astype(np.float32)
    for rows in (1, 8, 3):
        gate_up = mx.array(4 * values[:rows])
        out = np.array(fused.gate(gate_up))
        assert_same_bits(np.array(plain.gate(gate_up)), out)
        gate, up = np.split(4 * values[:rows].astype(np.float64), 2, axis=1)
        np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=2e-6)
    assert [c.name for c in registry.compilations] == ["gated"]


@FORMS
def test_norm_is_by_the_stored_weight_without_an_offset(form: Operations) -> None:
    x, eps = mx.array([[[3.0, 4.0], [0.0, 0.0]]]), 0.5
    once, twice = form.own(mx.array([2.0, -1.0])), form.own(mx.array([[2.0, -1.0], [5.0, 5.0]]))
    root = np.sqrt(12.5 + eps)
    expected = [[[6 / root, -4 / root], [0, 0]]]
    for weight in (once, twice):
        normed = np.array(form.norm(form.own(x), weight, eps))
        np.testing.assert_allclose(normed, expected, rtol=1e-6)
        assert normed.dtype == np.float32


@FORMS
def test_rotation_turns_pairs_half_a_head_apart(form: Operations) -> None:
    rotation = Rotation.at(np.array([0, 3]), head_dim=4, theta=100.0, operations=form)
    x = form.own(mx.array([[[1.0, 2.0, 3.0, 4.0]]] * 2))
    turned = np.array(rotation(x))[:, 0]
    np.testing.assert_array_equal(turned[0], [1, 2, 3, 4])
    fast, slow = 3.0, 3.0 / 10
    expected = [
        np.cos(fast) - 3 * np.sin(fast),
        2 * np.cos(slow) - 4 * np.sin(slow),
        3 * np.cos(fast) + np.sin(fast),
        4 * np.cos(slow) + 2 * np.sin(slow),
    ]
    np.testing.assert_allclose(turned[1], expected, atol=1e-6)


@FORMS
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_both_forms_of_the_model_equal_the_reference(
    tmp_path: Path, form: Operations, bits: int
) -> None:
    """On a GPU matrices stay quantized and operations are MLX's; here they run on any device."""
    values, tensors, target = tiny_config(), tiny_tensors(bits), tiny_target(bits)
    if bits:
        tensors = quantize(tensors, bits)
        values["quantization"] = {"group_size": 32, "bits": bits}
    config = DFlash2Config.parse(values)
    weights = DFlash2Weights.read(save(tmp_path, values, tensors), config)
    model, ring = DFlash2Model(config, weights, form), ContextRing(config, form)
    reference = ReferenceDrafter(
        values, dense64(tensors, bits), target.table.astype(float), target.output.astype(float)
    )
    features = random_features(29)
    ring.append(model.context_rows(mx.array(features[-19:]), 10), 0, skipped=10)
    reference.append(features.astype(np.float64), 0)
    block = mx.array([11] + [7] * (BLOCK - 1))
    hidden = model.block_rows(target.embed(block), ring)
    np.testing.assert_allclose(np.array(hidden), reference.draft(11).hidden, atol=1e-4)
