"""The races of a load: held once, kept, and what exact decoding asks of them."""

import json
from collections.abc import Iterator
from dataclasses import replace
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


def test_an_exact_pair_loads_with_the_form_that_runs(folders):
    """Before any race: the token that a load tries needs products."""
    registry = dice("auto", exact=True, refusing=("skinny_qmm",))
    on_device(folders, registry)
    assert registry.served["skinny_qmm_matrix", "metal"] > 0
    assert ("skinny_qmm", "reference") not in registry.served


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


HUGE = json.dumps({"device": this_device(), "races": [{"microseconds": {"stock": 10**400}}]})


@pytest.mark.parametrize("text", ["[" * 100_000, HUGE], ids=["deep", "huge"])
def test_a_file_that_cannot_be_read_is_a_note_and_new_races(tmp_path: Path, text: str):
    choices, heard = Choices("auto"), Heard()
    file = WinnersFile(tmp_path, this_device())
    file.path.write_text(text)
    track = Track(dict(FORMS), choices=choices)
    results, new = hold_races(contests(track), choices, tmp_path, heard)
    assert new == len(results) == len(file.read()[0]) == 8
    [note] = heard.notes
    assert "races are run again" in note


@each_mode
def test_exact_takes_stock_where_its_order_is_exact_and_no_form_is_right(mode: Mode, tmp_path):
    heard = Heard()
    choices = Choices(mode, exact=True)
    track = Track({STOCK: 9.0, "simd": 1.0}, wrong={"simd": 0.5}, choices=choices)
    exact_in_stock = [replace(contest, stock_is_exact=True) for contest in contests(track)]
    hold_races(exact_in_stock, choices, tmp_path, heard, seconds=0.0)
    assert choices.form("product", "8x4x4 4-bit", ("simd", STOCK)) == STOCK
    assert any("the form simd is not used at 8 shapes" in note for note in heard.notes)


def test_top_k_is_exact_in_stock_and_nothing_else_is(folders):
    target, drafter = on_device(folders, dice("auto", exact=True))
    for contest in pair_contests(target, drafter):
        assert contest.stock_is_exact == (contest.operation == "topk")


def test_a_form_that_fails_does_not_end_a_load(tmp_path: Path):
    choices, heard = Choices("auto"), Heard()
    track = Track(dict(FORMS), choices=choices, failing={"simd": RuntimeError("GPU timeout")})
    results, new = hold_races(contests(track), choices, tmp_path, heard, seconds=30.0)
    assert new == len(results) == 8
    assert any("the form simd is not used" in n and "GPU timeout" in n for n in heard.notes)
    assert choices.winners.keys() >= {result.key for result in results}


def test_a_race_in_which_stock_fails_is_told_and_not_kept(tmp_path: Path):
    choices, heard = Choices("auto"), Heard()
    track = Track(dict(FORMS), choices=choices, failing={STOCK: RuntimeError("out of memory")})
    assert hold_races(contests(track), choices, tmp_path, heard) == ([], 0)
    [note] = heard.notes
    assert note.startswith("races could not be held at 8 shapes") and "out of memory" in note
    assert WinnersFile(tmp_path, this_device()).read() == ({}, "")
    exact = Choices("auto", exact=True)
    track.choices = exact
    with pytest.raises(KernelError, match="exact decoding cannot be had"):
        hold_races(contests(track), exact, tmp_path, Heard())


@pytest.mark.parametrize(
    "change",
    [
        {"errors": {"simd": 99.0, "matrix": 0.0}},
        {"winner": "simd", "microseconds": {STOCK: 1.0, "simd": 9.0, "matrix": 9.0}},
        {"winner": "gone", "microseconds": {STOCK: 9.0, "gone": 1.0}},
        {"refused": {"simd": "for no reason"}, "winner": STOCK},
    ],
)
def test_a_kept_result_that_no_race_can_have_found_is_raced_again(change: dict, tmp_path: Path):
    choices = Choices("auto")
    track = Track(dict(FORMS), choices=choices)
    [contest] = contests(track)[:1]
    [found], _ = hold_races([contest], choices, tmp_path, Heard())
    assert hold_races([contest], choices, tmp_path, Heard()) == ([found], 0)
    file = WinnersFile(tmp_path, this_device())
    file.write([replace(found, **change)])
    again, new = hold_races([contest], choices, tmp_path, Heard())
    assert new == 1 and again[0].errors == found.errors
    assert file.read()[0][found.key].errors == found.errors


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
