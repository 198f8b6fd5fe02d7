"""The stamp beside a conversion is written to no other file, and nobody waits for a pipe."""

import os
from pathlib import Path

import pytest

from tests.checkpoints.conversion.dflash2_sources import prepare, problems, sha256

STAMP = "lse-q8g64.source-stat"


def check_stamp(source: Path) -> None:
    stamp = source / STAMP
    assert stamp.is_file() and not stamp.is_symlink()
    assert stamp.read_text().endswith(f" {sha256(source / 'model.safetensors')}\n")
    assert sorted(os.listdir(source)) == ["config.json", "lse-q8g64", STAMP, "model.safetensors"]


def test_a_link_in_its_place_is_replaced_and_what_it_leads_to_stays(source, settings):
    precious = source.parent / "precious"
    precious.write_text("mine")
    (source / STAMP).symlink_to(precious)
    prepare(source, settings)
    assert precious.read_text() == "mine"
    check_stamp(source)


def test_a_link_that_leads_nowhere_makes_nothing_there(source, settings):
    (source / STAMP).symlink_to(source.parent / "new")
    prepare(source, settings)
    assert not (source.parent / "new").exists()
    check_stamp(source)


def test_a_stamp_behind_a_link_is_not_believed(source, settings):
    prepare(source, settings)
    (source / STAMP).rename(source.parent / "stamp")
    (source / STAMP).symlink_to(source.parent / "stamp")
    assert prepare(source, settings)[1].phases == ["hash-source"]
    check_stamp(source)


@pytest.mark.usefixtures("no_waiting")
def test_a_pipe_in_its_place_is_replaced(source, settings):
    os.mkfifo(source / STAMP)
    place, _ = prepare(source, settings)
    assert problems(place, source) == []
    check_stamp(source)


def test_a_folder_in_its_place_stays_and_nothing_is_left_beside_it(source, settings):
    (source / STAMP).mkdir()
    prepare(source, settings)
    assert sorted(os.listdir(source)) == ["config.json", "lse-q8g64", STAMP, "model.safetensors"]
    assert os.listdir(source / STAMP) == []
    # It is in the user's cache then, so that the next start reads nothing either.
    assert prepare(source, settings)[1].phases == []
