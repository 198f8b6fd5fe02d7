"""The best k of a row, in every form, against one full stable sort in NumPy: values and columns."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lse_mlx.errors import KernelError
from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.topk import CHUNKS, MERGE, NO_ID, stage_chunks, topk
from lse_mlx.selftest.definitions import best
from tests.kernels.modes import (
    assert_same_bits,
    every_mode,
    in_every_mode,
    needs_compiler,
    plain,
)
from tests.kernels.sorted_rows import Rows, edges, more_edges, planted, waves
from tests.metal_host.host import MetalHost

Form = Callable[[Rows | mx.array, int], tuple[np.ndarray, np.ndarray]]


def by_reference(logits: Rows | mx.array, k: int) -> tuple[np.ndarray, np.ndarray]:
    values, ids = topk(Registry("reference"), mx.array(logits), k)
    return np.array(values), np.array(ids)


def by_kernels(logits: Rows | mx.array, k: int) -> tuple[np.ndarray, np.ndarray]:
    values, ids = topk(plain(), mx.array(logits), k)
    return np.array(values), np.array(ids)


def by_kernels_in_every_mode(logits: Rows | mx.array, k: int) -> tuple[np.ndarray, np.ndarray]:
    values, ids = in_every_mode(lambda registry: list(topk(registry, mx.array(logits), k)))
    return values, ids


REFERENCE = pytest.param(by_reference, id="reference")
KERNELS = pytest.param(by_kernels, id="kernels", marks=needs_compiler)
MODES = pytest.param(by_kernels_in_every_mode, id="every mode", marks=needs_compiler)
SLOW_MODES = pytest.param(
    by_kernels_in_every_mode, id="every mode", marks=[needs_compiler, pytest.mark.slow]
)


def assert_best(form: Form, logits: Rows, k: int) -> None:
    values, ids = form(logits, k)
    expected, columns = best(logits, k)
    assert (values.dtype, ids.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(ids, columns)
    assert_same_bits(expected, values, "values")


@pytest.mark.parametrize("form", [REFERENCE, KERNELS, SLOW_MODES])
def test_rows_as_wide_as_a_real_vocabulary(form: Form) -> None:
    assert_best(form, waves(), 16)


@pytest.mark.parametrize("form", [REFERENCE, MODES])
@pytest.mark.parametrize("k", [1, 3, 16, 32])
def test_edge_rows(form: Form, k: int) -> None:
    assert_best(form, edges(), k)


@pytest.mark.parametrize("form", [REFERENCE, KERNELS, SLOW_MODES])
@pytest.mark.parametrize("k", [1, 3, 16])
def test_more_edge_rows(form: Form, k: int) -> None:
    for logits in more_edges():
        assert_best(form, logits, k)


@given(st.integers(1, 2000), st.integers(1, 40), st.integers(0, 10_000))
def test_planted_rows_by_the_reference(width: int, k: int, seed: int) -> None:
    assert_best(by_reference, planted(3, width, seed), min(k, width))


# Of 17 and 24 whole lists leave places of the 512 unused, 32 has a full list a SIMD-group.
@pytest.mark.parametrize("form", [KERNELS, SLOW_MODES])
@hypothesis_settings(max_examples=60)
@given(
    width=st.integers(1, 6000),
    k=st.sampled_from([1, 2, 16, 17, 24, 32]),
    seed=st.integers(0, 10_000),
)
def test_planted_rows_by_the_kernels(form: Form, width: int, k: int, seed: int) -> None:
    if k <= width:
        assert_best(form, planted(3, width, seed), k)


@pytest.mark.parametrize("form", [KERNELS, SLOW_MODES])
@pytest.mark.parametrize("k", [15, 16, 17, 32])
@pytest.mark.parametrize("start", [0, 1, 240, 256, 480])
def test_the_best_side_by_side(form: Form, start: int, k: int) -> None:
    """One in each of the groups whose worst is the bound, which then is the last of the best."""
    logits = np.full((1, 512), -9, np.float32)
    logits[0, start : start + k] = np.arange(k)
    assert_best(form, logits, k)


@pytest.mark.parametrize("form", [KERNELS, SLOW_MODES])
@pytest.mark.parametrize("k", [16, 17, 32])
def test_the_best_in_one_chunk(form: Form, k: int) -> None:
    """A whole list of one merge is the answer, the first, the last or one between."""
    lists = 512 // k
    for chunk in (0, lists // 2, lists - 1, lists):
        logits = np.full((1, lists * 512 + 512), -9, np.float32)
        logits[0, chunk * 512 + 100 :][:k] = np.arange(k)
        assert_best(form, logits, k)


@needs_compiler
@pytest.mark.parametrize(("width", "k"), [(7, 7), (300, 32), (512, 16), (513, 16), (1100, 17)])
def test_planted_rows_by_the_kernels_in_every_mode(width: int, k: int) -> None:
    for seed in range(3):
        assert_best(by_kernels_in_every_mode, planted(3, width, seed), k)


@needs_compiler
@pytest.mark.parametrize("filled", [False, True])
def test_three_stages_in_every_mode(filled: bool) -> None:
    """The last chunk has five columns, less than k, and so has the second of the merges."""
    width = 32 * 512 + 5
    assert stage_chunks(width, 16) == (33, 2, 1)
    logits = np.full((1, width), -np.inf, np.float32) if filled else planted(1, width, 0)
    assert_best(by_kernels_in_every_mode, logits, 16)
    logits[0, [-1, -5]] = 9
    assert_best(by_kernels_in_every_mode, logits, 16)


@needs_compiler
@pytest.mark.parametrize("width", [6, 9])
def test_places_without_a_candidate_hold_minus_infinity_and_no_column(width: int) -> None:
    """They come after columns that hold -inf, also once merged; a whole row has none of them."""

    def lists(registry: Registry) -> list[mx.array]:
        logits = mx.array([[-mx.inf, 3.0] + [-mx.inf] * (width - 2)])
        sizes = [((1, 16), mx.float32), ((1, 16), mx.int32)]
        shape = {"grid": (256, 1, 1), "threadgroup": (256, 1, 1)}
        template = {"T": mx.float32, "K": 16}
        chunk = registry.launch(CHUNKS, inputs=[logits], outputs=sizes, template=template, **shape)
        merged = registry.launch(MERGE, inputs=chunk, outputs=sizes, template={"K": 16}, **shape)
        return [*chunk, *merged]

    values, ids, merged_values, merged_ids = in_every_mode(lists)
    assert values.tolist() == [[3.0] + [-np.inf] * 15]
    assert ids.tolist() == [[1, 0, *range(2, width)] + [NO_ID] * (16 - width)]
    np.testing.assert_array_equal(merged_values, values)
    np.testing.assert_array_equal(merged_ids, ids)


@pytest.mark.slow
@pytest.mark.parametrize("form", [REFERENCE, KERNELS, MODES])
def test_the_widest_row(form: Form) -> None:
    """16,777,215 columns: the last of them is a column still, the next would mean none."""
    logits = (np.arange(NO_ID) % 1009 - 1009).astype(np.float32)[None]
    logits[0, [NO_ID - 1, 8_388_609, 5]] = [2, 1, 1]
    assert_best(form, logits, 16)


@pytest.mark.parametrize("form", [REFERENCE, MODES])
def test_bfloat16_is_widened(form: Form) -> None:
    logits = mx.array(planted(3, 1500, 1)).astype(mx.bfloat16)
    expected, columns = best(np.array(logits.astype(mx.float32)), 16)
    values, ids = form(logits, 16)
    np.testing.assert_array_equal(ids, columns)
    assert_same_bits(expected, values, "values")


@pytest.mark.parametrize("form", [KERNELS, SLOW_MODES])
def test_a_nan_keeps_its_bits_and_a_negative_one_comes_no_later(form: Form) -> None:
    bits = np.zeros((1, 600), np.uint32)
    bits[0, [40, 590]] = [0xFFC01234, 0x7F800001]
    values, ids = form(bits.view(np.float32), 3)
    assert ids.tolist() == [[40, 590, 0]]
    assert values.view(np.uint32).tolist() == [[0xFFC01234, 0x7F800001, 0]]


def test_stages() -> None:
    assert stage_chunks(248_320, 16) == (485, 16, 1)
    assert stage_chunks(512, 16) == (1,)
    assert stage_chunks(513, 16) == (2, 1)
    assert stage_chunks(NO_ID, 1) == (32_768, 64, 1)
    assert stage_chunks(248_320, 32) == (485, 31, 2, 1)
    assert stage_chunks(248_320, 24) == (485, 24, 2, 1), "21 whole lists a merge"


@pytest.mark.parametrize("k", [0, 11, -1])
def test_more_than_there_is_cannot_be_asked_for(k: int) -> None:
    with pytest.raises(ValueError, match=rf"The {k} best of 10 columns .* ask for 1 to 10\."):
        topk(Registry("reference"), mx.zeros((2, 10)), k)


@needs_compiler
def test_what_serves_which_call() -> None:
    def served(registry: Registry, logits: mx.array, k: int) -> dict[tuple[str, str], int]:
        registry.served.clear()
        mx.eval(topk(registry, logits, k))
        return dict(registry.served)

    own = every_mode()
    row = mx.zeros((1, 1000))
    assert served(own, row, 16) == {("topk_chunk", "metal"): 1, ("topk_merge", "metal"): 1}
    assert served(own, row, 33) == {("topk", "reference"): 1}, "a list has at most 32 places"
    assert served(own, row.astype(mx.float16), 16) == {("topk", "reference"): 1}
    stock = Registry("metal", MetalHost().metal_kernel, Choices(mode="stock"))
    assert served(stock, row, 16) == {}, "stock MLX is no fallback"
    winners = {"topk 1x1000 float32, 16": "chunks"}
    raced = Registry("metal", MetalHost().metal_kernel, Choices(winners=winners))
    assert served(raced, row, 16) == {("topk_chunk", "metal"): 1, ("topk_merge", "metal"): 1}
    own.required = True
    with pytest.raises(KernelError, match="topk"):
        topk(own, row, 33)
