"""Attention over the ring and the block: the check's shapes and data, against float64."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.sliding_attention import (
    sliding_attention,
    sliding_attention_reference,
)
from tests.kernels.attention_in_float64 import Window, random_window
from tests.kernels.modes import (
    Harness,
    assert_same_bits,
    each_harness,
    in_every_mode,
    needs_compiler,
    own_registry,
)
from tests.metal_host.host import HostOptions, MetalHost

WINDOW, SLOTS = 2048, 2055
LIMIT = 2e-5  # the most that an element may be off


def by_kernel(window: Window) -> Callable[[Registry], list[mx.array]]:
    queries, ring, block = window.arrays()

    def run(registry: Registry) -> list[mx.array]:
        out = sliding_attention(registry, queries, ring, block, window.view())
        assert registry.counts().reference_calls == 0
        return [out]

    return run


def by_reference(window: Window) -> np.ndarray:
    queries, ring, block = window.arrays()
    return np.array(sliding_attention_reference(queries, ring, block, window.view()))


def attended(harness: Harness, window: Window) -> np.ndarray:
    [out] = by_kernel(window)(harness())
    return np.array(out)


def check_data(live: int, heads: int, kv_heads: int, rewind: int = 0, position: int = 0) -> Window:
    """The reference engine's data: sines of an element's number, for every slot and the block.

    position: of the block, `live + rewind` rows having been held before `rewind` of them went away;
    0 for that very number, so that the ring has not turned
    """
    rows, head_dim = 8, 128
    position = position or live
    i = np.arange(kv_heads * (SLOTS + rows) * head_dim).reshape(kv_heads, SLOTS + rows, head_dim)
    keys, values = np.cos(0.019 * i) * 0.2, np.sin(0.017 * i)
    queries = np.sin(0.013 * np.arange(rows * heads * head_dim)) * 0.35
    held = live - rewind
    slots = np.arange(position - rewind - held, position - rewind) % SLOTS
    of_age = np.concatenate([slots, SLOTS + np.arange(rows)])
    return Window(
        queries.reshape(rows, heads, head_dim).astype(np.float32).astype(np.float64),
        keys[:, of_age].astype(np.float32).astype(np.float64),
        values[:, of_age].astype(np.float32).astype(np.float64),
        position - rewind,
        WINDOW,
        SLOTS,
    )


def assert_close(out: np.ndarray, window: Window, limit: float = LIMIT) -> None:
    np.testing.assert_allclose(out, window.expected(), rtol=0, atol=limit)


@needs_compiler
@pytest.mark.parametrize(("live", "rewind"), [(17, 0), (17, 3), (SLOTS, 3)])
def test_the_check_of_the_reference_engine(live: int, rewind: int) -> None:
    """4 query heads, 2 key/value heads of 128; the full ring has turned: rows lie across its end."""
    window = check_data(live, 4, 2, rewind, position=live if live < SLOTS else 3 * SLOTS + 6)
    [out] = in_every_mode(by_kernel(window))
    assert_close(out, window, 5e-7)
    assert_close(by_reference(window), window)


@each_harness
def test_the_check_of_the_reference_engine_without_a_rewind(harness: Harness) -> None:
    window = check_data(SLOTS, 4, 2)
    assert_close(attended(harness, window), window, 5e-7)


@each_harness
@pytest.mark.parametrize(("live", "rewind"), [(17, 0), (17, 3), (1024, 3), (SLOTS, 0), (SLOTS, 3)])
def test_the_split_over_keys_at_the_drafters_own_shape(
    harness: Harness, live: int, rewind: int
) -> None:
    window = check_data(live, 32, 8, rewind, position=live if live < SLOTS else 2 * SLOTS + 1)
    assert_close(attended(harness, window), window, 5e-7)


@each_harness
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 192, 256])
def test_head_sizes(harness: Harness, head_dim: int) -> None:
    """Also those whose rows do not fill the memory that keys are laid into."""
    window = random_window(
        0, head_dim=head_dim, live=37, position=50, window=40, slots=47, heads=3, kv_heads=1
    )
    assert_close(attended(harness, window), window, 5e-6)
    assert_close(by_reference(window), window)


@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 96, 192])
def test_each_way_that_rows_are_cut_up_in_every_mode(head_dim: int) -> None:
    """Into pairs or in fours a lane, and in one or several loads of threadgroup memory."""
    window = random_window(
        0, rows=3, head_dim=head_dim, live=37, position=50, window=40, slots=47, kv_heads=2
    )
    [out] = in_every_mode(by_kernel(window))
    assert_close(out, window, 5e-6)


@each_harness
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (5, 1), (6, 3), (16, 2)])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_groups_and_row_counts(harness: Harness, heads: int, kv_heads: int, rows: int) -> None:
    window = random_window(
        1,
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64,
        live=33,
        position=33,
        window=30,
        slots=40,
    )
    assert_close(attended(harness, window), window, 5e-6)


@each_harness
@pytest.mark.parametrize("live", [0, 1, 23, 24, 25, 31, 32, 247, 248, 249, 255, 256, 257, 512])
def test_live_counts_around_the_edges_of_tiles_and_partitions(harness: Harness, live: int) -> None:
    window = random_window(
        2, head_dim=32, live=live, position=600 + live, window=10_000, slots=max(live, 1)
    )
    assert_close(attended(harness, window), window, 5e-6)


@each_harness
@pytest.mark.parametrize("window", [1, 2, 3, 8, 9, 60, 200])
def test_the_window_hides_old_rows_from_each_query_by_position(
    harness: Harness, window: int
) -> None:
    """Also where a whole partition is out of sight, and where the ring has turned."""
    held = random_window(
        3, head_dim=32, live=300, position=1234, window=window, slots=301, heads=2, kv_heads=1
    )
    assert_close(attended(harness, held), held, 5e-6)
    assert_close(by_reference(held), held)


@needs_compiler
@pytest.mark.parametrize("window", [3, 41])
def test_windows_in_every_mode(window: int) -> None:
    held = random_window(
        3, head_dim=32, live=260, position=1234, window=window, slots=261, heads=2, kv_heads=1
    )
    [out] = in_every_mode(by_kernel(held))
    assert_close(out, held, 5e-6)


@each_harness
@pytest.mark.parametrize("position", [300, 301, 333, 5000])
def test_where_the_rows_lie_in_the_ring_does_not_change_a_bit(
    harness: Harness, position: int
) -> None:
    rows = random_window(4, head_dim=32, live=300, position=300, window=200, slots=303)
    turned = Window(rows.queries, rows.keys, rows.values, position, 200, 303)
    assert_same_bits(attended(harness, rows), attended(harness, turned))


@each_harness
def test_rows_do_not_depend_on_how_many_are_in_the_block(harness: Harness) -> None:
    """As far as they see the same: here the committed rows and the first row of the block."""
    whole = random_window(5, head_dim=64, live=70, position=70, window=500, slots=80)
    alone = Window(
        whole.queries[:1],
        np.concatenate([whole.keys[:, :70], whole.keys[:, 70:71]], axis=1),
        np.concatenate([whole.values[:, :70], whole.values[:, 70:71]], axis=1),
        70,
        500,
        80,
    )
    twice = Window(
        np.repeat(alone.queries, 2, axis=0),
        np.concatenate([whole.keys[:, :71], whole.keys[:, 70:71]], axis=1),
        np.concatenate([whole.values[:, :71], whole.values[:, 70:71]], axis=1),
        70,
        500,
        80,
    )
    out = attended(harness, twice)
    np.testing.assert_array_equal(out[0], out[1])
    assert_close(attended(harness, alone), alone, 5e-6)


MICRO = Window(
    queries=np.zeros((3, 2, 2)),
    keys=np.zeros((1, 5, 2)),
    values=np.array([[[2.0, 4], [6, 8], [10, 12], [14, 16], [18, 20]]]),
    position=3,
    window=3,
    slots=3,
)
"""Two live rows at slots 1 and 2, NaN in slot 0; a query mixes what it sees in equal parts."""
MICRO_EXPECTED = [[10, 12, 10, 12], [12, 14, 12, 14], [14, 16, 14, 16]]


def test_the_mask_by_hand() -> None:
    assert np.isnan(np.array(MICRO.arrays()[1])[1, 0, 0]).all()
    np.testing.assert_allclose(by_reference(MICRO), MICRO_EXPECTED, rtol=1e-6)


@needs_compiler
def test_the_mask_by_hand_in_the_kernel() -> None:
    """Head size 2 filled up with zeros, which change neither a dot product nor the two columns."""
    wide = [np.pad(x, [(0, 0), (0, 0), (0, 30)]) for x in (MICRO.queries, MICRO.keys, MICRO.values)]
    [out] = in_every_mode(by_kernel(Window(*wide, position=3, window=3, slots=3)))
    out = out.reshape(3, 2, 32)
    np.testing.assert_allclose(out[:, :, :2].reshape(3, 4), MICRO_EXPECTED, rtol=1e-6)
    assert not out[:, :, 2:].any()


@needs_compiler
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_only_an_earlier_query_sees_does_no_harm_to_a_later_one(bad: float) -> None:
    """The oldest row that query 2 sees is not finite: queries 3 and on do not notice."""
    window = random_window(6, head_dim=32, live=40, position=40, window=30, slots=40)
    first_seen = 40 + 2 - 30 + 1
    spoiled = Window(window.queries, window.keys.copy(), window.values.copy(), 40, 30, 40)
    spoiled.values[:, first_seen] = bad
    spoiled.keys[:, : first_seen + 1] = np.nan
    [out] = in_every_mode(by_kernel(spoiled))
    [clean] = in_every_mode(by_kernel(window))
    assert_same_bits(out[3:], clean[3:])
    assert np.isnan(out[:3]).all(), "a NaN that is seen is not lost"


@each_harness
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite_come_out_as_nan(harness: Harness, value: float) -> None:
    window = random_window(7, head_dim=32, live=5, position=5, window=30, slots=8)
    window.queries[4, 1] = value
    out = attended(harness, window).reshape(8, 4, 32)
    assert np.isnan(out[4, 1]).all()
    out[4, 1] = 0
    assert np.isfinite(out).all()


@pytest.mark.parametrize("head_dim", [2, 5, 40])
def test_other_head_sizes_are_served_by_the_reference_and_counted(head_dim: int) -> None:
    window = random_window(8, head_dim=head_dim, live=9, position=9, window=30, slots=9)
    registry = own_registry(MetalHost(HostOptions()).metal_kernel)
    queries, ring, block = window.arrays()
    out = sliding_attention(registry, queries, ring, block, window.view())
    assert_close(np.array(out), window, 5e-6)
    assert registry.served == {("sliding_attention", "reference"): 1}


def test_a_device_that_cannot_compile_the_kernel_is_served_by_the_reference_and_counted() -> None:
    def build(**text: Any) -> Callable[..., list[mx.array]]:
        def launch(**arguments: Any) -> list[mx.array]:
            raise RuntimeError("[metal::Device] Unable to build metal library from source")

        return launch

    window = random_window(8, head_dim=64, live=9, position=9, window=30, slots=9)
    registry = Registry("metal", build)
    for _ in range(2):
        out = sliding_attention(registry, *window.arrays(), window.view())
        assert_close(np.array(out), window, 5e-6)
    assert registry.served == {("sliding_attention", "reference"): 2}


def test_both_launches_are_given_one_scale() -> None:
    """Rounded twice on its own, 1 / sqrt(D) can be another number."""
    scales: list[float] = []

    def build(**text: Any) -> Callable[..., list[mx.array]]:
        at = text["input_names"].index("scale")

        def launch(**how: Any) -> list[mx.array]:
            scales.append(how["inputs"][at].item())
            return [mx.zeros(shape) for shape in how["output_shapes"]]

        return launch

    for head_dim in range(32, 257, 32):
        window = random_window(8, head_dim=head_dim, live=9, position=9, window=30, slots=9)
        sliding_attention(own_registry(build), *window.arrays(), window.view())
    assert scales == [float(np.float32(d**-0.5)) for d in range(32, 257, 32) for _ in range(2)]


def test_the_split_of_the_reference_engine_on_a_cpu() -> None:
    for live, rewind in [(7, 0), (7, 3), (515, 0), (515, 3)]:
        held = live - rewind
        window = random_window(
            9, head_dim=5, live=held, position=515 + held, window=508, slots=515, rows=8
        )
        assert_close(by_reference(window), window, 2e-6)


@each_harness
def test_lengths_and_positions_compile_nothing_anew(harness: Harness) -> None:
    registry = harness()
    for live, position in [(1, 1), (7, 7), (8, 8), (300, 1000), (300, 100_000)]:
        window = random_window(10, head_dim=32, live=live, position=position, window=200, slots=300)
        by_kernel(window)(registry)
    assert registry.counts().jit_compiles == 2
