"""Whole drafts by device kernels, run by the harness, against the form for a CPU."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.drafters.dflash2 import DFlash2, DFlash2Config, DFlash2Context
from lse_mlx.drafters.dflash2.weights import DFlash2Weights
from lse_mlx.errors import DraftError
from lse_mlx.kernels.registry import Registry
from tests.drafters.tiny_dflash2 import (
    SLOTS,
    TinyTarget,
    quantize,
    random_features,
    save,
    shared,
    tiny_config,
    tiny_target,
    tiny_tensors,
)
from tests.kernels.modes import needs_compiler, own_registry
from tests.metal_host.host import HostOptions, MetalHost

pytestmark = needs_compiler
HEAD_DIM = 32
"""Attention has a kernel for multiples of 32."""


def drafters(
    folder: Path, bits: int, *registries: Registry, target: TinyTarget | None = None
) -> list[DFlash2]:
    """One drafter in several forms."""
    values, tensors = tiny_config(head_dim=HEAD_DIM), tiny_tensors(bits, head_dim=HEAD_DIM)
    if bits:
        tensors = quantize(tensors, bits)
        values["quantization"] = {"group_size": 32, "bits": bits}
    config = DFlash2Config.parse(values)
    weights = DFlash2Weights.read(save(folder, values, tensors), config)
    target = target or tiny_target(bits)
    return [DFlash2(config, weights, shared(target), each) for each in registries]


class HeadWithNan(TinyTarget):
    """Its logits of row 2 have a NaN, which is no candidate's score but its own."""

    def head(self, hidden: mx.array) -> mx.array:
        logits = super().head(hidden)
        logits[2, 50] = mx.nan
        return logits


def steps(context: DFlash2Context, features: mx.array) -> Iterator[int]:
    """Appends of uneven sizes, past the end of the ring, and a rewind; an anchor after each."""
    for rows in (5, 8, 8, 2):
        first = context.position
        context.append(features[first : first + rows], first)
        yield 11 + first
    context.rewind(context.position - 3)
    yield 5
    assert context.position > SLOTS


@pytest.mark.parametrize("bits", [0, 8])
def test_a_draft_by_kernels_is_the_draft_of_the_form_for_a_cpu(tmp_path: Path, bits: int) -> None:
    device_registry, host_registry = own_registry(MetalHost().metal_kernel), Registry("reference")
    device, host = drafters(tmp_path, bits, device_registry, host_registry)
    contexts = device.new_context(), host.new_context()
    features = mx.array(random_features(60, seed=bits))
    uniforms = np.random.default_rng(bits).random(7)
    for anchor, _ in zip(*(steps(context, features) for context in contexts), strict=True):
        by_kernels, on_host = (
            each.lattice(anchor, context._ring)
            for each, context in zip((device, host), contexts, strict=True)
        )
        np.testing.assert_array_equal(np.array(by_kernels.ids), np.array(on_host.ids))
        np.testing.assert_allclose(
            np.array(by_kernels.scores), np.array(on_host.scores), rtol=0, atol=1e-4
        )
        for temperature in (0.0, 1.0):
            one, other = (
                context.propose(anchor, temperature, iter(uniforms).__next__)
                for context in contexts
            )
            assert one.tokens == other.tokens
            for p, q in zip(one.q, other.q, strict=True):
                np.testing.assert_array_equal(p.ids, q.ids)
                np.testing.assert_allclose(p.probs, q.probs, atol=1e-4)
    by_metal, by_numpy = device_registry.served, host_registry.served
    assert {form for _, form in by_metal} == {"metal"}
    assert by_metal["topk_chunk", "metal"] == by_numpy["topk", "reference"] > 0
    for name in ("selector", "dynamic_conv", "sliding_attention"):
        assert by_metal[name, "metal"] == by_numpy[name, "reference"] > 0


def test_a_draft_in_checked_mode_is_the_same(tmp_path: Path) -> None:
    checked = own_registry(MetalHost(HostOptions(checked=True, seed=1)).metal_kernel)
    plain = own_registry(MetalHost().metal_kernel)
    features = mx.array(random_features(9))
    lattices = []
    for each in drafters(tmp_path, 8, plain, checked):
        context = each.new_context()
        context.append(features, 0)
        lattices.append(each.lattice(11, context._ring))
    for part in ("scores", "ids", "path"):
        one, other = (np.array(getattr(lattice, part)) for lattice in lattices)
        np.testing.assert_array_equal(one, other)


def test_a_nan_on_the_path_is_refused_in_the_words_of_the_walk_on_a_cpu(tmp_path: Path) -> None:
    messages: list[str] = []
    plain = tiny_target()
    target = HeadWithNan(plain.table, plain.output)
    device, host = own_registry(MetalHost().metal_kernel), Registry("reference")
    for each in drafters(tmp_path, 0, device, host, target=target):
        context = each.new_context()
        context.append(mx.array(random_features(9)), 0)
        with pytest.raises(DraftError, match="Draft position 2 has the score nan") as caught:
            context.propose(11, 0.0, lambda: 0.5)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
