"""Conversions of 8 and of 4 bits of one source: found and verified for what they are."""

import pytest

from lse_mlx.checkpoints.conversion.first_use import verify_conversion
from lse_mlx.checkpoints.conversion.target import convert_target, find_target, verify_target
from lse_mlx.errors import CheckpointError
from tests.checkpoints.conversion import target_sources
from tests.checkpoints.conversion.conversion_sources import run
from tests.checkpoints.conversion.dflash2_sources import (
    Said,
    overwrite_keeping_stat,
    prepare,
    write_source,
)
from tests.tiny_models import on_cpu


def test_a_drafter_s_are_verified_by_what_they_say(source, settings, tmp_path):
    four, _ = prepare(source, settings, bits=4)
    assert verify_conversion(source, settings, Said()) == four
    eight, _ = prepare(source, settings)
    assert verify_conversion(source, settings, Said()) == eight
    overwrite_keeping_stat(four / "model.safetensors", 1)
    with pytest.raises(CheckpointError, match=r"q4g64 is not valid .its files"):
        verify_conversion(source, settings, Said(), bits=4)
    by_hand = run(source, "by hand", bits=4)
    assert verify_conversion(source, settings, Said(), place=by_hand) == by_hand
    with pytest.raises(CheckpointError, match="MLX affine Q4 group64"):
        verify_conversion(source, settings, Said(), bits=8, place=by_hand)
    (by_hand / "source-repository.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no readable manifest"):
        verify_conversion(source, settings, Said(), place=by_hand)
    with pytest.raises(CheckpointError, match=r"no conversion in .*nothing"):
        verify_conversion(source, settings, Said(), place=tmp_path / "nothing")


def test_a_target_s_are_found_and_verified_by_what_they_say(tmp_path, settings):
    source = target_sources.target(tmp_path / "target")
    before = sorted(source.iterdir())
    said = Said()
    assert find_target(source, settings, said) is None
    assert (sorted(source.iterdir()), said) == (before, Said())
    with on_cpu():
        convert_target(source, source / "lse-q8g64", Said(), bits=8)
    assert verify_target(source, settings, Said()) == source / "lse-q8g64"
    assert find_target(source, settings, Said()) is None
    place, _ = target_sources.prepare(source, settings)
    assert find_target(source, settings, said) == place
    assert said == Said([f"using the conversion in {place}"])
    assert verify_target(source, settings, Said()) == place
    eight = source / "lse-q8g64"
    assert verify_target(source, settings, Said(), place=eight) == eight
    assert find_target(write_source(tmp_path / "drafter"), settings, Said()) is None
