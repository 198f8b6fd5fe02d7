"""The hub: whole or refused, resumed where it broke, silent when the cache has everything."""

import errno
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import httpx

from lse_mlx.checkpoints.hub.errors import hub_error
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.errors import CheckpointError
from tests.checkpoints.hub.fake_hub import (
    COMMIT,
    REPOSITORY,
    TOKEN,
    FakeHub,
    Fetcher,
    checkpoint,
    serving,
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NEEDED = {"config.json", "tokenizer.json", "model.safetensors.index.json", FIRST, SECOND}
NOWHERE = "http://127.0.0.1:9"
LARGE = 36_000_000
"""Bytes of a shard that arrives in several pieces of huggingface_hub's 10 MiB."""


@pytest.fixture(scope="module")
def fetcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fetcher]:
    process = Fetcher(tmp_path_factory.mktemp("home"))
    yield process
    process.close()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving(FakeHub(checkpoint())) as running:
        yield running


@dataclass
class Client:
    """Fetches the repository of `hub` into one cache."""

    fetcher: Fetcher
    hub: FakeHub
    cache: Path

    def fetch(self, settings: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
        told = {"endpoint": self.hub.endpoint, "cache_dir": self.cache, **(settings or {})}
        return self.fetcher.fetch(told, **arguments)

    def folder(self) -> Path:
        answer = self.fetch()
        assert "folder" in answer, answer
        return Path(answer["folder"])

    def error(self, settings: dict[str, Any] | None = None, **arguments: Any) -> str:
        answer = self.fetch(settings, **arguments)
        assert "error" in answer, answer
        assert answer["error"].endswith(".") and "\n" not in answer["error"]
        return answer["error"]


@pytest.fixture
def client(fetcher: Fetcher, hub: FakeHub, tmp_path: Path) -> Client:
    return Client(fetcher, hub, tmp_path / "cache")


def is_served(hub: FakeHub, folder: Path) -> bool:
    return {p.name: p.read_bytes() for p in folder.iterdir()} == {
        name: hub.files[name] for name in NEEDED
    }


def test_a_pull_brings_the_needed_files_and_no_other(client: Client) -> None:
    answer = client.fetch()
    assert is_served(client.hub, Path(answer["folder"]))
    assert Path(answer["folder"]).name == COMMIT
    total = len(client.hub.files[FIRST]) + len(client.hub.files[SECOND])
    assert answer["told"][0] == ["download", 0, total]
    assert answer["told"][-1] == ["download", total, total]
    done = [step[1] for step in answer["told"]]
    assert done == sorted(done)
    size = sum(len(client.hub.files[name]) for name in NEEDED)
    assert len(answer["notes"]) == 1
    said = f"Downloading {REPOSITORY}: 5 files, {size} bytes, to {client.cache}, which has "
    assert answer["notes"][0].startswith(said)
    fetched = {path.rsplit("/", 1)[-1] for _, path, _ in client.hub.requests}
    assert not fetched & {"pytorch_model.bin", "modeling_tiny.py"}


def test_the_token_goes_to_the_hub_and_nowhere_else(client: Client) -> None:
    client.folder()
    for path, token in client.hub.tokens:
        assert (token == f"Bearer {TOKEN}") != path.startswith("/cdn/"), path


def test_what_is_whole_needs_no_connection(client: Client) -> None:
    folder = client.folder()
    asked = len(client.hub.requests)
    assert client.folder() == folder
    assert Path(client.fetch({"endpoint": NOWHERE})["folder"]) == folder
    assert Path(client.fetch({"offline": True})["folder"]) == folder
    assert Path(client.fetch(revision=COMMIT)["folder"]) == folder
    assert len(client.hub.requests) == asked
    # This process has HF_HUB_OFFLINE set.
    assert Hub(cache_dir=client.cache).fetch(REPOSITORY) == folder


def test_a_cache_without_the_hubs_list_is_judged_by_itself(client: Client) -> None:
    folder = client.folder()
    shutil.rmtree(client.cache / "models--org--tiny" / "trees")
    assert Hub(cache_dir=client.cache).cached(REPOSITORY, tokenizer=True) == folder
    (folder / "tokenizer.json").unlink()
    assert Hub(cache_dir=client.cache).cached(REPOSITORY) == folder
    assert Hub(cache_dir=client.cache).cached(REPOSITORY, tokenizer=True) is None


def test_a_refresh_follows_the_branch_and_not_a_commit(client: Client) -> None:
    old = client.folder()
    client.hub.commits[REPOSITORY] = "2" * 40
    assert client.folder() == old
    new = Path(client.fetch(refresh=True)["folder"])
    assert new.name == "2" * 40 and is_served(client.hub, new)
    assert client.folder() == new
    assert Path(client.fetch(revision=COMMIT, refresh=True)["folder"]) == old
    shutil.rmtree(old)
    assert client.folder() == new
    # The unchanged files were not sent again.
    assert len(client.hub.asked("GET", FIRST)) == 2  # the hub's redirect and its other host


@pytest.mark.parametrize("percent", [30, 99])
def test_a_killed_download_goes_on_where_it_was(
    fetcher: Fetcher, tmp_path: Path, percent: int
) -> None:
    stop = LARGE * percent // 100
    with serving(FakeHub(checkpoint(LARGE), stall_at={FIRST: stop})) as hub:
        killed = Fetcher(tmp_path / "home")
        settings = {"endpoint": hub.endpoint, "cache_dir": tmp_path / "cache"}
        killed.start(hub=settings, fetch={"repository": REPOSITORY})
        assert hub.stalled.wait(30)
        part = tmp_path / "cache/models--org--tiny/blobs" / f"{hub.etag(FIRST)}.incomplete"
        while not part.exists() or part.stat().st_size < stop - (10 << 20):
            time.sleep(0.01)
        killed.close()
        assert Hub(cache_dir=tmp_path / "cache").cached(REPOSITORY) is None
        with pytest.raises(CheckpointError, match=rf"lacks {FIRST}.*lse-mlx pull org/tiny"):
            Hub(cache_dir=tmp_path / "cache").fetch(REPOSITORY)
        hub.stall_at.clear()
        kept = part.stat().st_size
        assert 0 < kept <= stop
        hub.requests.clear()
        answer = fetcher.fetch(settings)
        assert "folder" in answer, answer
        assert is_served(hub, Path(answer["folder"]))
        assert set(hub.asked("GET", FIRST)) == {f"bytes={kept}-"}
        assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_a_connection_that_breaks_once_is_taken_up_again(fetcher: Fetcher, tmp_path: Path) -> None:
    with serving(FakeHub(checkpoint(LARGE), cut_once={SECOND: LARGE // 2})) as hub:
        client = Client(fetcher, hub, tmp_path)
        assert is_served(hub, client.folder())
        ranges = hub.asked("GET", SECOND)
        assert ranges[0] is None and ranges[-1] is not None


def test_a_refresh_that_breaks_leaves_the_old_commit_in_use(client: Client) -> None:
    old = client.folder()
    client.hub.commits[REPOSITORY] = "2" * 40
    client.hub.files["config.json"] = b'{"model_type": "newer"}'
    client.hub.status["resolve/" + "2" * 40] = (403, {})
    client.error(refresh=True)
    assert client.folder() == old
    assert (old / "config.json").read_bytes() != client.hub.files["config.json"]
    client.hub.status.clear()
    new = Path(client.fetch(refresh=True)["folder"])
    assert is_served(client.hub, new)
    assert client.folder() == new


def test_two_processes_at_once_share_one_download(fetcher: Fetcher, tmp_path: Path) -> None:
    with serving(FakeHub(checkpoint(), stall_at={FIRST: 500})) as hub:
        order: dict[str, Any] = {
            "hub": {"endpoint": hub.endpoint, "cache_dir": tmp_path / "cache"},
            "fetch": {"repository": REPOSITORY},
        }
        other = Fetcher(tmp_path / "home")
        fetcher.start(**order)
        assert hub.stalled.wait(30)
        other.start(**order)
        while hub.requests[-1][1].startswith("/cdn/"):  # until the other has asked for something
            time.sleep(0.01)
        hub.stall_at.clear()
        hub.released.set()
        for process in (fetcher, other):
            assert is_served(hub, Path(process.answer()["folder"]))
        other.close()
        assert len([True for _, path, _ in hub.requests if path == f"/cdn/{SECOND}"]) == 1


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


@pytest.mark.parametrize("name", [FIRST, "config.json"])
@pytest.mark.parametrize("announced", [True, False], ids=["other-etag", "same-etag"])
def test_a_file_that_changed_after_it_was_listed_is_not_taken(
    client: Client, name: str, announced: bool
) -> None:
    content = client.hub.files[name]
    client.hub.served[name] = content[:-1] + bytes([content[-1] ^ 1])
    client.hub.other_names = announced
    assert client.error().startswith(f"{name} of {REPOSITORY} is not what the hub's list says")
    if announced:  # a large file is not even begun
        assert not client.hub.asked("GET", FIRST) or name != FIRST
    assert Hub(cache_dir=client.cache).cached(REPOSITORY) is None
    client.hub.served.clear()
    assert is_served(client.hub, client.folder())


@pytest.mark.parametrize("name", [FIRST, "config.json"])
def test_a_file_that_is_short_is_not_taken(client: Client, name: str) -> None:
    client.hub.served[name] = client.hub.files[name][:-1]
    client.error()
    assert Hub(cache_dir=client.cache).cached(REPOSITORY) is None
    client.hub.served.clear()
    assert is_served(client.hub, client.folder())


def test_offline_without_a_cache_names_the_command(client: Client) -> None:
    said = "org/tiny is not in the cache, and --offline was given: run `lse-mlx pull org/tiny` once"
    assert client.error({"offline": True}).startswith(said)
    assert not client.hub.requests
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set: run `lse-mlx pull org/tiny`"):
        Hub(cache_dir=client.cache).fetch(REPOSITORY)


def test_a_disk_without_room_stops_before_the_first_byte(client: Client) -> None:
    spare = 16 << 20
    total = sum(len(client.hub.files[name]) for name in NEEDED)
    said = client.error({"free": total + spare - 1})
    assert f"{total} bytes to download" in said
    assert str(client.cache) in said
    assert "has 16.8 MB free" in said
    assert not [path for _, path, _ in client.hub.requests if "/resolve/" in path]
    assert not client.cache.exists() or not list(client.cache.rglob("blobs/*"))
    assert is_served(client.hub, Path(client.fetch({"free": total + spare})["folder"]))
    (client.folder() / FIRST).resolve().unlink()
    left = len(client.hub.files[FIRST]) + spare
    client.error({"free": left - 1})
    client.fetch({"free": left})


def test_the_room_for_a_drafters_conversion_is_asked_for_too(client: Client) -> None:
    """The bytes of the 8-bit conversion are those of the reference's documents."""
    repository = "incoai/Qwen3.8-27B-DFlash2"
    client.hub.commits = {repository: COMMIT}
    said = client.error({"free": 2_044_950_184}, repository=repository)
    assert "2.04 GB for the drafter's conversion" in said
    assert "2.06 GB" in said
    assert "folder" in client.fetch({"free": 2_100_000_000}, repository=repository)


def test_a_list_whose_hashes_are_paths_is_refused(client: Client) -> None:
    client.hub.lie["blobId"] = "../../../../evil"
    assert "gives no sizes and hashes" in client.error()
    assert not client.cache.exists()


@pytest.mark.parametrize(
    ("path", "status", "code", "said"),
    [
        (f"resolve/{COMMIT}/config.json", 404, "EntryNotFound", "lacks a file that its list has"),
        (f"resolve/{COMMIT}/", 403, "GatedRepo", "is gated: accept its terms"),
        (f"resolve/{COMMIT}/{FIRST}", 403, "GatedRepo", "is gated: accept its terms"),
        (f"/cdn/{FIRST}", 500, "", "The hub answers HTTP 500"),
        (f"/cdn/{FIRST}", 403, "", "The hub refuses org/tiny"),
    ],
)
def test_one_file_that_fails_is_one_sentence(
    client: Client, path: str, status: int, code: str, said: str
) -> None:
    client.hub.status[path] = (status, {"X-Error-Code": code} if code else {})
    assert said in client.error()
    client.hub.status.clear()
    assert is_served(client.hub, client.folder())


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
    found = Hub(cache_dir=tmp_path / "other volume").fetch(REPOSITORY)
    assert is_served(client.hub, found)


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (401, {}, "(HTTP 401): it may be private or not there"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "HTTP 401"),
        (403, {"X-Error-Code": "GatedRepo"}, "is gated: accept its terms"),
        (403, {}, "The hub refuses org/tiny"),
        (404, {"X-Error-Code": "RepoNotFound"}, "is not on the hub, or is private"),
        (500, {}, "The hub answers HTTP 500 for org/tiny"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    client: Client, status: int, headers: dict[str, str], said: str
) -> None:
    client.hub.status["/api/models/"] = (status, headers)
    assert said in client.error()


def test_a_hub_that_does_not_answer_is_one_sentence(client: Client, tmp_path: Path) -> None:
    client.hub.status["/api/models/"] = (0, {})
    client.fetcher = Fetcher(tmp_path / "home", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert client.error().startswith("The hub did not answer in time for org/tiny")
    client.fetcher.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "The disk is full while org/tiny"),
        (PermissionError(errno.EACCES, "denied", "/a/b"), "org/tiny cannot be written to /a/b"),
        (OSError(errno.EROFS, "Read-only"), "org/tiny cannot be written to the Hugging Face cache"),
        (httpx.RemoteProtocolError("peer left"), "The connection broke while org/tiny"),
        (httpx.ReadTimeout("slow"), "The hub did not answer in time for org/tiny"),
        (httpx.ProxyError("no"), "org/tiny cannot be downloaded through the proxy"),
        (OSError("Consistency check failed: 1 of 2"), "org/tiny could not be downloaded (Consist"),
    ],
)
def test_what_breaks_on_the_way_is_one_sentence(fault: Exception, said: str) -> None:
    text = str(hub_error(fault, "org/tiny"))
    assert text.startswith(said)
    assert text.endswith(".") and "\n" not in text


def test_the_cause_behind_a_wrapped_fault_is_told() -> None:
    wrapped = OSError("cannot find the file in the cache")
    wrapped.__cause__ = httpx.ConnectError("refused")
    assert str(hub_error(wrapped, "org/tiny")).startswith("The hub cannot be reached for org/tiny")


def test_an_unknown_revision_and_an_unreachable_hub_are_one_sentence(client: Client) -> None:
    assert "has no such revision" in client.error(revision="v9")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert "cannot be reached" in client.error({"endpoint": f"http://127.0.0.1:{port}"})
    assert "is not on the hub" in client.error(repository="org/other")
    assert "is no name of a repository" in client.error(repository="org//other--x")


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (("config.json", "pytorch_model.bin"), "no model.safetensors but pytorch_model.bin"),
        (("config.json",), "no model.safetensors: choose"),
        ((FIRST,), "no config.json"),
    ],
)
def test_a_repository_that_is_no_checkpoint_is_not_downloaded(
    client: Client, kept: tuple[str, ...], said: str
) -> None:
    client.hub.files = {name: client.hub.files[name] for name in kept}
    assert said in client.error()
    assert not [path for _, path, _ in client.hub.requests if "/resolve/" in path]


def test_a_repository_that_is_whole_but_wrong_is_refused(client: Client) -> None:
    del client.hub.files["tokenizer.json"]
    assert "has no tokenizer" in client.error()
    assert "folder" in client.fetch(tokenizer=False)
