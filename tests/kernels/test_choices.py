"""Own form or stock, as the mode, the race and exactness say; and options that mean nothing."""

from typing import Any

import pytest

from lse_mlx.errors import KernelError, RequestError
from lse_mlx.kernels.choices import STOCK, Choices, any_rows
from lse_mlx.kernels.options import REQUIRED, KernelOptions, required_by
from lse_mlx.loading import load
from tests.tiny_models import on_cpu

SHAPE, OWN = "8x5120x17408 4-bit", ("simd", "matrix")


def form(choices: Choices, shape: str = SHAPE) -> str:
    return choices.form("skinny_qmm", shape, OWN)


def test_own_and_stock_take_that_form_everywhere():
    assert form(Choices("own")) == "simd"
    assert form(Choices("stock")) == STOCK


def test_auto_takes_the_winner_and_stock_where_nothing_was_raced():
    choices = Choices(winners={f"skinny_qmm {SHAPE}": "matrix"})
    assert form(choices) == "matrix"
    assert form(choices, "7x5120x17408 4-bit") == STOCK
    assert choices.form("topk", SHAPE, ("chunks",)) == STOCK


def test_a_winner_that_is_no_form_any_more_is_not_taken():
    winners = {f"skinny_qmm {SHAPE}": "gone", any_rows("skinny_qmm", SHAPE): "gone"}
    assert form(Choices(winners=winners)) == STOCK
    assert form(Choices(exact=True, winners=winners)) == "simd"


def test_winners_of_a_race_do_not_override_what_was_asked_for():
    winners = {f"skinny_qmm {SHAPE}": "matrix"}
    assert form(Choices("own", winners=winners)) == "simd"
    assert form(Choices("stock", winners=winners)) == STOCK


@pytest.mark.parametrize("mode", ["auto", "own"])
def test_exact_takes_one_own_form_whatever_the_rows(mode):
    choices = Choices(mode, exact=True, winners={f"skinny_qmm {SHAPE}": STOCK})
    assert {form(choices, f"{n}x5120x17408 4-bit") for n in (1, 2, 8, 512)} == {"simd"}
    choices.winners[any_rows("skinny_qmm", SHAPE)] = "matrix"
    assert {form(choices, f"{n}x5120x17408 4-bit") for n in (1, 2, 8, 512)} == {"matrix"}
    assert form(choices, "1x64x64 4-bit") == "simd"


@pytest.mark.parametrize("mode", ["auto", "own"])
def test_exact_takes_stock_where_it_is_named_and_settled(mode):
    choices = Choices(mode, exact=True)
    assert choices.form("topk", "7x97, 5", ("chunks", STOCK)) == "chunks"
    choices.winners[any_rows("topk", "7x97, 5")] = STOCK
    assert choices.form("topk", "7x97, 5", ("chunks", STOCK)) == STOCK
    assert choices.form("topk", "7x97, 5", ("chunks",)) == "chunks"


def test_a_shape_whatever_its_rows():
    assert any_rows("skinny_qmm", "8x64x96 4-bit") == "skinny_qmm *x64x96 4-bit"
    assert any_rows("verify_attention", "3 rows, 24/4 heads of 256") == (
        "verify_attention * rows, 24/4 heads of 256"
    )


def test_what_was_chosen_is_remembered_and_a_comparison_is_not():
    choices = Choices("own")
    form(choices)
    with choices.forcing("matrix"):
        assert form(choices) == "matrix"
        with choices.forcing(STOCK):
            assert form(choices, "1x8x8 4-bit") == STOCK
        assert form(choices) == "matrix"
    assert form(choices) == "simd"
    assert choices.chosen == {f"skinny_qmm {SHAPE}": "simd"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernels": "fast"}, "'fast': give one of auto, own, stock"),
        ({"kernels": None}, "None"),
        ({"exact": "yes"}, "exact is 'yes'"),
        ({"required": 1}, "require_device_kernels is 1"),
        ({"kernels": "stock", "exact": True}, "exact decoding needs rows"),
    ],
)
def test_options_that_mean_nothing_are_one_sentence(options, words: str):
    with pytest.raises(RequestError) as refused:
        KernelOptions(**options)
    assert words in str(refused.value)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize("option", ["warm_up", "exact", "require_device_kernels"])
@pytest.mark.parametrize("value", ["no", None, 0, 1])
def test_load_takes_true_or_false_and_nothing_else(option: str, value: Any):
    with pytest.raises(RequestError, match=f"{option} is .*: give True or False"):
        load("demo", **{option: value})


def test_options_become_a_registry():
    with on_cpu():
        registry = KernelOptions("own", exact=True).registry()
        assert (registry.form, registry.choices.mode, registry.choices.exact) == (
            "reference",
            "own",
            True,
        )
        with pytest.raises(KernelError):
            KernelOptions(required=True).registry()


@pytest.mark.parametrize(("value", "required"), [("1", True), ("0", False), ("", False)])
def test_the_environment_can_require_kernels(value: str, required: bool):
    assert required_by({REQUIRED: value}) is required
    assert required_by({}) is False


def test_an_unclear_environment_is_one_sentence():
    with pytest.raises(RequestError, match="LSE_REQUIRE_DEVICE_KERNELS is 'yes'"):
        required_by({REQUIRED: "yes"})
