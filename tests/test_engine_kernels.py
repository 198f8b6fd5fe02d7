"""What an engine says about kernels: totals since it was loaded, and a request's share of them."""

import dataclasses
from collections.abc import Iterator

import pytest

import lse_mlx
from lse_mlx import demo_pair
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.loading import load_pair
from tests.dice_pair import dice
from tests.tiny_models import on_cpu

PROMPT = "Write a story about a shy fox."


@pytest.fixture(scope="module")
def engine() -> Iterator[lse_mlx.Engine]:
    with on_cpu(), lse_mlx.load() as loaded:
        yield loaded


def test_stats_are_frozen_totals(engine: lse_mlx.Engine):
    stats = engine.stats()
    assert (stats.jit_compiles_total, stats.device_kernel_calls) == (0, 0)
    assert stats.reference_calls == sum(calls["reference"] for calls in stats.kernels.values()) > 0
    assert stats.refused == {}
    assert {"gated_delta_verify", "topk", "selector", "sliding_attention"} <= set(stats.kernels)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.reference_calls = 0  # type: ignore[misc]


def test_a_request_counts_its_own_calls(engine: lse_mlx.Engine):
    before = engine.stats()
    first, second = (engine.generate(PROMPT, max_tokens=12).timings for _ in range(2))
    after = engine.stats()
    assert first["reference_calls"] == second["reference_calls"] > 0
    assert after.reference_calls - before.reference_calls == 2 * first["reference_calls"]
    for timings in (first, second):
        assert timings["jit_compiles"] == timings["jit_compiles_total"] == 0
        assert timings["jit_compile_ms_total"] == 0.0
        assert timings["device_kernel_calls"] == 0


def test_replies_in_turn_do_not_count_each_others_calls(engine: lse_mlx.Engine):
    alone = engine.generate(PROMPT, max_tokens=12).timings["reference_calls"]
    both = zip(
        engine.stream(PROMPT, max_tokens=12), engine.stream(PROMPT, max_tokens=12), strict=True
    )
    *_, (one, other) = both
    assert one.result is not None and other.result is not None
    assert one.result.timings["reference_calls"] == alone
    assert other.result.timings["reference_calls"] == alone


def test_a_kernel_that_does_not_run_here_is_in_the_stats():
    registry = dice(refusing=("dynamic_conv",))
    demo = Pair(demo_pair.TARGET, demo_pair.DRAFTER)
    with on_cpu(), load_pair(demo, registry=registry, warm=False) as loaded:
        loaded.generate(PROMPT, max_tokens=3)
        stats = loaded.stats()
    assert stats.refused.keys() == {"dynamic_conv"}
    assert "threadgroup too large" in stats.refused["dynamic_conv"]
    assert stats.kernels["dynamic_conv"].keys() == {"reference"}
    assert stats.device_kernel_calls > 0


def test_a_closed_engine_has_no_stats():
    with on_cpu():
        loaded = lse_mlx.load(warm_up=False)
    assert loaded.warmed is None
    loaded.close()
    with pytest.raises(lse_mlx.RequestError, match="closed"):
        loaded.stats()
