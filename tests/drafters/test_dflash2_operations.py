"""Convolution, attention, gate, norm and rotation by hand, in both forms, and both models."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.drafters.dflash2 import DFlash2Config
from lse_mlx.drafters.dflash2.convolution import dynamic_convolution
from lse_mlx.drafters.dflash2.model import DFlash2Model
from lse_mlx.drafters.dflash2.operations import DEVICE, HOST, Operations
from lse_mlx.drafters.dflash2.ring import ContextRing
from lse_mlx.drafters.dflash2.rotation import Rotation
from lse_mlx.drafters.dflash2.weights import DFlash2Weights
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

FORMS = pytest.mark.parametrize("form", [DEVICE, HOST], ids=["device", "host"])


@FORMS
def test_convolution_by_hand(form: Operations) -> None:
    """Two channels of one group, three rows: the edge has no row before it."""
    x = mx.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    base = mx.zeros((2, 2, 1, 2))
    base[1, 0, 0] = mx.array([10.0, 20.0])
    base[1, 1, 0] = mx.array([0.5, 0.25])
    # Rows of [side 0: tap 0, tap 1; side 1: tap 0, tap 1].
    dynamic = mx.array([[9.0, 9.0, 1.0, 7.0], [9.0, 9.0, 2.0, 0.0], [9.0, 9.0, 0.0, 1.0]])
    y = dynamic_convolution(form.own(x), form.own(base), form.own(dynamic), 1)
    assert y.tolist() == [
        [11 * 1, 21 * 2],  # tap 1 of row 0 would read before the block
        [12 * 3 + 0.5 * 1, 22 * 4 + 0.25 * 2],
        [10 * 5 + 1.5 * 3, 20 * 6 + 1.25 * 4],
    ]


@FORMS
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_group_shares_its_coefficient_and_inputs_are_kept(form: Operations, rows: int) -> None:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 12)).astype(np.float32)
    base = rng.standard_normal((2, 2, 3, 4)).astype(np.float32)
    dynamic = rng.standard_normal((rows, 2 * 2 * 3)).astype(np.float32)
    given = [form.own(mx.array(a)) for a in (x, base, dynamic)]
    for side in (0, 1):
        y = np.array(dynamic_convolution(given[0], given[1], given[2], side))
        for t in range(rows):
            for c in range(12):
                at = side * 6 + c // 4
                expected = (base[side, 0].ravel()[c] + dynamic[t, at]) * x[t, c]
                if t:
                    expected += (base[side, 1].ravel()[c] + dynamic[t, at + 3]) * x[t - 1, c]
                assert y[t, c] == pytest.approx(expected, abs=1e-5)
    for array, before in zip(given, (x, base, dynamic), strict=True):
        np.testing.assert_array_equal(np.array(array), before)


@FORMS
def test_attention_by_hand(form: Operations) -> None:
    """Two query heads on one pair of keys and values; a hidden slot counts for nothing."""
    queries = mx.array([[[1.0, 0.0], [0.0, 2.0]]])
    keys_values = mx.array([[[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]], [[[1.0, 0], [0, 1], [5, 5]]]])
    mask = form.own(mx.array([[0.0, 0.0, -np.inf]]))
    mixed = form.attend(form.own(queries), form.own(keys_values), mask)
    near, far = (np.exp(s / np.sqrt(2)) / (1 + np.exp(s / np.sqrt(2))) for s in (1.0, 2.0))
    np.testing.assert_allclose(np.array(mixed), [[near, 1 - near, 1 - far, far]], atol=1e-6)


@FORMS
def test_heads_share_keys_in_order_and_the_last_block_row_reaches_the_first(
    form: Operations,
) -> None:
    rng = np.random.default_rng(0)
    queries = form.own(mx.array(rng.standard_normal((8, 6, 4)).astype(np.float32)))
    keys_values = form.own(mx.array(rng.standard_normal((2, 2, 20, 4)).astype(np.float32)))
    all_seen = form.own(mx.zeros((8, 20)))
    before = np.array(form.attend(queries, keys_values, all_seen)).reshape(8, 6, 4)
    keys_values[1, 1, 19] += 1.0
    after = np.array(form.attend(queries, keys_values, all_seen)).reshape(8, 6, 4)
    assert (after[:, :3] == before[:, :3]).all(), "heads 0..2 read key/value head 0"
    assert (after[:, 3:] > before[:, 3:]).all(), "every row sees the last one, row 0 too"


@FORMS
def test_gate(form: Operations) -> None:
    gate_up = mx.array([[0.0, 1.0, -200.0, 30.0, 3.0, 2.0, 5.0, -1.0]])
    expected = [0.0, 2 / (1 + np.exp(-1.0)), 0.0, -30.0]
    np.testing.assert_allclose(np.array(form.gate(form.own(gate_up)))[0], expected, atol=1e-6)


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
