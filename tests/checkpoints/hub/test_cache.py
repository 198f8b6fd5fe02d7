"""The cache: silent when it has everything, and told when something is wrong with it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import get_cached_repo_tree

from lse_mlx.checkpoints.hub.cache import Cached, HubCache, Wanted
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.errors import CheckpointError
from tests.checkpoints.hub.fake_hub import COMMIT, FIRST, REPOSITORY, SECOND
from tests.checkpoints.hub.fetcher import Client, is_served

NOWHERE = "http://127.0.0.1:9"


def test_what_is_whole_needs_no_connection(client: Client) -> None:
    folder = client.folder()
    asked = len(client.hub.requests)
    assert client.folder() == folder
    assert Path(client.fetch({"endpoint": NOWHERE})["folder"]) == folder
    assert Path(client.fetch({"offline": True})["folder"]) == folder
    assert Path(client.fetch(revision=COMMIT)["folder"]) == folder
    assert len(client.hub.requests) == asked
    # This process has HF_HUB_OFFLINE set.
    assert Hub(cache_dir=client.cache).fetch_all([Wanted(REPOSITORY)]) == [folder]


def test_a_cache_without_the_hubs_list_is_judged_by_itself(client: Client) -> None:
    folder = client.folder()
    shutil.rmtree(client.cache / "models--org--tiny" / "trees")
    assert client.here(tokenizer=True) == Cached(
        folder, "", sum(path.stat().st_size for path in folder.iterdir())
    )
    (folder / "tokenizer.json").unlink()
    assert client.here().whole
    assert not client.here(tokenizer=True).whole


@pytest.mark.parametrize(
    "kept",
    [
        b"[]",
        b"null",
        b"{}",
        b"[" * 100_000,
        b"\xff",
        b'{"format_version": 1, "files": []}',
        b'{"format_version": 1, "files": {"config.json": 5}}',
        b'{"format_version": 1, "files": {"config.json": {"size": "abc"}}}',
        b'{"format_version": 2, "files": {"config.json": {"size": 1}}}',
    ],
    ids=lambda kept: repr(kept[:50]),
)
def test_a_kept_list_that_is_none_is_as_no_list(client: Client, kept: bytes) -> None:
    folder = client.folder()
    path = client.cache / "models--org--tiny/trees" / f"{COMMIT}.json"
    path.write_bytes(kept)
    assert client.here(tokenizer=True).whole
    (folder / FIRST).unlink()
    assert not client.here().whole
    assert is_served(client.hub, client.folder())
    (folder / "tokenizer.json").unlink()
    assert "lacks tokenizer.json" in client.here().fault  # by the list, which was made anew


def test_huggingface_hub_knows_the_list_that_is_kept(client: Client) -> None:
    client.folder()
    listed = get_cached_repo_tree(REPOSITORY, revision=COMMIT, cache_dir=client.cache)
    assert {file.path: file.size for file in listed} == {
        name: len(content) for name, content in client.hub.files.items()
    }


def delete_shard(folder: Path) -> None:
    (folder / FIRST).unlink()


def delete_blob(folder: Path) -> None:
    (folder / FIRST).resolve().unlink()


def cut_shard_by_a_byte(folder: Path) -> None:
    blob = (folder / FIRST).resolve()
    blob.write_bytes(blob.read_bytes()[:-1])


def empty_shard(folder: Path) -> None:
    (folder / FIRST).resolve().write_bytes(b"")


def spoil_header(folder: Path) -> None:
    blob = (folder / FIRST).resolve()
    blob.write_bytes(b"\xff" * len(blob.read_bytes()))


def empty_config(folder: Path) -> None:
    (folder / "config.json").resolve().write_bytes(b"")


def delete_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (delete_shard, FIRST),
        (delete_blob, FIRST),
        (cut_shard_by_a_byte, FIRST),
        (empty_shard, FIRST),
        (spoil_header, FIRST),
        (empty_config, "config.json"),
        (delete_index, "model.safetensors.index.json"),
    ],
)
def test_what_is_damaged_is_named_offline_and_fetched_again(
    client: Client, damage: Any, named: str
) -> None:
    folder = client.folder()
    damage(folder)
    refused = client.error({"offline": True})
    assert named in refused
    assert "lse-mlx pull org/tiny" in refused
    assert client.error({"endpoint": NOWHERE}).startswith("The hub cannot be reached")
    client.hub.requests.clear()
    assert client.folder() == folder
    assert is_served(client.hub, folder)
    other = client.hub.asked("GET", SECOND)
    assert not other


def test_offline_without_a_cache_names_the_command(client: Client) -> None:
    said = "org/tiny is not in the cache, and nothing is to be downloaded: run `lse-mlx pull org/tiny` once"
    assert client.error({"offline": True}).startswith(said)
    assert not client.hub.requests
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set: run `lse-mlx pull org/tiny`"):
        Hub(cache_dir=client.cache).fetch_all([Wanted(REPOSITORY)])


def written(folder: Path) -> dict[Path, tuple[int, int]]:
    """Everything in `folder` with what a write would change."""
    return {
        path: (path.lstat().st_ino, path.lstat().st_mtime_ns)
        for path in (folder, *folder.rglob("*"))
    }


def test_a_read_only_cache_is_enough_when_all_is_there(client: Client) -> None:
    folder = client.folder()
    paths = [client.cache, *client.cache.rglob("*")]
    for path in paths:
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        before = written(client.cache)
        assert client.folder() == folder
        assert Path(client.fetch({"endpoint": NOWHERE})["folder"]) == folder
        assert Path(client.fetch(refresh=True)["folder"]) == folder
        assert written(client.cache) == before  # who may write anywhere is held to it too
    finally:
        for path in paths:
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_cache_behind_a_link_works(client: Client, tmp_path: Path) -> None:
    client.folder()
    (tmp_path / "other volume").symlink_to(client.cache)
    found = HubCache(tmp_path / "other volume").state(Wanted(REPOSITORY))
    assert found.whole and found.folder is not None
    assert is_served(client.hub, found.folder)


def test_a_fault_is_told_without_what_a_terminal_obeys(client: Client) -> None:
    folder = client.folder()
    shutil.rmtree(client.cache / "models--org--tiny" / "trees")
    (folder / "model\x1b[2J\n.safetensors").write_bytes(b"")
    assert "model\\x1b[2J\\n.safetensors is empty" in client.error({"offline": True})


def test_the_command_that_brings_it_is_the_one_it_carries(tmp_path: Path) -> None:
    for wanted, command in (
        (Wanted(REPOSITORY), "lse-mlx pull org/tiny"),
        (Wanted(REPOSITORY, "v1"), "lse-mlx pull org/tiny@v1"),
        (Wanted(REPOSITORY, "v1", pull_name="a-pair"), "lse-mlx pull a-pair"),
    ):
        with pytest.raises(CheckpointError, match=f"run `{command}` once"):
            Hub(offline=True, cache_dir=tmp_path).fetch_all([wanted])
