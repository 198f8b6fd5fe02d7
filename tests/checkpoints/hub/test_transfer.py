"""How bytes arrive: counted as long as somebody listens, and on the disk before they are named."""

import errno
import os
import threading
from pathlib import Path

import pytest

from lse_mlx.checkpoints.hub import transfer
from lse_mlx.checkpoints.hub.files import Place, RemoteFile
from lse_mlx.checkpoints.hub.transfer import Meter


class Slow:
    """A Progress that takes its time over the first bytes, and keeps the order of what happens."""

    def __init__(self) -> None:
        self.at_work, self.go_on = threading.Event(), threading.Event()
        self.events: list[str] = []

    def note(self, text: str) -> None:
        raise AssertionError("a meter has nothing to note")

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        if tensor:
            self.at_work.set()
            assert self.go_on.wait(60)
        self.events.append(f"told {done} of {total}")


def test_nothing_is_told_after_a_meter_was_stopped() -> None:
    """A bar that was taken away would come back, and nobody would end it."""
    progress = Slow()
    meter = Meter(progress, 10)

    def stop() -> None:
        meter.stop()
        progress.events.append("stopped")

    worker = threading.Thread(target=meter.add, args=(3, "file"))
    stopping = threading.Thread(target=stop)
    worker.start()
    assert progress.at_work.wait(60)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive()  # it waits for the one that is telling
    progress.go_on.set()
    for thread in (worker, stopping):
        thread.join(60)
    with pytest.raises(InterruptedError):
        meter.add(3, "file")
    assert progress.events == ["told 0 of 10", "told 3 of 10", "stopped"]


def test_bytes_are_on_the_disk_before_they_get_the_name_that_vouches_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, blob = tmp_path / "a.incomplete", tmp_path / "a"
    part.write_bytes(b"whole")
    synced: list[tuple[int, bool]] = []

    def full_sync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, blob.exists()))

    monkeypatch.setattr(transfer, "full_sync", full_sync)
    inode = part.stat().st_ino
    transfer._keep(part, blob)
    assert synced == [(inode, False)]
    assert blob.read_bytes() == b"whole"
    assert not part.exists()


@pytest.mark.parametrize("links", [True, False])
def test_a_blob_gets_its_name_also_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    if not links:
        monkeypatch.setattr(Path, "symlink_to", refuse)
    file = RemoteFile("config.json", 5, "a" * 40, "a" * 40, large=False)
    place = Place("org/tiny", "1" * 40, None, tmp_path / "storage", tmp_path / "locks")
    place.blob(file).parent.mkdir(parents=True)
    place.blob(file).write_bytes(b"whole")
    for _ in range(2 if links else 1):  # another process may have been first
        place.name(file)
    path = tmp_path / "storage/snapshots" / ("1" * 40) / "config.json"
    assert path.read_bytes() == b"whole"
    assert path.is_symlink() == links
    (tmp_path / "storage").rename(tmp_path / "moved")
    assert (tmp_path / "moved/snapshots" / ("1" * 40) / "config.json").read_bytes() == b"whole"
