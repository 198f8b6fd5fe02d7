"""What a folder says of itself proves nothing: records, manifests and names that lie."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.conversion.convert import convert
from lse_mlx.checkpoints.gate.gate import check_pair, inspect_pair
from lse_mlx.checkpoints.gate.known_pair import find_pair
from lse_mlx.checkpoints.gate.pair_record import write_pair_record
from lse_mlx.checkpoints.gate.target_facts import read_target
from lse_mlx.checkpoints.gate.tokenizer_identity import read_tokenizer
from lse_mlx.checkpoints.origin import Origin, find_origin
from lse_mlx.checkpoints.pairing import registered
from tests.checkpoints.gate.sparse_checkpoints import (
    DRAFTER_REVISION,
    OTHER,
    QWEN,
    TARGET_REVISION,
    Entries,
    drafter_entries,
    failed,
    hollow,
    quantized,
    read_json,
    records_with,
    refusal_of,
    save_drafter,
    save_qwen_target,
    snapshot,
    write_json,
    write_sparse,
)

TARGET = "mlx-community/Qwen3.8-27B-4bit"
DRAFTER = "incoai/Qwen3.8-27B-DFlash2"
SHA256 = "67fc76d68dc5a9415511a4f394ef744d67510cd20e93b37cc2cc7d28e4bab65c"
Q8_SHA256 = "cc3b5742f8edf02c4edcc734ef66e7c4c5f660b43438641ee36c5a72f8414188"
Q8_BYTES = 2_044_950_184
BLOCK = {"bits": 8, "group_size": 64, "mode": "affine"}
MANIFEST = {
    "source_repository": DRAFTER,
    "source_revision": DRAFTER_REVISION,
    "source_sha256": SHA256,
    "reference_implementation": "x",
    "format": "MLX affine Q8 group64",
    "conversion": "x",
    "bytes": Q8_BYTES,
    "sha256": Q8_SHA256,
    "tensors": 179,
}
CLAIMS = "Of the weights in {} only their source-repository.json says what they are."


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen_target(snapshot(tmp_path_factory.mktemp("hub"), TARGET, TARGET_REVISION), 1)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The registered drafter as the hub's cache has it; its config.json is the tests' own."""
    return save_drafter(snapshot(tmp_path, DRAFTER, DRAFTER_REVISION), QWEN)


def save_converted(folder: Path, manifest: dict[str, Any] | None = MANIFEST) -> Path:
    """The conversion of the registered drafter to 8 bits, whose weights are a hole."""
    entries: Entries = {}
    for name, (dtype, shape) in drafter_entries(5120, 17408, 248320, 5).items():
        name = f"{name}.weight" if name.endswith("codebook") else name
        base = name.removesuffix(".weight")
        codes = len(shape) == 2
        entries |= quantized(shape[0], shape[1], base, 8) if codes else {name: (dtype, shape)}
    write_sparse(folder / "model.safetensors", entries)
    text = json.dumps(QWEN | {"quantization": BLOCK}, indent=2) + "\n"
    (folder / "config.json").write_text(text, "ascii")
    if manifest is not None:
        write_json(folder / "source-repository.json", manifest)
    return folder


def own_record(name: str, target: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A record of the target with a drafter of this config.json."""
    geometry = {"hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248320}
    return {
        "name": name,
        "targets": ["*qwen3.8-27b*"],
        "target": geometry | {"tokenizer_sha256": read_tokenizer(target).sha256},
        "drafter": {"config": config},
    }


def put_into_blobs(folder: Path, name: str) -> None:
    """Move the weights in a snapshot to where the hub's cache has them under their hash."""
    weights, blob = folder / "model.safetensors", folder.parents[1] / "blobs" / name
    blob.parent.mkdir(exist_ok=True)
    weights.rename(blob)
    weights.symlink_to(os.path.relpath(blob, folder))


# A pair.json that came along


@pytest.mark.parametrize("place", ["published", "its conversion", "another cache place"])
def test_a_registered_drafter_cannot_bring_a_record_of_its_own(
    tmp_path: Path, target: Path, published: Path, place: str
) -> None:
    values = QWEN | {"sliding_window": 4096}
    record = own_record("qwen3.8-27b", target, values)
    write_json(published / "pair.json", record)
    drafter = published
    if place == "published":
        write_json(drafter / "config.json", values)
    else:
        inside = place == "its conversion"
        drafter = save_converted(published / "lse-q8g64" if inside else tmp_path / "cache" / "q8")
        text = json.dumps(values | {"quantization": BLOCK}, indent=2) + "\n"
        (drafter / "config.json").write_text(text, "ascii")
        write_json(drafter.parent / "pair.json", record)
    report = inspect_pair(target, drafter, records_with(values))
    assert failed(report) == {"sliding_window": (4096, 2048)}
    path = (drafter if place == "published" else drafter.parent) / "pair.json"
    assert f"{path} does not count, as {DRAFTER} is registered." in report.notes


def test_a_damaged_record_beside_a_registered_drafter_is_not_read(
    target: Path, published: Path
) -> None:
    (published / "pair.json").write_text("{")
    assert check_pair(target, published, records=records_with(QWEN))


def test_a_drafter_of_ones_own_for_a_registered_target_brings_its_record(
    tmp_path: Path, target: Path
) -> None:
    values = QWEN | {"sliding_window": 4096}
    for drafter in (tmp_path / "mine", snapshot(tmp_path, "me/drafter", "b" * 40)):
        save_drafter(drafter, values)
        assert failed(inspect_pair(target, drafter)), "it is not the registered one"
        write_json(drafter / "pair.json", own_record("mine", target, values))
        report = check_pair(target, drafter)
        assert report.notes == (
            f"The record of mine is {drafter}/pair.json, which came with the drafter.",
        )


def test_a_drafter_for_a_target_that_nobody_registered_needs_no_record(tmp_path: Path) -> None:
    target = save_qwen_target(snapshot(tmp_path, "org/Other-27B", OTHER), 1)
    drafter = save_drafter(snapshot(tmp_path, "me/drafter", OTHER), QWEN)
    assert check_pair(target, drafter).notes == (
        "No record names this pair: only what the two checkpoints say was compared.",
    )


@pytest.mark.parametrize("place", ["beside", "hub's cache", "user cache"])
def test_conversions_of_the_demo_drafter_are_accepted_in_any_place(
    tmp_path: Path, place: str
) -> None:
    source = tmp_path / "drafter"
    if place == "hub's cache":
        source = snapshot(tmp_path, "somebody/copy", OTHER)
        source.rmdir()
    shutil.copytree(demo_pair.DRAFTER, source)
    made = tmp_path / "cache" / "copy-q8g64" if place == "user cache" else source / "lse-q8g64"
    made.parent.mkdir(exist_ok=True)
    origin = find_origin(source)
    convert(source, made, origin.repository, origin.revision)
    for target in (demo_pair.TARGET, hollow(demo_pair.TARGET, tmp_path / "target")):
        for drafter in (source, made):
            report = check_pair(target, drafter)
            assert "tokenizer_sha256" in {check.field for check in report.checks}
            assert report.notes == ((CLAIMS.format(made),) if drafter == made else ())


def test_a_trained_pair_is_accepted_with_its_conversion_inside(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(demo_pair.DRAFTER, drafter)
    write_json(drafter / "config.json", read_json(drafter / "config.json") | {"rms_norm_eps": 1e-5})
    assert "rms_norm_eps = " in refusal_of(demo_pair.TARGET, drafter)
    write_pair_record(drafter / "pair.json", "mine", demo_pair.TARGET, drafter)
    convert(drafter, drafter / "lse-q8g64", "drafter", "unknown")
    for place in (drafter, drafter / "lse-q8g64"):
        assert check_pair(demo_pair.TARGET, place).notes[0] == (
            f"The record of mine is {drafter}/pair.json, which came with the drafter."
        )


# A manifest beside other weights


def test_the_conversion_of_the_registered_drafter_is_accepted(
    tmp_path: Path, target: Path, published: Path
) -> None:
    for place in (published / "lse-q8g64", tmp_path / "cache" / "q8"):
        report = check_pair(target, save_converted(place), records=records_with(QWEN))
        assert CLAIMS.format(place) in report.notes
        held = {check.field for check in report.checks}
        assert held >= {"drafter revision", "drafter sha256", "drafter source sha256"}


@pytest.mark.parametrize("manifest", [MANIFEST, None])
def test_the_name_of_a_blob_counts_before_what_a_manifest_says(
    tmp_path: Path, target: Path, manifest: dict[str, Any] | None
) -> None:
    for digest in (Q8_SHA256, "f" * 64):
        drafter = snapshot(tmp_path, "me/conversion", digest[:40])
        put_into_blobs(save_converted(drafter, manifest), digest)
        report = inspect_pair(target, drafter, records_with(QWEN))
        expected = {"drafter repository": ("me/conversion", DRAFTER)}
        if digest != Q8_SHA256:
            expected["drafter sha256"] = (digest, Q8_SHA256)
        assert failed(report) == expected
        assert CLAIMS.format(drafter) not in report.notes


def test_a_snapshot_is_of_the_repository_that_it_came_from(tmp_path: Path) -> None:
    """Whatever the files say that were downloaded with it."""
    folder = snapshot(tmp_path, "evil/drafter", OTHER)
    write_json(folder / "source-repository.json", MANIFEST)
    write_json(folder / "hf-origin.json", {"repository": DRAFTER, "revision": DRAFTER_REVISION})
    assert find_origin(folder) == Origin("evil/drafter", OTHER, known=True)
    write_json(folder / "lse-q8g64" / "source-repository.json", MANIFEST)
    assert find_origin(folder / "lse-q8g64") == Origin(DRAFTER, DRAFTER_REVISION, known=True)


def test_a_manifest_of_weights_of_another_size_is_refused(tmp_path: Path, target: Path) -> None:
    drafter = save_converted(tmp_path / "q8", MANIFEST | {"bytes": Q8_BYTES - 8})
    report = inspect_pair(target, drafter, records_with(QWEN))
    assert failed(report) == {"drafter bytes": (Q8_BYTES, Q8_BYTES - 8)}
    assert not report.accepts(allow_revision_mismatch=True)


def test_a_file_with_a_hash_for_a_name_outside_the_cache_proves_nothing(
    tmp_path: Path, target: Path
) -> None:
    drafter = save_converted(tmp_path / "q8")
    (drafter / "model.safetensors").rename(tmp_path / SHA256)
    (drafter / "model.safetensors").symlink_to(tmp_path / SHA256)
    report = check_pair(target, drafter, records=records_with(QWEN))
    assert CLAIMS.format(drafter) in report.notes


# What a record does not list


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-2},
        {"a_new_field": 1},
        {"max_position_embeddings": 4096},
        {"dflash_config": QWEN["dflash_config"] | {"mask_token_id": 248071}},
        {"dflash_config": QWEN["dflash_config"] | {"a_new_field": False}},
    ],
    ids=lambda changes: str(*changes),
)
def test_no_field_of_the_registered_drafter_is_open(
    target: Path, published: Path, changes: dict[str, Any]
) -> None:
    """In bf16, as it is published; in 8 bits config.json itself has the recorded hash."""
    field = "drafter config.json sha256 once converted"
    assert check_pair(target, published, records=records_with(QWEN))
    write_json(published / "config.json", QWEN | changes)
    found = inspect_pair(target, published, records_with(QWEN)).mismatches
    assert [(one.field, one.kind) for one in found] == [(field, "revision")]
    recorded = "411ffd1c02c210843385cd9eb5784554d0c982c8878669083c5e58258073a65d"
    assert failed(inspect_pair(target, published))[field][1] == recorded, "as shipped"


def test_the_text_of_a_config_is_free(tmp_path: Path, target: Path) -> None:
    """A conversion writes its own, so line ends and how a number is written do not count."""
    drafter = save_drafter(tmp_path / "Qwen3.8-27B-DFlash2", QWEN)
    text = json.dumps(QWEN, indent=8).replace("1e-06", "0.000001").replace("\n", "\r\n")
    assert "0.000001" in text
    (drafter / "config.json").write_text(text)
    assert check_pair(target, drafter, records=records_with(QWEN))


# Work that is not done


def test_a_tokenizer_is_hashed_only_where_the_geometry_fits(tmp_path: Path) -> None:
    for folder, hashed in (
        (demo_pair.TARGET, True),
        (save_qwen_target(tmp_path / "some-target", 1), False),
    ):
        facts = read_target(folder)
        find_pair(find_origin(folder), facts, find_origin(tmp_path), tmp_path, {}, registered())
        assert ("sha256" in vars(facts.tokenizer)) == hashed
