"""What races: each kind of call on its own, under the name by which a real call asks for a form."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.contests import attention_contests, product_contests, topk_contest
from lse_mlx.kernels.race import Contest, compare
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.skinny_qmm import QuantizedProduct
from tests.dice_pair import dice
from tests.kernels.affine import Codes


def matrix(
    registry: Registry, group_size: int = 64, bits: int = 4, dtype: mx.Dtype = mx.bfloat16
) -> QuantizedProduct:
    codes = Codes.random(16, 256, bits, group_size, dtype)
    return QuantizedProduct(registry, codes.weight, codes.scales, codes.biases, bits, group_size)


def contests_of_one_row(*products: QuantizedProduct, dtype: mx.Dtype) -> list[Contest]:
    return list(product_contests(products, dtype, [1]))


def test_products_that_differ_race_apart() -> None:
    registry = dice()
    bf16, fp16, fp32 = mx.bfloat16, mx.float16, mx.float32
    different = [
        matrix(registry),
        matrix(registry, group_size=32),
        matrix(registry, group_size=128),
        matrix(registry, bits=8),
        matrix(registry, dtype=fp16),
        matrix(registry, dtype=fp32),
    ]
    contests = [c for x in (bf16, fp32) for c in contests_of_one_row(*different, dtype=x)]
    assert len({contest.key for contest in contests}) == len(contests) == 12
    assert contests[0].shape == "1x256x16 4-bit in 64, bfloat16/bfloat16"
    for contest in contests:
        assert len(contest.steps) == 1


def test_products_that_are_alike_race_together() -> None:
    registry = dice()
    [contest] = contests_of_one_row(*[matrix(registry) for _ in range(6)], dtype=mx.float32)
    assert len(contest.steps) == 4


def test_products_without_a_kernel_do_not_race() -> None:
    registry = dice()
    weight, scales, biases = mx.quantize(mx.ones((16, 256)), group_size=64, bits=3)
    three_bits = QuantizedProduct(registry, weight, scales, biases, 3, 64)
    assert contests_of_one_row(three_bits, dtype=mx.float32) == []
    assert contests_of_one_row(matrix(registry), dtype=mx.int32) == []


def all_contests(registry: Registry) -> Iterator[Contest]:
    for dtype in (mx.float32, mx.bfloat16):
        yield from product_contests([matrix(registry), matrix(registry, 32, 8)], dtype)
    yield from attention_contests(registry, 6, 2, 64, mx.bfloat16)
    yield topk_contest(registry, 7, 97, 5)


@pytest.mark.parametrize("exact", [False, True])
def test_a_real_call_asks_for_the_winner_of_its_race(exact: bool) -> None:
    """The call's own name of its shape is the race's, so what won there serves here."""
    registry = dice()
    for contest in all_contests(registry):
        last = contest.own[-1]
        registry.choices = Choices("auto", exact, {contest.key: last})
        contest.steps[0](contest.start)
        if exact:
            [key] = registry.choices.chosen
            assert key.startswith(f"{contest.operation} *")
            assert key.endswith(contest.shape.lstrip("0123456789"))
        else:
            assert registry.choices.chosen == {contest.key: last}


@pytest.mark.parametrize("refusing", ["skinny_qmm", "verify_attention", "topk_chunk"])
def test_a_form_that_does_not_run_is_not_served_by_its_reference(refusing: str) -> None:
    """Neither at first nor once it is known: or the reference would win as that form."""
    registry = dice(refusing=(refusing,))
    operation = "topk" if refusing == "topk_chunk" else refusing
    contest = next(c for c in all_contests(registry) if c.operation == operation)
    contest.steps[0](contest.start)
    assert list(registry.refused) == [operation]
    result = compare(contest, registry.choices)
    assert "threadgroup too large" in result.refused[contest.own[0]]
    assert contest.own[0] not in result.errors
