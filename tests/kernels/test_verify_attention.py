"""Attention of a pass at the end of a cache: against float64, and row by row to the bit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.errors import KernelError
from lse_mlx.kernels.choices import Choices, any_rows
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.verify_attention import (
    launch_rows,
    partition_count,
    shape_name,
    stock_attention,
    verify_attention,
)
from tests.kernels.attention_in_float64 import as_float64, causal
from tests.kernels.modes import (
    Harness,
    assert_same_bits,
    each_harness,
    in_every_mode,
    needs_compiler,
)
from tests.metal_host.host import HostOptions, MetalHost

ROUNDING = {mx.float32: 3e-6, mx.bfloat16: 2**-8, mx.float16: 2**-11}
"""How far an element of a few units may be off: of bf16 and fp16, what the last rounding costs."""


@dataclass(frozen=True)
class Cache:
    """A cache of which `length` rows are in use and the others NaN, and queries of its last rows.

    queries: T [1, heads, n, D], one for each of the last n rows
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    length: int

    def run(self, registry: Registry, rows: int, length: int | None = None) -> mx.array:
        """A pass of `rows` rows that ends at `length`."""
        length = length or self.length
        end = self.queries.shape[2] - (self.length - length)
        out = verify_attention(
            registry,
            self.queries[:, :, end - rows : end],
            self.keys,
            self.values,
            length,
            self.queries.shape[-1] ** -0.5,
        )
        assert registry.counts().reference_calls == 0
        return out

    def out(self, harness: Harness, rows: int, length: int | None = None) -> np.ndarray:
        return numpy(self.run(harness(), rows, length))

    def expected(self, rows: int) -> np.ndarray:
        """[heads, rows, D] in float64, of the stored numbers."""
        queries, keys, values = (as_float64(a)[0] for a in (self.queries, self.keys, self.values))
        return causal(queries[:, -rows:], keys, values, self.length)

    def assert_close(self, out: np.ndarray, rows: int) -> None:
        assert out.shape == (1, self.queries.shape[1], rows, self.queries.shape[-1])
        limit = ROUNDING[self.queries.dtype]
        np.testing.assert_allclose(out[0], self.expected(rows), rtol=limit, atol=limit)


def cache(
    length: int,
    *,
    heads: int = 6,
    kv_heads: int = 1,
    head_dim: int = 256,
    dtype: mx.Dtype = mx.bfloat16,
    capacity: int | None = None,
    rows: int = 8,
) -> Cache:
    rng = np.random.default_rng([length, heads, head_dim])
    capacity = capacity or -(-length // 256) * 256

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def held() -> mx.array:
        whole = np.full((1, kv_heads, capacity, head_dim), np.nan, np.float32)
        whole[:, :, :length] = draw(1, kv_heads, length, head_dim)
        return mx.array(whole).astype(dtype)

    # Twice the usual size, so that some keys matter far more than others.
    queries = mx.array(2 * draw(1, heads, min(rows, length), head_dim)).astype(dtype)
    return Cache(queries, held(), held(), length)


def host_registry(choices: Choices) -> Registry:
    return Registry("metal", build=MetalHost(HostOptions()).metal_kernel, choices=choices)


def numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(mx.bfloat16, 1), (mx.bfloat16, 5), (mx.bfloat16, 8), (mx.float16, 8), (mx.float32, 8)],
    ids=str,
)
def test_rows_at_the_end_of_a_cache(dtype: mx.Dtype, rows: int) -> None:
    """Six query heads of 256 to one; the length is one past a tile, the rest of the cache NaN."""
    held = cache(33, dtype=dtype)
    [out] = in_every_mode(lambda registry: [held.run(registry, rows)])
    held.assert_close(out, rows)


@each_harness
@pytest.mark.parametrize("length", [*range(1, 21), 127, 128, 129, 255, 256, 257])
def test_lengths(harness: Harness, length: int) -> None:
    held = cache(length, heads=24, kv_heads=4)
    rows = min(length, 8)
    held.assert_close(held.out(harness, rows), rows)


@each_harness
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 2, 64), (2, 1, 32), (1, 1, 256), (8, 1, 256), (12, 2, 128), (3, 1, 96), (48, 1, 64)],
)
def test_groups_and_head_sizes(harness: Harness, heads: int, kv_heads: int, head_dim: int) -> None:
    """Also more query heads of one key/value head than a threadgroup holds for eight rows."""
    held = cache(70, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    held.assert_close(held.out(harness, 8), 8)


@each_harness
@pytest.mark.parametrize("length", [1030, 2047, 2048, 2049, 2570])
def test_several_partitions_of_both_sizes(harness: Harness, length: int) -> None:
    held = cache(length, heads=2, kv_heads=1, head_dim=32, dtype=mx.float32)
    held.assert_close(held.out(harness, 8), 8)
    counts = {1030: 9, 2047: 16, 2048: 16, 2049: 17, 2570: 18}
    assert partition_count(length) == counts[length]


@each_harness
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim"),
    [(mx.bfloat16, 6, 1, 256), (mx.float32, 4, 2, 64)],
    ids=str,
)
def test_a_row_has_the_same_bits_in_passes_of_any_width(
    harness: Harness, dtype: mx.Dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """The rows lie across a partition's edge, so narrower passes also have fewer partitions."""
    held = cache(132, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    whole = held.out(harness, 8)
    for rows in range(1, 8):
        for last in range(rows, 9):
            part = held.out(harness, rows, held.length - 8 + last)
            assert_same_bits(whole[:, :, last - rows : last], part, f"{rows} rows to {last}")


@each_harness
def test_a_row_has_the_same_bits_across_the_edge_of_the_larger_partitions(harness: Harness) -> None:
    held = cache(2052, heads=4, kv_heads=2, head_dim=64)
    whole = held.out(harness, 8)
    singly = [held.out(harness, 1, held.length - 7 + i) for i in range(8)]
    assert_same_bits(whole, np.concatenate(singly, axis=2))


@each_harness
@pytest.mark.parametrize("capacity", [40, 41, 256, 1024])
def test_capacity_changes_no_bit(harness: Harness, capacity: int) -> None:
    tight, wide = (cache(40, capacity=c, head_dim=64) for c in (40, capacity))
    assert_same_bits(tight.out(harness, 8), wide.out(harness, 8))


@needs_compiler
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_later_row_that_is_not_finite_does_no_harm(bad: float) -> None:
    held = cache(40, head_dim=64, dtype=mx.float32)
    keys, values = np.array(held.keys), np.array(held.values)
    keys[:, :, 36], values[:, :, 36] = np.nan, bad
    spoiled = Cache(held.queries, mx.array(keys), mx.array(values), 40)
    [out] = in_every_mode(lambda registry: [spoiled.run(registry, 8)])
    [clean] = in_every_mode(lambda registry: [held.run(registry, 8)])
    assert_same_bits(clean[:, :, :4], out[:, :, :4])
    assert np.isnan(out[:, :, 4:]).all(), "a NaN that is seen is not lost"


@each_harness
def test_a_score_that_is_not_finite_comes_out_as_nan_for_its_row_alone(harness: Harness) -> None:
    held = cache(40, head_dim=64, dtype=mx.float32)
    queries = np.array(held.queries)
    queries[0, 3, 5, 0] = np.inf
    out = Cache(mx.array(queries), held.keys, held.values, 40).out(harness, 8)
    assert np.isnan(out[0, 3, 5]).all()
    out[0, 3, 5] = 0
    assert np.isfinite(out).all()


@each_harness
@pytest.mark.parametrize("rows", [9, 16, 63, 65, 130])
def test_a_piece_of_a_prompt_goes_in_tiles_where_decoding_is_exact(
    harness: Harness, rows: int
) -> None:
    held = cache(150, heads=4, kv_heads=2, head_dim=32, rows=150)
    registry = harness()
    registry.choices = Choices(exact=True)
    out = numpy(held.run(registry, rows))
    held.assert_close(out, rows)
    last = [numpy(held.run(registry, 1, 151 - n)) for n in (1, 2, 8, 9)]
    for n, single in zip((1, 2, 8, 9), last, strict=True):
        assert_same_bits(out[:, :, -n : out.shape[2] - n + 1], single, f"row {-n}")


@needs_compiler
def test_the_target_of_the_pair_in_every_mode() -> None:
    """24 query heads, 4 key/value heads of 256, more than one partition."""
    held = cache(131, heads=24, kv_heads=4)
    [out] = in_every_mode(lambda registry: [held.run(registry, 8)])
    held.assert_close(out, 8)


@each_harness
@pytest.mark.slow
def test_the_target_of_the_pair_behind_thousands_of_keys(harness: Harness) -> None:
    held = cache(2600, heads=24, kv_heads=4)
    whole = held.out(harness, 8)
    held.assert_close(whole, 8)
    for last in (1, 4, 8):
        assert_same_bits(whole[:, :, last - 1 : last], held.out(harness, 1, held.length - 8 + last))


@each_harness
def test_widths_compile_once_and_lengths_never(harness: Harness) -> None:
    registry = harness()
    short, longer = (cache(n, heads=2, kv_heads=1, head_dim=32, rows=16) for n in (40, 700))
    for rows in (1, 4, 5, 8):  # one vector of a SIMD-group up to four rows, then two
        for held in (short, longer):
            held.run(registry, rows)
        short.run(registry, rows, 35)
    assert registry.counts().jit_compiles == 2 + 1


def test_stock_is_what_mlx_has_and_is_no_reference_call() -> None:
    held = cache(30, head_dim=64, dtype=mx.float32)
    for choices in (Choices(mode="stock"), Choices(mode="auto")):
        registry = host_registry(choices)
        held.assert_close(numpy(held.run(registry, 8)), 8)
        held.assert_close(numpy(held.run(registry, 1)), 1)
        assert not registry.served


def test_a_long_piece_is_stocks_unless_decoding_is_exact() -> None:
    held = cache(30, head_dim=64, dtype=mx.float32, rows=12)
    registry = host_registry(Choices(mode="own"))
    held.assert_close(numpy(held.run(registry, 12)), 12)
    assert not registry.served


@pytest.mark.parametrize("head_dim", [40, 288])
def test_other_head_sizes_are_served_by_the_reference_and_counted(head_dim: int) -> None:
    held = cache(30, head_dim=head_dim, dtype=mx.float32)
    registry = host_registry(Choices(mode="own"))
    out = verify_attention(registry, held.queries, held.keys, held.values, 30, head_dim**-0.5)
    held.assert_close(numpy(out), 8)
    assert registry.served == {("verify_attention", "reference"): 1}


@pytest.mark.parametrize("spoiled", ["queries", "keys", "values"])
def test_arrays_of_unlike_dtypes_are_served_by_the_reference_and_counted(spoiled: str) -> None:
    """A kernel has one type for all; stock MLX widens."""
    held = cache(30, head_dim=64, dtype=mx.bfloat16)
    arrays = {"queries": held.queries, "keys": held.keys, "values": held.values}
    arrays[spoiled] = arrays[spoiled].astype(mx.float32)
    registry = host_registry(Choices(mode="own"))
    out = verify_attention(registry, **arrays, length=30, scale=64**-0.5)
    assert registry.served == {("verify_attention", "reference"): 1}
    np.testing.assert_allclose(numpy(out)[0], held.expected(8), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(("head_dim", "heads"), [(80, 6), (288, 6), (256, 49)])
@pytest.mark.parametrize("rows", [1, 8, 20])
def test_exact_decoding_is_refused_where_a_device_has_no_form_for_it(
    head_dim: int, heads: int, rows: int
) -> None:
    held = cache(30, head_dim=head_dim, heads=heads, rows=20)
    registry = host_registry(Choices(exact=True))
    with pytest.raises(KernelError) as refused:
        held.run(registry, rows)
    message = str(refused.value)
    assert f"{rows} rows, {heads}/1 heads of {head_dim}, bfloat16" in message
    assert message.count(".") == 1
    assert message.endswith("use another checkpoint.")
    assert not registry.served


def test_exact_decoding_on_a_cpu_is_the_references() -> None:
    held = cache(30, head_dim=80, dtype=mx.float32)
    registry = Registry("reference", choices=Choices(exact=True))
    out = verify_attention(registry, held.queries, held.keys, held.values, 30, 80**-0.5)
    held.assert_close(numpy(out), 8)


def written_by_launches(length: int, rows: int) -> list[int]:
    """How many bytes of partitions each launch of an exact pass would write, nothing computed."""
    written: list[int] = []

    def build(**text: Any) -> Callable[..., list[mx.array]]:
        def launch(**how: Any) -> list[mx.array]:
            if text["name"] == "verify_attention":
                written.append(4 * int(np.prod(how["output_shapes"][0])))
            return [mx.broadcast_to(mx.array(0.0), shape) for shape in how["output_shapes"]]

        return launch

    registry = Registry("metal", build, Choices(exact=True), timed=False)
    queries = mx.broadcast_to(mx.array(0.0), (1, 24, rows, 256))
    held = mx.broadcast_to(mx.array(0.0), (1, 4, length, 256))
    assert verify_attention(registry, queries, held, held, length, 1.0).shape == queries.shape
    return written


def test_a_piece_of_a_prompt_writes_no_more_partitions_at_once_the_longer_the_cache() -> None:
    """The target of the pair: at 262,144 keys, 64 rows at once would be 824 MB."""
    of_row = 4 * 24 * 256  # bytes of one partition
    assert written_by_launches(1_000, 130) == [of_row * 8 * 64] * 2 + [of_row * 8 * 2]
    long = written_by_launches(262_144, 64)
    assert len(long) == 8
    assert max(long) <= of_row * partition_count(262_144) * 8 < 105e6
    for length in (2_048, 4_096, 16_384, 65_536, 120_000):
        written = written_by_launches(length, 64)
        assert max(written) <= 64 * 2**20
        assert sum(written) <= of_row * partition_count(length) * 64
    assert [launch_rows(n, 24, 256) for n in (2_048, 10_000, 65_536, 10**6)] == [64, 64, 16, 8]


def test_a_shape_is_named_by_its_heads_and_its_dtype() -> None:
    names = {
        shape_name(3, heads, kv_heads, head_dim, dtype)
        for heads, kv_heads, head_dim in ((24, 4, 256), (24, 2, 256), (16, 4, 256), (24, 4, 128))
        for dtype in ROUNDING
    }
    assert len(names) == 4 * 3
    assert shape_name(3, 24, 4, 256, mx.bfloat16) == "3 rows, 24/4 heads of 256, bfloat16"
    of_any = {any_rows("verify_attention", shape_name(n, 24, 4, 256, mx.float16)) for n in (1, 64)}
    assert len(of_any) == 1


def test_the_scale_is_the_callers() -> None:
    held = cache(20, head_dim=64, dtype=mx.float32)
    arrays = (as_float64(a)[0] for a in (held.queries, held.keys, held.values))
    expected = causal(*arrays, 20, scale=0.5)
    out = stock_attention(held.queries, held.keys, held.values, 20, 0.5)
    np.testing.assert_allclose(numpy(out)[0], expected, atol=2e-5)


@each_harness
def test_the_scale_is_the_callers_in_the_kernel(harness: Harness) -> None:
    held = cache(20, head_dim=64, dtype=mx.float32)
    arrays = (as_float64(a)[0] for a in (held.queries, held.keys, held.values))
    out = verify_attention(harness(), held.queries, held.keys, held.values, 20, 0.5)
    np.testing.assert_allclose(numpy(out)[0], causal(*arrays, 20, scale=0.5), atol=2e-5)
