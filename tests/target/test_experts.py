"""Layers of experts: what they compute, whom each row asks, and that a row does not mind company."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock as SparseMoeBlock
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from numpy.typing import NDArray
from scipy.special import expit, softmax

from lse_mlx.target.expert_layer import ExpertLayer, ExpertMixer, ExpertSizes
from lse_mlx.target.host_expert_layer import HostExpertLayer
from lse_mlx.target.host_form import move_to_host
from lse_mlx.target.model import Target
from tests.tiny_models import EXPERTS, load_tiny, on_cpu, random_prompt

HIDDEN, WIDTH, SHARED_WIDTH, COUNT, TOP = 64, 128, 40, 12, 3
Matrices = dict[str, NDArray[np.float32]]
each_form = pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])


# What mlx-lm's block reads of a config.
ARGUMENTS: Any = SimpleNamespace(
    hidden_size=HIDDEN,
    moe_intermediate_size=WIDTH,
    shared_expert_intermediate_size=SHARED_WIDTH,
    num_experts=COUNT,
    num_experts_per_tok=TOP,
    norm_topk_prob=True,
)


def drawn(seed: int = 0) -> Matrices:
    """Random weights of a layer, by mlx-lm's names."""
    rng = np.random.default_rng(seed)
    shapes = {
        "gate": (COUNT, HIDDEN),
        "shared_expert_gate": (1, HIDDEN),
        "shared_expert.gate_proj": (SHARED_WIDTH, HIDDEN),
        "shared_expert.up_proj": (SHARED_WIDTH, HIDDEN),
        "shared_expert.down_proj": (HIDDEN, SHARED_WIDTH),
        "switch_mlp.gate_proj": (COUNT, WIDTH, HIDDEN),
        "switch_mlp.up_proj": (COUNT, WIDTH, HIDDEN),
        "switch_mlp.down_proj": (COUNT, HIDDEN, WIDTH),
    }
    return {
        name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in shapes.items()
    }


def block_of(matrices: Matrices, normed: bool = True) -> SparseMoeBlock:
    """mlx-lm's block with these weights."""
    block = SparseMoeBlock(ARGUMENTS)
    block.norm_topk_prob = normed
    block.load_weights([(f"{name}.weight", mx.array(m)) for name, m in matrices.items()])
    return block


class Model(nn.Module):
    """One block where a decoder has it."""

    def __init__(self, block: SparseMoeBlock):
        super().__init__()
        self.layers = [Layer(block)]


class Layer(nn.Module):
    def __init__(self, block: SparseMoeBlock):
        super().__init__()
        self.mlp = block


def form_of(block: SparseMoeBlock, on_host: bool) -> ExpertMixer:
    sizes = ExpertSizes.of(block)
    if not on_host:
        return ExpertLayer(block, sizes)
    move_to_host(Model(block))
    return HostExpertLayer.of(block, sizes)


def rows_of(count: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


def run(layer: ExpertMixer, rows: NDArray[np.float32]) -> tuple[NDArray, NDArray]:
    y, routes = layer(mx.array(rows)[None])
    assert y.shape == (1, *rows.shape)
    assert routes.dtype == mx.int32
    return np.array(y[0]), np.array(routes)


def ranked(scores: NDArray[np.float64], top: int) -> list[int]:
    """The `top` best ids by the definition: higher scores first, lower ids among equals."""
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:top]


def defined(m: Matrices, x: NDArray, normed: bool) -> tuple[NDArray, list[int]]:
    """The layer for one row in float64, expert by expert."""
    wide = {name: matrix.astype(np.float64) for name, matrix in m.items()}
    row = x.astype(np.float64)

    def gated(gate: NDArray, up: NDArray, down: NDArray) -> NDArray:
        hidden = gate @ row
        return down @ (hidden * expit(hidden) * (up @ row))

    scores = softmax(wide["gate"] @ row)
    chosen = ranked(scores, TOP)
    total = sum(scores[e] for e in chosen) if normed else 1.0
    parts = [
        scores[e]
        / total
        * gated(*(wide[f"switch_mlp.{part}_proj"][e] for part in ("gate", "up", "down")))
        for e in chosen
    ]
    shared = gated(*(wide[f"shared_expert.{part}_proj"] for part in ("gate", "up", "down")))
    return sum(parts) + expit(wide["shared_expert_gate"] @ row) * shared, chosen


@each_form
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("count", [1, 5, 24])
def test_a_row_is_the_weighted_sum_of_its_experts(on_host: bool, normed: bool, count: int) -> None:
    matrices, rows = drawn(), rows_of(count)
    y, routes = run(form_of(block_of(matrices, normed), on_host), rows)
    expected = [defined(matrices, row, normed) for row in rows]
    assert routes.tolist() == [chosen for _, chosen in expected]
    np.testing.assert_allclose(y, [row for row, _ in expected], atol=2e-6)


@each_form
@pytest.mark.parametrize("count", [1, 9, 40])
def test_it_is_mlx_lms_own_block(on_host: bool, count: int) -> None:
    """With 40 rows mlx-lm sorts rows by expert first."""
    rows = rows_of(count)
    stock = np.array(block_of(drawn())(mx.array(rows)[None])[0])
    y, _ = run(form_of(block_of(drawn()), on_host), rows)
    np.testing.assert_allclose(y, stock, atol=2e-6)


@pytest.mark.parametrize("rows", range(1, 26))
def test_a_row_has_the_same_bits_alone_and_among_others(rows: int) -> None:
    layer, x = form_of(block_of(drawn()), True), rows_of(25)
    alone = [run(layer, x[i : i + 1]) for i in range(rows)]
    y, routes = run(layer, x[:rows])
    assert np.array_equal(y, np.concatenate([y for y, _ in alone]))
    assert np.array_equal(routes, np.concatenate([routes for _, routes in alone]))
    backwards, _ = run(layer, x[:rows][::-1].copy())
    assert np.array_equal(backwards, y[::-1])


@each_form
def test_of_equal_scores_the_lowest_ids_are_chosen_in_order(on_host: bool) -> None:
    matrices = drawn()
    matrices["gate"][:] = matrices["gate"][0]  # every expert has every other's score
    matrices["gate"][7] = 1.5 * matrices["gate"][0]
    rows = rows_of(16)
    _, routes = run(form_of(block_of(matrices), on_host), rows)
    higher = rows @ matrices["gate"][0] > 0
    assert set(higher) == {True, False}
    assert routes.tolist() == [[7, 0, 1] if best else [0, 1, 2] for best in higher]


def test_rows_that_are_not_finite_are_answered_without_a_warning() -> None:
    """The target's logits are what is refused, by whoever chooses a token."""
    rows = rows_of(2)
    rows[0, 3] = np.nan
    y, routes = run(form_of(block_of(drawn()), True), rows)
    assert np.isnan(y[0]).all()
    assert np.array_equal(y[1:], run(form_of(block_of(drawn()), True), rows[1:])[0])
    assert ((routes >= 0) & (routes < COUNT)).all()


@pytest.mark.parametrize(
    ("mode", "group_size", "bits"),
    [("affine", 32, 4), ("affine", 64, 8), ("mxfp4", 32, 4), ("mxfp8", 32, 8)],
)
def test_experts_in_codes_are_what_their_codes_mean(mode: str, group_size: int, bits: int) -> None:
    """Held to MLX's own product of the codes, in fp32."""
    matrices, rows = drawn(), rows_of(6)

    def quantized() -> SparseMoeBlock:
        block = block_of(matrices)
        nn.quantize(block.switch_mlp, group_size, bits, mode=mode)
        assert isinstance(block.switch_mlp.up_proj, QuantizedSwitchLinear)
        return block

    stock = np.array(quantized()(mx.array(rows)[None])[0])
    y, _ = run(form_of(quantized(), True), rows)
    np.testing.assert_allclose(y, stock, atol=2e-5)


def test_experts_with_a_scale_of_their_own_keep_it() -> None:
    """Of nvfp4 with a scale a stack entry; MLX has no such product on a CPU to compare with."""
    matrices, rows = drawn(), rows_of(6)
    block = block_of(matrices)
    # Experts of very different sizes, which one scale for all would not serve.
    sizes = np.exp2(np.arange(COUNT, dtype=np.float32) - 6)[:, None, None]
    for part in ("gate", "up", "down"):
        name = f"{part}_proj"
        layer = getattr(block.switch_mlp, name)
        layer.weight = layer.weight * mx.array(sizes)
        coded = layer.to_quantized(16, 4, "nvfp4", global_scale=True)
        block.switch_mlp[name] = coded
        matrices[f"switch_mlp.{name}"] = np.stack(
            [
                np.array(
                    mx.dequantize(
                        coded.weight[e],
                        coded.scales[e],
                        mode="nvfp4",
                        global_scale=coded.global_scale[e],
                        dtype=mx.float32,
                    )
                )
                for e in range(COUNT)
            ]
        )
    y, routes = run(form_of(block, True), rows)
    expected = [defined(matrices, row, True) for row in rows]
    assert routes.tolist() == [chosen for _, chosen in expected]
    wanted = np.array([row for row, _ in expected])
    np.testing.assert_allclose(y, wanted, atol=2e-6 * np.abs(wanted).max())


# Whole targets


@pytest.fixture(scope="module")
def in_fp32(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of "moe" in fp32: MLX's CPU has no stock product of bf16 experts."""
    folder = tmp_path_factory.mktemp("moe") / "fp32"
    shutil.copytree(checkpoints["moe"], folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    wide = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.eval(wide)
    mx.save_safetensors(str(folder / "model.safetensors"), wide)
    return folder


def test_sizes_are_those_of_the_stored_experts(checkpoints: dict[str, Path], in_fp32: Path) -> None:
    matrix = HIDDEN * EXPERTS["moe_intermediate_size"]
    codes = matrix // 2 + matrix // 64 * 2 * 2  # with a scale and a bias in bf16 for each group
    for folder, on_host, stored in (
        (checkpoints["moe"], True, 2 * matrix),
        (checkpoints["moe-q4"], True, codes),
        (checkpoints["moe-q4"], False, codes),
        (in_fp32, False, 4 * matrix),
    ):
        sizes = load_tiny(folder, on_host=on_host).expert_sizes
        assert sizes == dict.fromkeys(range(5), ExpertSizes(12, 3, 3 * stored))


def test_a_dense_target_has_no_routes(targets: dict[str, Target]) -> None:
    for kind in ("bf16", "q4", "qwen3"):
        target = targets[kind]
        assert target.expert_sizes == {}
        assert target.verify([1, 2], target.new_state(), ()).routes == {}


@pytest.fixture(scope="module", params=["moe", "moe-q4"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def by_mlx_lm(kind: str, references: dict[str, nn.Module]) -> Iterator[dict[int, NDArray]]:
    """By layer, the scores [rows, experts] of mlx-lm's own model over a prompt of 30 tokens."""
    with on_cpu():
        inner = references[kind].model
        x = inner.embed_tokens(mx.array([random_prompt(30)]))
        scores = {}
        for index, layer in enumerate(inner.layers):
            mixer = layer.linear_attn if layer.is_linear else layer.self_attn
            mask = None if layer.is_linear else create_attention_mask(x)
            x = x + mixer(layer.input_layernorm(x), mask, None)
            normed = layer.post_attention_layernorm(x)
            scores[index] = np.array(mx.softmax(layer.mlp.gate(normed), axis=-1)[0])
            x = x + layer.mlp(normed)
        yield scores


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_routes_are_those_of_mlx_lm(
    targets: dict[str, Target], kind: str, by_mlx_lm: dict[int, NDArray], rows: int
) -> None:
    """Of the prompt's pieces and of verify passes."""
    target, tokens = targets[kind], random_prompt(30)
    state = target.new_state()
    found = [target.advance(tokens[: 30 - rows], state, ()).routes]
    found.append(target.verify(tokens[30 - rows :], state, ()).routes)
    assert all(set(routes) == set(by_mlx_lm) for routes in found)
    for layer, scores in by_mlx_lm.items():
        got = np.concatenate([np.array(routes[layer]) for routes in found])
        apart = np.diff(np.sort(scores, axis=-1)[:, -4:], axis=-1).min(axis=-1) > 1e-5
        assert apart.mean() > 0.9
        expected = [ranked(row, 3) for row in scores]
        assert got[apart].tolist() == np.array(expected)[apart].tolist()
        assert len(np.unique(got)) > 6  # random, but lively


def test_routes_do_not_depend_on_the_rows_of_a_pass(targets: dict[str, Target], kind: str) -> None:
    target, tokens = targets[kind], random_prompt(24)
    one, all_at_once = target.new_state(), target.new_state()
    alone = [target.advance([token], one, ()).routes for token in tokens]
    together = target.verify(tokens, all_at_once, ()).routes
    for layer, routes in together.items():
        assert np.array_equal(np.array(routes), np.concatenate([np.array(r[layer]) for r in alone]))


@pytest.mark.parametrize("rows", [1, 8])
def test_the_device_form_routes_as_the_host_form_does(in_fp32: Path, rows: int) -> None:
    """With MLX's CPU as the device."""
    tokens = random_prompt(rows)
    host, device = (
        target.advance(tokens, target.new_state(), ())
        for target in (load_tiny(in_fp32, on_host=True), load_tiny(in_fp32, on_host=False))
    )
    for layer in range(5):
        assert np.array(device.routes[layer]).tolist() == np.array(host.routes[layer]).tolist()
    np.testing.assert_allclose(np.array(device.logits), np.array(host.logits), atol=2e-4)
