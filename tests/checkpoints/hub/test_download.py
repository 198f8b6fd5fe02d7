"""Downloads: whole or refused, resumed where they broke."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lse_mlx.checkpoints.resolve import parse_repository
from tests.checkpoints.hub.fake_hub import (
    COMMIT,
    FIRST,
    NEEDED,
    REPOSITORY,
    SECOND,
    FakeHub,
    checkpoint,
    serving,
)
from tests.checkpoints.hub.fetcher import TOKEN, Client, Fetcher, is_served
from tests.checkpoints.waiting import wait_until

LARGE = 36_000_000
"""Bytes of a shard that arrives in several pieces of huggingface_hub's 10 MiB."""


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
        killed = Client(Fetcher(tmp_path / "home"), hub, tmp_path / "cache")
        client = Client(fetcher, hub, killed.cache)
        settings = {"endpoint": hub.endpoint, "cache_dir": killed.cache}
        killed.fetcher.start(hub=settings, wanted={"repository": REPOSITORY})
        assert hub.stalled.wait(60)
        part = killed.cache / "models--org--tiny/blobs" / f"{hub.etag(FIRST)}.incomplete"
        wait_until(lambda: part.exists() and part.stat().st_size >= stop - (10 << 20))
        killed.fetcher.close()
        assert f"lacks {FIRST}" in killed.here().fault
        assert f"lacks {FIRST}" in client.error({"offline": True})
        hub.stall_at.clear()
        kept = part.stat().st_size
        assert 0 < kept <= stop
        hub.requests.clear()
        assert is_served(hub, client.folder())
        assert set(hub.asked("GET", FIRST)) == {f"bytes={kept}-"}
        assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_a_connection_that_breaks_once_is_taken_up_again(fetcher: Fetcher, tmp_path: Path) -> None:
    with serving(FakeHub(checkpoint(LARGE), cut_once={SECOND: LARGE // 2})) as hub:
        client = Client(fetcher, hub, tmp_path)
        assert is_served(hub, client.folder())
        ranges = hub.asked("GET", SECOND)
        assert ranges[0] is None and ranges[-1] is not None


def test_a_hub_that_sends_all_again_is_taken_from_the_start(
    fetcher: Fetcher, tmp_path: Path
) -> None:
    hub = FakeHub(checkpoint(3_000_000), cut_once={FIRST: 2_500_000}, no_ranges=True)
    with serving(hub):
        assert is_served(hub, Client(fetcher, hub, tmp_path).folder())
    first, *_, last = hub.asked("GET", FIRST)
    assert first is None and last == f"bytes={2 << 20}-"


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
            "wanted": {"repository": REPOSITORY},
        }
        other = Fetcher(tmp_path / "home")
        fetcher.start(**order)
        assert hub.stalled.wait(60)
        other.start(**order)
        # Until the other has asked for something.
        wait_until(lambda: not hub.requests[-1][1].startswith("/cdn/"))
        hub.stall_at.clear()
        hub.released.set()
        for process in (fetcher, other):
            assert is_served(hub, Path(process.answer()["folder"]))
        other.close()
        assert len([True for _, path, _ in hub.requests if path == f"/cdn/{SECOND}"]) == 1


@pytest.mark.parametrize("name", [FIRST, "config.json"])
@pytest.mark.parametrize("announced", [True, False], ids=["other-etag", "same-etag"])
def test_a_file_that_changed_after_it_was_listed_is_not_taken(
    client: Client, name: str, announced: bool
) -> None:
    content = client.hub.files[name]
    client.hub.served[name] = content[:-1] + bytes([content[-1] ^ 1])
    client.hub.other_names = announced
    assert client.error().startswith(f"{name} of {REPOSITORY} is not what the hub's list says")
    assert not client.here().whole
    client.hub.served.clear()
    assert is_served(client.hub, client.folder())


@pytest.mark.parametrize("name", [FIRST, "config.json"])
def test_a_file_that_is_short_is_not_taken(client: Client, name: str) -> None:
    client.hub.served[name] = client.hub.files[name][:-1]
    client.error()
    assert not client.here().whole
    client.hub.served.clear()
    assert is_served(client.hub, client.folder())


def test_a_disk_without_room_stops_before_the_first_byte(client: Client) -> None:
    spare = 16 << 20
    total = sum(len(client.hub.files[name]) for name in NEEDED)
    said = client.error({"free": total + spare - 1})
    assert f"{total} bytes to download" in said
    assert str(client.cache) in said
    assert "16.8 MB are free" in said
    assert "set HF_HOME" in said
    assert not [path for _, path, _ in client.hub.requests if "/resolve/" in path]
    assert not client.cache.exists() or not list(client.cache.rglob("blobs/*"))
    assert is_served(client.hub, Path(client.fetch({"free": total + spare})["folder"]))
    (client.folder() / FIRST).resolve().unlink()
    left = len(client.hub.files[FIRST]) + spare
    client.error({"free": left - 1})
    client.fetch({"free": left})


def test_the_room_for_a_drafters_conversion_is_asked_for_too(client: Client) -> None:
    """The bytes of the 8-bit conversion are those of the reference's documents."""
    drafter = parse_repository("incoai/Qwen3.8-27B-DFlash2@main")
    assert drafter is not None
    client.hub.commits = {drafter.repository: COMMIT}
    order = {"repository": drafter.repository, "room": drafter.room}
    said = client.error({"free": 2_044_950_184}, **order)
    assert "2.04 GB for the drafter's conversion" in said
    assert "2.06 GB" in said
    assert "folder" in client.fetch({"free": 2_100_000_000}, **order)


def test_a_file_larger_than_the_hub_sends_is_refused_before_the_first_byte(client: Client) -> None:
    client.hub.lie["size"] = 50_000_000_001
    said = client.error({"free": 10**15})
    assert "has 50.00 GB, and the hub sends no more than 50.00 GB as one file" in said
    assert not [path for _, path, _ in client.hub.requests if "/resolve/" in path]


def test_a_name_that_a_terminal_or_a_system_obeys_is_not_taken(client: Client) -> None:
    client.hub.files["model\x1b]0;gone\x07.safetensors"] = b"not needed"
    client.hub.files["a\nb.json"] = b"not needed"
    client.hub.files["C:evil.json"] = b"not needed"  # another drive, on some systems
    assert is_served(client.hub, client.folder())
