"""An attention layer of the target: mlx-lm's own output, and rows that do not depend on the pass."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import qwen3, qwen3_next
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from lse_mlx.errors import KernelError
from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.contests import attention_contests
from lse_mlx.kernels.registry import DoesNotRun, Registry
from lse_mlx.target.attention_layer import AttentionLayer
from tests.kernels.modes import assert_same_bits, in_every_mode, needs_compiler, own_registry
from tests.metal_host.host import HostOptions, MetalHost

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 64
DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


def attention(gated: bool, dtype: mx.Dtype, head_dim: int = HEAD_DIM) -> Any:
    """mlx-lm's layer with random weights."""
    common: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "intermediate_size": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "vocab_size": 8,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
    }
    if gated:
        common |= {
            "model_type": "qwen3_next",
            "partial_rotary_factor": 0.25,
            "linear_num_value_heads": 1,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 1,
            "linear_value_head_dim": 1,
            "linear_conv_kernel_dim": 4,
            "num_experts": 0,
            "num_experts_per_tok": 0,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 0,
            "mlp_only_layers": [],
            "moe_intermediate_size": 0,
        }
        layer: nn.Module = qwen3_next.Qwen3NextAttention(qwen3_next.ModelArgs(**common))
    else:
        common |= {"model_type": "qwen3", "tie_word_embeddings": True}
        layer = qwen3.Attention(qwen3.ModelArgs(**common))
    rng = np.random.default_rng(int(gated))

    def drawn(old: mx.array) -> mx.array:
        scale, mean = (0.2, 1.0) if old.ndim == 1 else (2 * old.shape[1] ** -0.5, 0.0)
        values = mean + scale * rng.standard_normal(old.shape)
        return mx.array(values.astype(np.float32)).astype(dtype)

    layer.update(tree_map(drawn, layer.parameters()))
    return layer


def inputs(rows: int, dtype: mx.Dtype, seed: int = 0) -> mx.array:
    values = np.random.default_rng([rows, seed]).standard_normal((1, rows, HIDDEN))
    return mx.array(values.astype(np.float32)).astype(dtype)


def by_mlx_lm(layer: Any, passes: list[mx.array]) -> list[mx.array]:
    cache = KVCache()
    return [layer(x, create_attention_mask(x, cache), cache) for x in passes]


def by_layer(layer: Any, registry: Registry, passes: list[mx.array]) -> list[mx.array]:
    cache, own = KVCache(), AttentionLayer(layer, registry)
    return [own(x, cache) for x in passes]


def host_registry(choices: Choices) -> Registry:
    return Registry("metal", build=MetalHost(HostOptions()).metal_kernel, choices=choices)


def numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


class Watched:
    """The rotation of a layer, and how many rows it was given each time."""

    def __init__(self, rope: Callable[..., mx.array]):
        self.rope = rope
        self.rows: list[int] = []

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        self.rows.append(x.shape[2])
        return self.rope(x, offset=offset)


def refused_by_the_device(**text: Any) -> Callable[..., list[mx.array]]:
    """Builds kernels as a device does that cannot compile them: only a launch says so."""

    def launch(**arguments: Any) -> list[mx.array]:
        raise RuntimeError("[metal::Device] Unable to build metal library from source")

    return launch


@GATED
def test_its_numbers_are_those_of_the_layer(gated: bool) -> None:
    own = AttentionLayer(attention(gated, mx.float32), Registry("reference"))
    assert (own.heads, own.kv_heads, own.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)


@needs_compiler
@GATED
@DTYPES
def test_the_own_form_gives_what_mlx_lm_gives(dtype: mx.Dtype, gated: bool) -> None:
    """A long piece, then passes of several widths, past the cache's first buffer of 256 rows."""
    layer = attention(gated, dtype)
    passes = [inputs(rows, dtype) for rows in (245, 1, 8, 3, 1)]
    registry = own_registry(MetalHost(HostOptions()).metal_kernel)
    limit = 2e-5 if dtype == mx.float32 else 2**-5
    for own, theirs in zip(
        by_layer(layer, registry, passes), by_mlx_lm(layer, passes), strict=True
    ):
        assert own.dtype == theirs.dtype
        np.testing.assert_allclose(numpy(own), numpy(theirs), rtol=limit, atol=limit)
    assert registry.served == {("verify_attention", "metal"): 4, ("attention_merge", "metal"): 4}


@needs_compiler
@GATED
@DTYPES
def test_a_row_of_the_own_form_does_not_depend_on_the_pass(dtype: mx.Dtype, gated: bool) -> None:
    layer = attention(gated, dtype)
    x = inputs(8, dtype)
    registry = own_registry(MetalHost(HostOptions()).metal_kernel)
    before = inputs(21, dtype, seed=1)
    [_, whole] = by_layer(layer, registry, [before, x])
    for rows in range(1, 8):
        parts = [x[:, :rows], *(x[:, i : i + 1] for i in range(rows, 8))]
        [_, *outs] = by_layer(layer, registry, [before, *parts])
        assert_same_bits(numpy(whole), numpy(mx.concatenate(outs, axis=1)), f"{rows} rows first")


@needs_compiler
@GATED
def test_where_decoding_is_exact_a_prompt_may_be_cut_anywhere(gated: bool) -> None:
    layer = attention(gated, mx.float32)
    x = inputs(40, mx.float32)
    registry = host_registry(Choices(exact=True))
    [whole] = by_layer(layer, registry, [x])
    pieces = [x[:, :19], x[:, 19:20], x[:, 20:28], x[:, 28:]]
    assert_same_bits(numpy(whole), numpy(mx.concatenate(by_layer(layer, registry, pieces), axis=1)))
    np.testing.assert_allclose(numpy(whole), numpy(by_mlx_lm(layer, [x])[0]), atol=2e-5)


@needs_compiler
def test_rows_that_were_taken_back_leave_no_trace() -> None:
    """Behind the cache's end lie the keys of rejected rows; here they are NaN."""
    layer = attention(True, mx.float32)
    registry = own_registry(MetalHost(HostOptions()).metal_kernel)
    own, cache = AttentionLayer(layer, registry), KVCache()
    own(inputs(20, mx.float32), cache)
    own(mx.full((1, 5, HIDDEN), mx.nan), cache)
    cache.trim(5)
    after = own(inputs(2, mx.float32), cache)
    [_, expected] = by_layer(layer, registry, [inputs(20, mx.float32), inputs(2, mx.float32)])
    assert_same_bits(numpy(expected), numpy(after))


@needs_compiler
def test_a_pass_in_every_mode() -> None:
    layer = attention(True, mx.bfloat16)
    passes = [inputs(6, mx.bfloat16), inputs(8, mx.bfloat16, seed=1)]
    in_every_mode(lambda registry: by_layer(layer, registry, passes))


@GATED
@pytest.mark.parametrize(
    "choices", [Choices(), Choices(mode="stock"), Choices(winners={"verify_attention x": "split"})]
)
def test_where_stock_is_chosen_no_kernel_runs_and_every_bit_is_mlx_lms(
    gated: bool, choices: Choices
) -> None:
    layer = attention(gated, mx.bfloat16)
    passes = [inputs(rows, mx.bfloat16) for rows in (9, 1, 4)]
    registry = host_registry(choices)
    for own, theirs in zip(
        by_layer(layer, registry, passes), by_mlx_lm(layer, passes), strict=True
    ):
        assert_same_bits(numpy(theirs), numpy(own))
    assert not registry.served


@needs_compiler
def test_the_winner_of_a_race_serves_its_shape_alone() -> None:
    """Of its dtype, too. The race says what it is about, and nobody else writes it down."""
    own = AttentionLayer(attention(True, mx.bfloat16), host_registry(Choices()))
    shape = own.heads, own.kv_heads, own.head_dim, mx.bfloat16
    won = list(attention_contests(own.registry, *shape))[4 - 1]
    registry = host_registry(Choices(winners={won.key: "split"}))
    for dtype in (mx.bfloat16, mx.float32):
        by_layer(attention(True, dtype), registry, [inputs(rows, dtype) for rows in (3, 4, 5)])
    assert registry.served["verify_attention", "metal"] == 1


def test_without_a_device_every_pass_is_counted_as_a_reference_call() -> None:
    layer = attention(False, mx.float32)
    passes = [inputs(rows, mx.float32) for rows in (9, 1)]
    registry = Registry("reference")
    for own, theirs in zip(
        by_layer(layer, registry, passes), by_mlx_lm(layer, passes), strict=True
    ):
        assert_same_bits(numpy(theirs), numpy(own))
    assert registry.served == {("verify_attention", "reference"): 2}


@needs_compiler
@GATED
@pytest.mark.parametrize(
    "choices", [Choices(mode="own"), Choices(mode="stock")], ids=["own", "stock"]
)
def test_norms_in_fp32_widen_neither_the_cache_nor_what_comes_out(
    gated: bool, choices: Choices
) -> None:
    """As a checkpoint may have them; the piece of a prompt is stock's in either case."""
    layer = attention(gated, mx.bfloat16)
    for norm in (layer.q_norm, layer.k_norm):
        norm.weight = mx.random.normal((HEAD_DIM,), key=mx.random.key(1)) / 5 + 1
    passes = [inputs(rows, mx.bfloat16) for rows in (12, 3, 1)]
    registry = host_registry(choices)
    own, cache = AttentionLayer(layer, registry), KVCache()
    for x, theirs in zip(passes, by_mlx_lm(layer, passes), strict=True):
        out = own(x, cache)
        assert out.dtype == mx.bfloat16
        np.testing.assert_allclose(numpy(out), numpy(theirs), rtol=2**-5, atol=2**-5)
    assert cache.keys is not None and cache.values is not None
    assert cache.keys.dtype == cache.values.dtype == mx.bfloat16
    assert registry.counts().reference_calls == 0
    assert registry.served["verify_attention", "metal"] == (2 if choices.mode == "own" else 0)


@needs_compiler
@GATED
@DTYPES
def test_where_decoding_is_exact_no_single_row_is_rotated(gated: bool, dtype: mx.Dtype) -> None:
    """MLX has another kernel for one row. On a CPU it has not, so no bit may differ here."""
    layer = attention(gated, dtype)
    passes = [inputs(rows, dtype) for rows in (20, 1, 8, 1)]
    expected = by_layer(layer, host_registry(Choices(mode="own")), [passes[0][:, :8], *passes[1:]])
    watched = layer.rope = Watched(layer.rope)
    outs = by_layer(layer, host_registry(Choices(exact=True)), [passes[0][:, :8], *passes[1:]])
    assert watched.rows == [8, 8, 2, 2, 8, 8, 2, 2]
    for wanted, got in zip(expected, outs, strict=True):
        assert_same_bits(numpy(wanted), numpy(got))


@GATED
def test_an_exact_layer_never_takes_stock_for_want_of_an_own_form(gated: bool) -> None:
    layer = attention(gated, mx.bfloat16, head_dim=80)
    registry = host_registry(Choices(exact=True))
    with pytest.raises(KernelError, match=r"4/2 heads of 80, bfloat16 .* leave it out"):
        by_layer(layer, registry, [inputs(1, mx.bfloat16)])
    assert not registry.served


@GATED
def test_a_device_that_cannot_compile_the_kernel_is_served_by_stock_and_counted(
    gated: bool,
) -> None:
    layer = attention(gated, mx.bfloat16)
    passes = [inputs(rows, mx.bfloat16) for rows in (5, 1, 1)]
    registry = Registry("metal", refused_by_the_device, Choices(mode="own"))
    for own, theirs in zip(
        by_layer(layer, registry, passes), by_mlx_lm(layer, passes), strict=True
    ):
        assert_same_bits(numpy(theirs), numpy(own))
    assert registry.served == {("verify_attention", "reference"): 3}
    assert set(registry.refused) == {"verify_attention"}


@pytest.mark.parametrize("how", ["exact", "required"])
def test_nothing_stands_in_for_a_kernel_where_decoding_is_exact_or_kernels_required(
    how: str,
) -> None:
    choices = Choices(mode="own", exact=how == "exact")
    registry = Registry("metal", refused_by_the_device, choices, required=how == "required")
    with pytest.raises(DoesNotRun, match="verify_attention does not run"):
        by_layer(attention(True, mx.bfloat16), registry, [inputs(1, mx.bfloat16)])
    assert not registry.served
