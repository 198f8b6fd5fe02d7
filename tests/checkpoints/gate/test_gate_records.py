"""Revisions and records: what they bind, and what the one flag waives."""

import os
import shutil
from pathlib import Path

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.conversion.convert import convert
from lse_mlx.checkpoints.gate.gate import PairRefused, check_pair, inspect_pair
from lse_mlx.checkpoints.gate.pair_record import pair_record_of, write_pair_record
from lse_mlx.checkpoints.pairing import PairRecord
from lse_mlx.errors import CheckpointError
from tests.checkpoints.gate.sparse_checkpoints import (
    DRAFTER_REVISION,
    OTHER,
    QWEN,
    Entries,
    drafter_entries,
    failed,
    hollow_demo,
    quantized,
    read_json,
    refusal_of,
    snapshot,
    write_json,
    write_sparse,
)

# Revisions


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Path]:
    """A trained pair in the hub's cache, the drafter with its own record."""
    target, drafter = hollow_demo(tmp_path / "made")
    places = snapshot(tmp_path, "me/target", "a" * 40), snapshot(tmp_path, "me/drafter", "b" * 40)
    for source, place in zip((target, drafter), places, strict=True):
        place.rmdir()
        shutil.copytree(source, place)
    write_pair_record(places[1] / "pair.json", "mine", *places)
    return places


def moved(folder: Path, revision: str) -> Path:
    """The snapshot under another revision."""
    return folder.rename(folder.with_name(revision))


def test_a_recorded_pair_is_accepted(recorded: tuple[Path, Path]) -> None:
    record = PairRecord.read(recorded[1] / "pair.json")
    assert (record.target.repository, record.target.revision) == ("me/target", "a" * 40)
    assert (record.drafter.repository, record.drafter.revision) == ("me/drafter", "b" * 40)
    assert record.targets == ("me/target",)
    report = check_pair(*recorded)
    assert report.notes == (
        f"The record of mine is {recorded[1]}/pair.json, which came with the drafter.",
    )
    held = {check.field for check in report.checks if check.kind == "revision"}
    assert held == {"target revision", "drafter revision"}


@pytest.mark.parametrize("side", ["target", "drafter"])
def test_another_revision_is_refused_and_only_the_flag_lets_it_pass(
    recorded: tuple[Path, Path], side: str
) -> None:
    target, drafter = recorded
    pair = (moved(target, OTHER), drafter) if side == "target" else (target, moved(drafter, OTHER))
    was = ("a" if side == "target" else "b") * 40
    message = refusal_of(*pair)
    assert f"{side} revision = " in message
    assert was in message
    assert OTHER in message
    assert "or pass --allow-revision-mismatch." in message
    report = check_pair(*pair, allow_revision_mismatch=True)
    assert [check.field for check in report.mismatches] == [f"{side} revision"], "still reported"
    assert not report.as_dict()["accepted"]
    assert report.as_dict(allow_revision_mismatch=True)["accepted"]


def test_the_flag_covers_revisions_alone(recorded: tuple[Path, Path]) -> None:
    target, drafter = moved(recorded[0], OTHER), recorded[1]
    values = read_json(drafter / "config.json")
    values["rms_norm_eps"] = 1e-5
    write_json(drafter / "config.json", values)
    with pytest.raises(PairRefused) as refusal:
        check_pair(target, drafter, allow_revision_mismatch=True)
    assert "rms_norm_eps = 1e-05" in str(refusal.value)
    assert "target revision" not in str(refusal.value), "it is waived and does not refuse"
    assert failed(refusal.value.report).keys() == {"rms_norm_eps", "target revision"}


def test_another_repository_of_the_drafter_is_another_revision(
    recorded: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = recorded
    place = snapshot(tmp_path, "you/drafter", "b" * 40)
    place.rmdir()
    drafter.rename(place)
    assert failed(inspect_pair(target, place)) == {
        "drafter repository": ("you/drafter", "me/drafter")
    }
    assert check_pair(target, place, allow_revision_mismatch=True)


def test_another_repository_of_the_target_is_no_revision(
    recorded: tuple[Path, Path], tmp_path: Path
) -> None:
    place = snapshot(tmp_path, "you/target", "a" * 40)
    place.rmdir()
    recorded[0].rename(place)
    with pytest.raises(PairRefused, match=r"target = me/target, but the target is 'you/target'"):
        check_pair(place, recorded[1], allow_revision_mismatch=True)


def test_weights_of_another_hash_in_the_cache_are_another_revision(
    recorded: tuple[Path, Path], tmp_path: Path
) -> None:
    """The cache names a file by its SHA-256, so it is known without reading it."""
    target, drafter = recorded
    record = read_json(drafter / "pair.json")
    weights = drafter / "model.safetensors"
    for name in (record["drafter"]["sha256"], "f" * 64):
        (tmp_path / "blobs" / name).parent.mkdir(exist_ok=True)
        shutil.copy(weights, tmp_path / "blobs" / name)
        weights.unlink()
        weights.symlink_to(os.path.relpath(tmp_path / "blobs" / name, drafter))
        found = failed(inspect_pair(target, drafter))
        expected = {"drafter sha256": ("f" * 64, record["drafter"]["sha256"])}
        assert found == (expected if name == "f" * 64 else {})


def test_a_conversion_is_held_to_the_registered_files(tmp_path: Path, qwen: Path) -> None:
    """The tensors of the published conversion, but not the text of its config.json."""
    drafter = tmp_path / "drafter"
    entries: Entries = {}
    for name, (dtype, shape) in drafter_entries(5120, 17408, 248320, 5).items():
        name = f"{name}.weight" if name.endswith("codebook") else name
        codes = len(shape) == 2
        base = name.removesuffix(".weight")
        entries |= quantized(shape[0], shape[1], base, bits=8) if codes else {name: (dtype, shape)}
    write_sparse(drafter / "model.safetensors", entries)
    assert (drafter / "model.safetensors").stat().st_size == 2_044_950_184, "as published"
    block = {"bits": 8, "group_size": 64, "mode": "affine"}
    write_json(drafter / "config.json", QWEN | {"quantization": block})
    manifest = {
        "source_repository": "incoai/Qwen3.8-27B-DFlash2",
        "source_revision": DRAFTER_REVISION,
        "source_sha256": "67fc76d68dc5a9415511a4f394ef744d67510cd20e93b37cc2cc7d28e4bab65c",
        "reference_implementation": "x",
        "format": "MLX affine Q8 group64",
        "conversion": "x",
        "bytes": 2_044_950_184,
        "sha256": "cc3b5742f8edf02c4edcc734ef66e7c4c5f660b43438641ee36c5a72f8414188",
        "tensors": 179,
    }
    write_json(drafter / "source-repository.json", manifest)
    config = "drafter config.json sha256"
    assert failed(inspect_pair(qwen, drafter)).keys() == {config}
    for field, name in (("sha256", "sha256"), ("source_sha256", "source sha256")):
        write_json(drafter / "source-repository.json", manifest | {field: "0" * 64})
        assert failed(inspect_pair(qwen, drafter)).keys() == {config, f"drafter {name}"}
    assert check_pair(qwen, drafter, allow_revision_mismatch=True)


# Records of one's own


def test_a_pair_of_ones_own_carries_its_record(demo: tuple[Path, Path]) -> None:
    target, drafter = demo
    values = read_json(drafter / "config.json")
    trained = values["rms_norm_eps"]
    values["rms_norm_eps"] = 1e-5
    write_json(drafter / "config.json", values)
    message = refusal_of(target, drafter)
    assert f"rms_norm_eps = 1e-05, but the record of demo has {trained}" in message
    assert message.endswith("give a pair that you trained a pair.json of its own.")
    write_pair_record(drafter / "pair.json", "mine", target, drafter)
    assert not check_pair(target, drafter).mismatches
    values["rms_norm_eps"] = trained
    write_json(drafter / "config.json", values)
    assert "but the record of mine has 1e-05" in refusal_of(target, drafter)


def test_a_conversion_inside_its_source_has_the_record_of_the_source(
    demo: tuple[Path, Path],
) -> None:
    target, drafter = demo
    shutil.copy(demo_pair.DRAFTER / "model.safetensors", drafter)
    write_pair_record(drafter / "pair.json", "mine", target, drafter)
    made = drafter / "lse-q8g64"
    convert(drafter, made, "drafter", "unknown")
    assert not check_pair(target, made).mismatches
    values = read_json(made / "config.json")
    values["max_position_embeddings"] += 1
    write_json(made / "config.json", values)
    assert "max_position_embeddings = " in refusal_of(target, made)


def test_the_record_that_ships_is_what_the_shipped_files_say() -> None:
    shipped = read_json(demo_pair.TARGET.parent / "pair.json")
    told = pair_record_of("demo", demo_pair.TARGET, demo_pair.DRAFTER, ("demo",))
    assert shipped == told, "run scripts/write_pair_record.py after training the demo pair again"
    # And by the files themselves, with nothing of the package in between.
    config = read_json(demo_pair.TARGET / "config.json")["text_config"]
    for field in ("hidden_size", "num_hidden_layers", "vocab_size"):
        assert shipped["target"][field] == config[field]
    assert shipped["drafter"]["config"] == read_json(demo_pair.DRAFTER / "config.json")
    assert shipped["drafter"]["bytes"] == (demo_pair.DRAFTER / "model.safetensors").stat().st_size


@pytest.mark.parametrize("name", ["", "Mine", "a pair", "../x"])
def test_a_name_that_is_none_is_refused(name: str, demo: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match="name"):
        pair_record_of(name, *demo)


@pytest.mark.parametrize("text", ["", "[]", '{"name": "x"}'])
def test_a_damaged_record_is_one_sentence(demo: tuple[Path, Path], text: str) -> None:
    (demo[1] / "pair.json").write_text(text)
    message = refusal_of(*demo)
    assert "pair.json" in message
    assert "install" not in message, "it is no file of the package"
    assert message.startswith(f"{demo[1]}/pair.json ")
