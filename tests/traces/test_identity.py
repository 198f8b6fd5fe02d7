"""Revisions name what a checkpoint's files hold, and nothing else."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from lse_mlx.errors import CheckpointError
from lse_mlx.traces.identity import identify
from tests.tiny_models import save_checkpoint, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def test_a_revision_can_be_computed_with_sha256sum(folder: Path) -> None:
    lines = ""
    for name in ("config.json", "model.safetensors"):
        lines += f"{sha256((folder / name).read_bytes()).hexdigest()} {name}\n"
    expected = f"sha256:{sha256(lines.encode()).hexdigest()}"
    assert identify(folder).target_model_revision == expected


def test_a_copy_is_the_same_target(folder: Path, copied: Path) -> None:
    assert identify(copied) == identify(folder)


def test_one_bit_of_the_weights_is_another_target(folder: Path, copied: Path) -> None:
    path = copied / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before, after = identify(folder), identify(copied)
    assert before.target_model_revision != after.target_model_revision
    assert before.tokenizer_revision == after.tokenizer_revision


def test_another_config_is_another_target(folder: Path, copied: Path) -> None:
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"rope_theta": 5.0}))
    assert identify(copied).target_model_revision != identify(folder).target_model_revision


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_another_tokenizer_is_another_tokenizer(name: str, folder: Path, copied: Path) -> None:
    path = copied / name
    path.write_text(path.read_text("utf-8") + " ", "utf-8")
    before, after = identify(folder), identify(copied)
    assert before.target_model_revision == after.target_model_revision
    assert before.tokenizer_revision != after.tokenizer_revision


def test_shards_count_by_their_names(folder: Path, copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "model-00001-of-00001.safetensors")
    assert identify(copied).target_model_revision != identify(folder).target_model_revision


def test_a_folder_without_weights_has_no_identity(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no model"):
        identify(copied)
