"""A bf16 drafter is converted once, found again without reading it, and made anew when it changed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.conversion.convert import convert
from lse_mlx.checkpoints.conversion.first_use import Kind, detect, verify_conversion
from lse_mlx.errors import CheckpointError
from tests.checkpoints.conversion.conversion_sources import matrix, small_tensors, vector
from tests.checkpoints.conversion.conversion_sources import write_source as write_any_source
from tests.checkpoints.conversion.dflash2_sources import (
    CHILD,
    Said,
    overwrite_keeping_stat,
    prepare,
    problems,
    sha256,
    unfinished,
    write_origin,
    write_safetensors,
    write_source,
)

# What a folder is


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, Kind.SOURCE),
        ({"architectures": "DFlash2DraftModel"}, Kind.SOURCE),
        ({"architectures": ["Other", "DFlash2DraftModel"]}, Kind.SOURCE),
        ({"quantization": None, "quantization_config": {}}, Kind.SOURCE),
        ({"architectures": ["DFlashDraftModel"]}, Kind.OTHER),
        ({"architectures": None}, Kind.OTHER),
        ({"architectures": 7}, Kind.OTHER),
        ({"architectures": {"DFlash2DraftModel": 1}}, Kind.OTHER),
        ({"quantization": {"bits": 8}}, Kind.QUANTIZED),
        ({"quantization_config": {"bits": 8}}, Kind.QUANTIZED),
    ],
)
def test_the_config_tells_the_kind(tmp_path, settings, config, kind):
    source = write_source(tmp_path / "source", **config)
    assert detect(source).kind is kind
    place, said = prepare(source, settings)
    assert (place != source) == (kind is Kind.SOURCE)
    assert bool(said.notes) == (kind is Kind.SOURCE)


@pytest.mark.parametrize("config", [None, "", "[]", "{", "[" * 100_000])
def test_no_readable_config_is_no_drafter(source, settings, config):
    if config is None:
        (source / "config.json").unlink()
    else:
        (source / "config.json").write_text(config, "utf-8")
    assert detect(source).kind is Kind.OTHER
    assert prepare(source, settings)[0] == source


def damage(source: Path, how: str) -> None:
    weights = source / "model.safetensors"
    if how == "shards":
        weights.rename(source / "model-00001-of-00001.safetensors")
        (source / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    elif how == "missing":
        weights.unlink()
    elif how == "truncated":
        os.truncate(weights, weights.stat().st_size - 1)
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "lying header":
        weights.write_bytes(b"\xff" * 7 + b"\x7f" + weights.read_bytes()[8:])
    elif how == "odd width":
        write_safetensors(weights, {"a.weight": (2, 96)}, 0)
    elif how == "no matrix":
        write_safetensors(weights, {"a.bias": (2, 64), "b.weight": (64,)}, 0)
    elif how == "dtype":
        weights.write_bytes(weights.read_bytes().replace(b'"BF16"', b'"F16" ', 1))
    elif how == "folder":
        weights.unlink()
        weights.mkdir()


HOW = (
    "shards",
    "missing",
    "truncated",
    "empty",
    "lying header",
    "odd width",
    "no matrix",
    "dtype",
    "folder",
)


@pytest.mark.parametrize("how", HOW)
def test_what_cannot_be_converted_is_left_to_its_loader(source, settings, how):
    damage(source, how)
    before = sorted(os.listdir(source))
    found = detect(source)
    assert found.kind is Kind.UNSUPPORTED
    assert str(source) in found.reason
    place, said = prepare(source, settings)
    assert (place, said.phases) == (source, [])
    assert sorted(os.listdir(source)) == before
    assert not settings.user_cache.exists()


def test_the_demo_drafter_of_the_package_is_loaded_as_stored_and_a_copy_is_not(tmp_path, settings):
    assert prepare(demo_pair.DRAFTER, settings) == (demo_pair.DRAFTER, Said())
    copy = shutil.copytree(demo_pair.DRAFTER, tmp_path / "copy")
    assert prepare(copy, settings)[0] == copy / "lse-q8g64"


# Converting and finding again


def test_the_first_use_converts_and_the_next_finds_it(source, settings):
    write_origin(source)
    before = {name: sha256(source / name) for name in os.listdir(source)}
    place, said = prepare(source, settings)
    assert place == source / "lse-q8g64"
    assert problems(place, source) == []
    manifest = json.loads((place / "source-repository.json").read_text())
    assert (manifest["source_repository"], manifest["source_revision"]) == (
        "test/fixture",
        "0123abcd",
    )
    assert said.phases == ["hash-source", "quantize", "finish"]
    assert said.mentions("converting", str(source), "test/fixture@0123abcd", str(place), "once")
    assert said.mentions("complete", str(place))

    again, said = prepare(source, settings)
    assert (again, said.phases) == (place, [])
    assert said.mentions("using", str(place))
    assert detect(place).kind is Kind.QUANTIZED
    assert prepare(place, settings) == (place, Said())
    assert {name: sha256(source / name) for name in before} == before
    assert sorted(os.listdir(source)) == sorted([*before, "lse-q8g64", "lse-q8g64.source-stat"])


def test_the_bytes_are_those_of_the_converter(source, settings, tmp_path):
    write_origin(source)
    place, _ = prepare(source, settings)
    convert(source, tmp_path / "by hand", "test/fixture", "0123abcd")
    for name in os.listdir(place):
        assert (place / name).read_bytes() == (tmp_path / "by hand" / name).read_bytes()


def test_four_bits_have_a_place_of_their_own(source, settings):
    eight, _ = prepare(source, settings)
    four, _ = prepare(source, settings, bits=4)
    assert (eight.name, four.name) == ("lse-q8g64", "lse-q4g64")
    assert problems(four, source, bits=4) == []
    assert prepare(source, settings, bits=4)[1].phases == []
    assert prepare(source, settings)[0] == eight


def test_the_stamp_says_what_the_source_was(source, settings):
    prepare(source, settings)
    stat = (source / "model.safetensors").stat()
    stamp = (source / "lse-q8g64.source-stat").read_text()
    expected = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns} "
    assert stamp == expected + sha256(source / "model.safetensors") + "\n"


def test_a_warm_start_reads_nothing_of_the_weights(source, settings):
    place, _ = prepare(source, settings)
    overwrite_keeping_stat(source / "model.safetensors")
    again, said = prepare(source, settings)
    assert (again, said.phases) == (place, [])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts reads as Linux tells them")
def test_a_warm_start_reads_little_by_the_system_s_own_count(tmp_path, settings):
    source = write_source(tmp_path / "large", {"a.weight": (8192, 512)})
    prepare(source, settings)
    counted = CHILD.replace(
        "try:", "held = open('/proc/self/io').read()\nbefore = int(held.split()[1])\ntry:"
    ).replace("sys.exit(f", "raise SystemExit(f")
    counted += "print(int(open('/proc/self/io').read().split()[1]) - before)"
    arguments = [sys.executable, "-c", counted, str(source), str(settings.user_cache)]
    ran = subprocess.run(arguments, input="go\n", capture_output=True, text=True)
    _, place, read = ran.stdout.splitlines()
    assert place == str(source / "lse-q8g64")
    assert int(read) < 20_000  # the weights have 8 MiB, the conversion's header is among them


# What makes a conversion invalid


def test_changed_weights_are_converted_again(source, settings):
    place, _ = prepare(source, settings)
    old = sha256(place / "model.safetensors")
    write_source(source, seed=1)
    again, said = prepare(source, settings)
    assert again == place
    assert said.mentions("hashing the source")
    assert said.mentions("discarding", "the source's weights changed")
    assert problems(place, source) == []
    assert sha256(place / "model.safetensors") != old
    assert said.phases == ["hash-source", "quantize", "finish"]
    assert [step for step in said.steps if step[:2] == ("hash-source", 0)] == [
        ("hash-source", 0, (source / "model.safetensors").stat().st_size)
    ]


def test_a_changed_config_is_converted_again(source, settings):
    place, _ = prepare(source, settings)
    write_source(source, rms_norm_eps=1e-6)
    _, said = prepare(source, settings)
    assert said.mentions("discarding", "its config.json is not that of its source")
    assert problems(place, source) == []
    assert "1e-06" in (place / "config.json").read_text()


def test_a_config_of_other_spelling_is_the_same(source, settings):
    prepare(source, settings)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config, indent=7), "utf-8")
    assert prepare(source, settings)[1].phases == []


def test_touched_weights_are_hashed_again_once(source, settings):
    prepare(source, settings)
    os.utime(source / "model.safetensors", ns=(1, 1))
    _, said = prepare(source, settings)
    assert said.phases == ["hash-source"]
    assert said.mentions("hashing the source", "time stamp is not the one noted")
    assert prepare(source, settings)[1].phases == []


@pytest.mark.parametrize("stamp", [None, "", "1:2:3:4 beef\n", "\xff", "a b c\n"])
def test_a_missing_or_broken_stamp_is_made_again(source, settings, stamp):
    prepare(source, settings)
    path = source / "lse-q8g64.source-stat"
    right = path.read_bytes()
    if stamp is None:
        path.unlink()
    else:
        path.write_text(stamp, "latin-1")
    _, said = prepare(source, settings)
    assert said.phases == ["hash-source"]
    assert said.mentions("as nothing says whether it changed") == (stamp is None)
    assert path.read_bytes() == right


def spoil(place: Path, how: str) -> None:
    weights, manifest = place / "model.safetensors", place / "source-repository.json"
    if how == "truncated":
        os.truncate(weights, weights.stat().st_size - 1)
    elif how == "no weights":
        weights.unlink()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "broken manifest":
        manifest.write_text(manifest.read_text()[:-20])
    elif how == "no config":
        (place / "config.json").unlink()
    elif how == "other config":
        (place / "config.json").write_text("{}")
    elif how == "empty folder":
        shutil.rmtree(place)
        place.mkdir()
    elif how == "other format":
        shutil.rmtree(place)
        shutil.copytree(place.with_name("lse-q4g64"), place)
    elif how in ("source hash", "other count"):
        other = {"source_sha256": "0" * 64} if how == "source hash" else {"tensors": 6}
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | other))
    elif how == "pipe":
        (place / "config.json").unlink()
        os.mkfifo(place / "config.json")
    else:
        edit = {
            "zeros": (b'{"a.weight"', bytes(11)),
            "other type": (b'"U32"', b'"I32"'),
            "other name": (b"a.scales", b"a.scalez"),
            "other shape": (b'"shape":[8,32]', b'"shape":[32,8]'),
        }[how]
        whole = weights.read_bytes()
        assert edit[0] in whole
        weights.write_bytes(whole.replace(*edit, 1))


SPOILED = {
    "truncated": "incomplete",
    "no weights": "incomplete",
    "no manifest": "no readable manifest",
    "broken manifest": "no readable manifest",
    "no config": "incomplete",
    "other config": "config.json is not that of its source",
    "empty folder": "no readable manifest",
    "other format": "MLX affine Q4 group64",
    "source hash": "weights changed",
    "other count": "its tensors are not",
    "pipe": "incomplete",
    "zeros": "header of its weights is damaged",
    "other type": "its tensors are not",
    "other name": "its tensors are not",
    "other shape": "its tensors are not",
}


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_conversion_is_made_again(source, settings, how):
    place, _ = prepare(source, settings)
    prepare(source, settings, bits=4)
    spoil(place, how)
    again, said = prepare(source, settings)
    assert again == place
    assert problems(place, source) == []
    assert said.mentions("discarding", str(place), SPOILED[how])
    assert unfinished(source) == []


def test_a_source_of_any_tensors_is_converted_once(tmp_path, settings):
    # Names that only the parts of a matrix have otherwise.
    odd = {
        "lone.biases": matrix(2, 64, 1),
        "flat.weight": vector(9, 2),
        "flat.scales": matrix(1, 64, 3),
    }
    source = write_any_source(tmp_path / "any", small_tensors() | odd)
    for bits in (8, 4):
        place, _ = prepare(source, settings, bits)
        assert prepare(source, settings, bits) == (
            place,
            Said([f"using the conversion in {place}"]),
        )


def test_what_a_killed_process_left_goes_with_the_next_start_too(source, settings):
    prepare(source, settings)
    left = source / f"lse-q8g64.unfinished-{'0' * 16}"
    left.mkdir()
    prepare(source, settings)
    assert not left.exists()


# Verification


def test_a_valid_conversion_is_verified_by_reading_all_of_it(source, settings):
    place, _ = prepare(source, settings)
    said = Said()
    assert verify_conversion(source, settings, said) == place
    sizes = {phase: total for phase, _, total in said.steps}
    assert sizes == {
        "hash-source": (source / "model.safetensors").stat().st_size,
        "hash-output": (place / "model.safetensors").stat().st_size,
    }


@pytest.mark.parametrize("which", ["source", "conversion", "config", "manifest"])
def test_verification_finds_what_a_start_overlooks(source, settings, which):
    place, _ = prepare(source, settings)
    if which in ("source", "conversion"):
        overwrite_keeping_stat((source if which == "source" else place) / "model.safetensors", 1)
        assert prepare(source, settings)[1].phases == []
    elif which == "config":
        (place / "config.json").write_text("{}")
    else:
        manifest = place / "source-repository.json"
        manifest.write_text(manifest.read_text().replace('"sha256": "', '"sha256": "0'))
    with pytest.raises(CheckpointError, match=r"not valid.*convert again"):
        verify_conversion(source, settings, Said())


def test_without_a_conversion_there_is_nothing_to_verify(source, settings):
    with pytest.raises(CheckpointError, match=r"no conversion.*lse-mlx convert"):
        verify_conversion(source, settings, Said())
    assert sorted(os.listdir(source)) == ["config.json", "model.safetensors"]


def test_it_needs_no_more_than_numpy():
    code = "import sys, lse_mlx.checkpoints.conversion.first_use; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in ran.stdout.split()}
    assert "numpy" in loaded
    assert not loaded & {"mlx", "mlx_lm", "huggingface_hub", "rich", "transformers", "safetensors"}
