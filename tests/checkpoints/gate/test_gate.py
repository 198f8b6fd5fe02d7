"""The gate accepts what belongs together, and says of everything else what does not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.conversion.convert import convert
from lse_mlx.checkpoints.gate.gate import check_pair, inspect_pair
from tests.checkpoints.gate.sparse_checkpoints import (
    DRAFTER_REVISION,
    GLM,
    OTHER,
    QWEN,
    ROWS,
    TARGET_REVISION,
    drafter_config,
    failed,
    read_entries,
    read_json,
    records_with,
    refusal_of,
    save_drafter,
    save_qwen_target,
    save_tokenizer,
    snapshot,
    write_json,
)
from tests.tiny_models import KINDS, save_checkpoint
from tests.tiny_models import save_tokenizer as save_tiny_tokenizer

# What is accepted


def test_the_demo_pair_is_accepted_where_it_lies_and_anywhere_else(demo: tuple[Path, Path]) -> None:
    for pair in ((demo_pair.TARGET, demo_pair.DRAFTER), demo):
        report = check_pair(*pair)
        assert not report.mismatches
        assert not report.notes
        held = {check.field for check in report.checks}
        assert held >= {"hidden_size", "tokenizer_sha256", "embedding", "output head"}
        assert sum(field.startswith("tensor ") for field in held) == len(
            read_entries(demo_pair.DRAFTER / "model.safetensors")
        )


def test_the_demo_target_is_told_by_its_content_under_any_name(
    demo: tuple[Path, Path], tmp_path: Path
) -> None:
    place = snapshot(tmp_path, "somebody/copy", OTHER)
    place.rmdir()
    demo[0].rename(place)
    report = check_pair(place, demo[1])
    assert report.notes == (
        f"The target somebody/copy@{OTHER} is told by its content to be that of demo.",
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_a_conversion_of_the_demo_drafter_is_accepted(tmp_path: Path, bits: int) -> None:
    convert(demo_pair.DRAFTER, tmp_path / "made", "drafter", "unknown", bits=bits)
    report = check_pair(demo_pair.TARGET, tmp_path / "made")
    assert not report.mismatches
    *_, said = (check for check in report.checks if check.field == "quantization")
    matrices = [e for e in read_entries(demo_pair.DRAFTER / "model.safetensors").values()
                if len(e[1]) == 2]  # fmt: skip
    assert str(said.target) == f"{len(matrices)} tensors of codes"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_target_is_read_as_it_is_stored(tmp_path: Path, kind: str) -> None:
    target = save_tiny_tokenizer(save_checkpoint(tmp_path / kind, kind))
    layers = 3 if kind == "qwen3" else 5
    config = drafter_config(64, 96, 97, layers, [1, 2], 95) | {"num_hidden_layers": 5}
    report = inspect_pair(target, save_drafter(tmp_path / "drafter", config))
    held = {check.field: check for check in report.checks}
    for field in ("embedding", "output head"):
        assert held[field].target == [97, 64], field
        assert held[field].holds
    assert held["stored target layers"].target == layers


def test_the_real_pair_is_accepted_by_what_it_says_of_itself(tmp_path: Path) -> None:
    target = save_qwen_target(tmp_path / "target", text=248044)
    drafter = save_drafter(tmp_path / "drafter", QWEN)
    assert (drafter / "model.safetensors").stat().st_size == 3_848_817_896, "as published"
    assert len(read_entries(drafter / "model.safetensors")) == 81
    report = check_pair(target, drafter)
    assert report.notes == (
        "No record names this pair: only what the two checkpoints say was compared.",
    )


def test_the_real_pair_is_accepted_from_the_hubs_cache(tmp_path: Path) -> None:
    target = save_qwen_target(
        snapshot(tmp_path, "mlx-community/Qwen3.8-27B-4bit", TARGET_REVISION), 1
    )
    drafter = save_drafter(snapshot(tmp_path, "incoai/Qwen3.8-27B-DFlash2", DRAFTER_REVISION), QWEN)
    report = check_pair(target, drafter, records=records_with(QWEN))
    assert report.notes == (
        "The target's tokenizer could not be compared: the record of qwen3.8-27b has none.",
    )
    held = {check.field for check in report.checks}
    assert held >= {"target", "target revision", "drafter revision"}


# What is refused


def test_the_glm_drafter_is_refused_on_the_qwen_target(tmp_path: Path, qwen: Path) -> None:
    drafter = save_drafter(tmp_path / "drafter", GLM)
    message = refusal_of(qwen, drafter)
    for words in (
        "hidden_size = 4096, but the target has 5120",
        "vocab_size = 154880, but the target has 248320",
        "num_target_layers = 45, but the target has 64",
        "embedding = [154880, 4096], but the target stores [248320, 5120]",
    ):
        assert words in message
    found = failed(inspect_pair(qwen, drafter))
    assert found["stored target layers"] == (45, 64)
    assert f"; and {len(found) - 5} more): use the drafter that was made for it." in message
    assert str(drafter) in message
    assert str(qwen) in message


def test_a_field_is_named_once_though_the_record_says_the_same(tmp_path: Path) -> None:
    target = save_qwen_target(tmp_path / "Qwen3.8-27B-4bit", 1)
    report = inspect_pair(target, save_drafter(tmp_path / "drafter", GLM))
    fields = [check.field for check in report.mismatches]
    assert len(fields) == len(set(fields))
    assert {"hidden_size", "vocab_size", "num_target_layers", "intermediate_size"} <= set(fields)


def test_a_drafter_from_its_repository_is_held_to_its_own_record(
    tmp_path: Path, qwen: Path
) -> None:
    """Geometry and all would fit, but this release was made for another target."""
    revision = "bf582e4eacc1810f76656d1811693ff6c6737d2a"
    drafter = snapshot(tmp_path, "incoai/GLM-5.3-Flash-DFlash2", revision)
    found = failed(inspect_pair(qwen, save_drafter(drafter, QWEN)))
    assert found["hidden_size"] == (5120, 4096)
    assert found["recorded vocab_size"] == (154880, 248320)
    assert found["recorded num_target_layers"] == (45, 64)


def test_a_target_of_another_name_is_refused(tmp_path: Path) -> None:
    """Qwen3.6-27B has the dimensions of Qwen3.8-27B."""
    target = save_qwen_target(snapshot(tmp_path, "mlx-community/Qwen3.6-27B-4bit", OTHER), 1)
    drafter = snapshot(tmp_path, "incoai/Qwen3.8-27B-DFlash2", DRAFTER_REVISION)
    found = failed(inspect_pair(target, save_drafter(drafter, QWEN), records_with(QWEN)))
    assert found.keys() == {"target"}
    assert "qwen3.8-27b-4bit" in str(found["target"][0])
    assert found["target"][1] == "mlx-community/Qwen3.6-27B-4bit"


def test_what_the_record_says_of_the_drafter_is_held_too(tmp_path: Path) -> None:
    target = save_qwen_target(tmp_path / "Qwen3.8-27B-4bit", 1)
    values = json.loads(json.dumps(QWEN))
    values["rope_parameters"]["rope_theta"] = 1000000
    values["sliding_window"] = 4096
    values["an_unknown_field"] = 1  # only the hash of all could tell, and here it holds
    records = records_with(values)
    found = failed(inspect_pair(target, save_drafter(tmp_path / "drafter", values), records))
    assert found == {
        "rope_parameters.rope_theta": (1000000, 10000000),
        "sliding_window": (4096, 2048),
    }


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"mask_token_id": 999}, "mask_token_id", "the text 't999' there"),
        ({"mask_token_id": 0}, "mask_token_id", "the text 't0' there"),
        ({"target_layer_ids": [5, 19, 33, 47, 64]}, "target_layer_ids", "0..63"),
        ({"target_layer_ids": [-1, 19, 33, 47, 61]}, "target_layer_ids", "0..63"),
    ],
)
def test_mask_in_the_text_and_taps_beyond_the_depth(
    tmp_path: Path, qwen: Path, changes: dict[str, Any], field: str, words: str
) -> None:
    values = QWEN | {"dflash_config": QWEN["dflash_config"] | changes}
    message = refusal_of(qwen, save_drafter(tmp_path / "drafter", values))
    assert f"dflash_config.{field} = {changes[field]}" in message
    assert words in message


def test_a_mask_beyond_all_tokens_is_no_text(tmp_path: Path, qwen: Path) -> None:
    values = QWEN | {"dflash_config": QWEN["dflash_config"] | {"mask_token_id": 248319}}
    assert check_pair(qwen, save_drafter(tmp_path / "drafter", values))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(demo: tuple[Path, Path]) -> None:
    target, drafter = demo
    save_tokenizer(target, ROWS, ["<|one too many|>"])
    found = failed(inspect_pair(target, drafter))
    assert [str(side) for side in found["vocabulary"]] == [
        f"{ROWS} rows",
        f"token ids up to {ROWS}",
    ]


# The tokenizer


def changed_tokenizer(folder: Path, before: str, after: str) -> None:
    """Put another token in the place of one, in the vocabulary and the added tokens."""
    held = read_json(folder / "tokenizer.json")
    for entry in held["added_tokens"]:
        entry["content"] = after if entry["content"] == before else entry["content"]
    vocabulary = held["model"]["vocab"]
    held["model"]["vocab"] = {after if t == before else t: i for t, i in vocabulary.items()}
    write_json(folder / "tokenizer.json", held)


def test_a_drafter_with_the_targets_tokenizer_is_accepted(demo: tuple[Path, Path]) -> None:
    target, drafter = demo
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, drafter / name)
    report = check_pair(target, drafter)
    assert any(check.field == "tokenizer" for check in report.checks)


@pytest.mark.parametrize("token", ["<|mask|>", "<|im_start|>", "!"])
def test_a_drafter_whose_tokenizer_differs_by_one_token_is_refused(
    demo: tuple[Path, Path], token: str
) -> None:
    target, drafter = demo
    shutil.copy(target / "tokenizer.json", drafter / "tokenizer.json")
    changed_tokenizer(drafter, token, "<|another|>")
    found = failed(inspect_pair(target, drafter))
    assert found.keys() == {"tokenizer"}
    mine, theirs = map(str, found["tokenizer"])
    assert "'<|another|>'" in mine
    assert repr(token) in theirs
    assert mine.split("=")[0] == theirs.split("=")[0], "the same id"


@pytest.mark.parametrize("role", ["bos_token", "eos_token", "pad_token", "unk_token"])
def test_a_token_in_another_role_is_refused(demo: tuple[Path, Path], role: str) -> None:
    target, drafter = demo
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, drafter / name)
    about = read_json(target / "tokenizer_config.json")
    trained = about.get(role)
    write_json(drafter / "tokenizer_config.json", about | {role: "!"})
    found = failed(inspect_pair(target, drafter))
    assert found == {"tokenizer": (f"{role} = '!'", f"{role} = {trained!r}")}
    write_json(target / "tokenizer_config.json", about | {role: "!"})
    assert failed(inspect_pair(target, drafter)).keys() == {"tokenizer_sha256"}, "of the record"


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.txt"])
def test_a_tokenizer_that_is_not_read_is_noted(demo: tuple[Path, Path], name: str) -> None:
    target, drafter = demo
    (drafter / name).write_text("x")
    assert check_pair(target, drafter).notes == (
        f"The drafter's {name} could not be compared: only tokenizer.json is read.",
    )
    shutil.copy(target / "tokenizer.json", drafter / "tokenizer.json")
    assert not check_pair(target, drafter).notes


@pytest.mark.parametrize("token", ["<|mask|>", "<|im_end|>", "!"])
def test_a_target_whose_tokenizer_differs_from_the_record_is_refused(
    demo: tuple[Path, Path], token: str
) -> None:
    changed_tokenizer(demo[0], token, "<|another|>")
    assert failed(inspect_pair(*demo)).keys() == {"tokenizer_sha256"}
