"""The races of a load: held once, kept, and what exact decoding asks of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lse_mlx.errors import KernelError
from lse_mlx.kernels.choices import STOCK, Choices, Mode
from lse_mlx.kernels.race import Contest
from lse_mlx.kernels.winners import WinnersFile, this_device
from lse_mlx.races import hold_races, pair_contests
from lse_mlx.warmup import warm_up
from tests.dice_pair import Heard, dice, on_device, save_pair
from tests.kernels.track import Track
from tests.tiny_models import on_cpu, random_prompt

PROMPT = random_prompt(12)


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_cpu():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))


def test_races_are_held_once_and_kept(folders, tmp_path: Path):
    heard = Heard()
    target, drafter = on_device(folders, dice("auto"))
    first = warm_up(target, drafter, PROMPT, races=tmp_path, progress=heard)
    operations = {race.operation for race in first.races}
    assert operations == {"skinny_qmm", "verify_attention", "topk"}
    assert first.raced == len(first.races) > 0
    assert [step for step in heard.steps if step[0] == "race"][-1][1] == first.raced
    # Kernels that answer at random give wrong numbers: they lose, and are spoken of.
    assert {race.winner for race in first.races} == {"stock"}
    assert sum("is not used at" in note for note in heard.notes) == 4, "one for each own form"
    assert WinnersFile(tmp_path, this_device()).path.exists()

    again_target, again_drafter = on_device(folders, dice("auto"))
    again = warm_up(again_target, again_drafter, PROMPT, races=tmp_path)
    assert again.raced == 0
    assert again.races == first.races


def test_the_targets_head_races_for_the_rows_of_both(folders):
    """The target's in its own dtype, the drafter's in fp32."""
    target, drafter = on_device(folders, dice("auto"))
    heads = [c.shape for c in pair_contests(target, drafter) if "x64x97 " in c.shape]
    assert heads == [
        *[f"{rows}x64x97 4-bit in 64, bfloat16/bfloat16" for rows in range(1, 9)],
        "7x64x97 4-bit in 64, float32/bfloat16",
    ]
    alone = [c.shape for c in pair_contests(target, None) if "x64x97 " in c.shape]
    assert alone == heads[:8]


def test_every_choice_of_a_reply_was_raced_for(folders):
    target, drafter = on_device(folders, dice("auto"))
    raced = {contest.key for contest in pair_contests(target, drafter)}
    warm_up(target, drafter, PROMPT)
    assert target.registry.choices.chosen.keys() <= raced


def test_exact_decoding_is_refused_where_no_form_is_right(folders, tmp_path: Path):
    target, drafter = on_device(folders, dice("auto", exact=True))
    with pytest.raises(KernelError, match="exact decoding cannot be had"):
        warm_up(target, drafter, PROMPT, races=tmp_path)


def test_races_that_are_damaged_are_held_again(folders, tmp_path: Path):
    heard = Heard()
    file = WinnersFile(tmp_path, this_device())
    file.path.write_text("{")
    target, _ = on_device(folders, dice("auto"))
    report = warm_up(target, None, PROMPT, races=tmp_path, progress=heard)
    assert report.raced == len(report.races)
    assert "races are run again" in heard.notes[0]
    assert len(file.read()[0]) == report.raced


def contests(track: Track) -> list[Contest]:
    return [track.contest(f"{rows}x4x4 4-bit") for rows in range(1, 9)]


FORMS: dict[str, float] = {STOCK: 9.0, "simd": 1.0, "matrix": 5.0}
each_mode = pytest.mark.parametrize("mode", ["auto", "own"])


@each_mode
def test_exact_compares_numbers_where_there_is_no_time(mode: Mode, tmp_path: Path):
    heard = Heard()
    choices = Choices(mode, exact=True)
    track = Track(dict(FORMS), wrong={"simd": 0.5}, choices=choices)
    found = hold_races(contests(track), choices, tmp_path, heard, seconds=0.0)
    assert found == ([], 0)
    assert choices.form("product", "8x4x4 4-bit", ("simd", "matrix")) == "matrix"
    assert any("the form simd is not used at 8 shapes" in note for note in heard.notes)
    assert WinnersFile(tmp_path, this_device()).read() == ({}, ""), "no race, nothing to keep"


@each_mode
def test_exact_is_refused_where_there_is_no_time_and_no_form_is_right(mode: Mode, tmp_path: Path):
    choices = Choices(mode, exact=True)
    wrong = {"simd": 0.5, "matrix": float("nan")}
    track = Track(dict(FORMS), wrong=wrong, choices=choices)
    with pytest.raises(KernelError, match="No form of product at 1x4x4 4-bit"):
        hold_races(contests(track), choices, tmp_path, Heard(), seconds=0.0)


def test_exact_takes_the_first_form_that_is_right_without_times(tmp_path: Path):
    choices = Choices("own", exact=True)
    track = Track(dict(FORMS), choices=choices)
    hold_races(contests(track), choices, tmp_path, Heard())
    assert choices.form("product", "3x4x4 4-bit", ("simd", "matrix")) == "simd"


@pytest.mark.parametrize("mode", ["own", "stock"])
def test_where_the_form_is_given_nothing_races(mode: Mode, tmp_path: Path):
    choices = Choices(mode)
    track = Track(dict(FORMS), choices=choices)
    assert hold_races(contests(track), choices, tmp_path / "none", Heard()) == ([], 0)
    assert track.calls == []
    assert not (tmp_path / "none").exists()


def test_races_left_over_are_said_and_made_up_for(tmp_path: Path):
    heard = Heard()
    choices = Choices("auto")
    track = Track(dict(FORMS), choices=choices)
    assert hold_races(contests(track), choices, tmp_path, heard, seconds=0.0) == ([], 0)
    assert ["8 races did not begin within 0 s" in note for note in heard.notes] == [True]
    assert "stock MLX serves there" in heard.notes[0]
    assert choices.form("product", "3x4x4 4-bit", ("simd",)) == STOCK
    results, new = hold_races(contests(track), choices, tmp_path, heard)
    assert new == len(results) == 8
