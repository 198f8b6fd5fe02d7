"""A folder is a whole checkpoint, or the first file that says otherwise is named."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.complete import check_complete
from lse_mlx.errors import CheckpointError
from tests.checkpoints.hub.fake_hub import checkpoint, safetensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my märchen model"
    path.mkdir()
    for name, content in checkpoint(64).items():
        if "/" not in name and name.endswith((".json", ".safetensors")):
            (path / name).write_bytes(content)
    return path


def refusal(folder: Path, *, tokenizer: bool = True) -> str:
    with pytest.raises(CheckpointError) as refused:
        check_complete(folder, tokenizer=tokenizer)
    said = str(refused.value)
    assert said.endswith(".") and "\n" not in said
    return said


def test_whole_checkpoints_pass(folder: Path, tmp_path: Path) -> None:
    check_complete(folder, tokenizer=True)
    check_complete(demo_pair.TARGET, tokenizer=True)
    check_complete(demo_pair.DRAFTER)
    check_complete(demo_pair.DRAFTER, tokenizer=True)  # a drafter named as a target: said later
    (tmp_path / "link").symlink_to(folder)
    check_complete(tmp_path / "link", tokenizer=True)
    (folder / INDEX).unlink()
    check_complete(folder)


def test_a_single_file_passes_and_so_does_a_linked_one(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a").write_bytes(safetensors(64))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../blobs/a")
    check_complete(snapshot)
    (tmp_path / "blobs" / "a").unlink()
    assert "model.safetensors is a link to a file that is not there" in refusal(snapshot)


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_bytes(b""), "config.json is empty"),
        (lambda f: (f / "config.json").write_bytes(b"{"), "config.json is not JSON"),
        (lambda f: (f / "config.json").write_bytes(b"\xff"), "config.json is not JSON"),
        (lambda f: (f / "config.json").write_bytes(b"[" * 99999), "config.json is not JSON"),
        (lambda f: (f / "config.json").write_bytes(b"[]"), "holds a list"),
        (lambda f: (f / "config.json").write_bytes(POINTER), "config.json is a Git LFS pointer"),
        (lambda f: (f / FIRST).unlink(), f"has no {FIRST}, which is part of it"),
        (lambda f: (f / FIRST).write_bytes(b""), f"{FIRST} is empty"),
        (lambda f: (f / SECOND).write_bytes(POINTER), f"{SECOND} is a Git LFS pointer"),
        (
            lambda f: (f / SECOND).write_bytes(safetensors(64, "b")[:-1]),
            f"{SECOND} is damaged (it is cut short",
        ),
        (
            lambda f: (f / SECOND).write_bytes(safetensors(64, "b") + b"\0"),
            f"{SECOND} is damaged (it is too long",
        ),
        (lambda f: (f / SECOND).write_bytes(safetensors(64, "c")), "does not hold b, which"),
        (lambda f: shutil.copy(f / FIRST, f / SECOND), f"{SECOND} does not hold b, which"),
        (lambda f: (f / "model-x.safetensors").write_bytes(b"x"), "model-x.safetensors is damaged"),
        (lambda f: (f / INDEX).write_bytes(b""), f"{INDEX} is empty"),
        (lambda f: (f / INDEX).write_bytes(b"{}"), 'has no "weight_map"'),
        (lambda f: (f / INDEX).write_bytes(b'{"weight_map": {"a": "../x"}}'), "no file beside it"),
        (lambda f: (f / INDEX).write_bytes(b'{"weight_map": {"a": 5}}'), "no file beside it"),
        (
            lambda f: (f / INDEX).write_bytes(b'{"weight_map": {"a": "a.bin"}}'),
            "only safetensors files are read",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda f: (f / "tokenizer.json").write_bytes(b""), "tokenizer.json is empty"),
        (lambda f: (f / "tokenizer.json").write_bytes(POINTER), "tokenizer.json is a Git LFS"),
        (
            lambda f: (f / "tokenizer.json").rename(f / "vocab.json"),
            "has no merges.txt",
        ),
    ],
)
def test_what_is_missing_or_damaged_is_named(folder: Path, damage: Damage, said: str) -> None:
    damage(folder)
    assert said in refusal(folder)


def test_numbered_shards_without_an_index_must_all_be_there(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / FIRST).unlink()
    assert FIRST in refusal(folder)


def test_a_download_that_broke_off_is_called_so(folder: Path) -> None:
    parts = folder / ".cache" / "huggingface" / "download"
    parts.mkdir(parents=True)
    (parts / "x.incomplete").touch()
    check_complete(folder, tokenizer=True)
    (folder / FIRST).unlink()
    assert f"{FIRST} is missing, its download was interrupted" in refusal(folder)
    for name in (SECOND, INDEX):
        (folder / name).unlink()
    assert "model.safetensors is missing, its download was interrupted" in refusal(folder)


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf", "weights.npz"])
def test_pickled_and_foreign_weights_are_refused_unread(tmp_path: Path, name: str) -> None:
    folder, mark = tmp_path / "folder", tmp_path / "ran"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "run.Model"}}))
    (folder / "run.py").write_text(f"open({str(mark)!r}, 'w')")
    (folder / name).write_bytes(pickle.dumps(Trap(mark)))
    said = refusal(folder)
    assert f"holds its weights as {name}" in said
    assert "model.safetensors" in said
    assert not mark.exists()


def test_a_folder_without_weights_and_no_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "has no weights" in refusal(tmp_path)
    assert "is not a folder" in refusal(tmp_path / "config.json")
    assert "is not a folder" in refusal(tmp_path / "none")
    (tmp_path / "model.safetensors").mkdir()
    assert "is not a file" in refusal(tmp_path)
