"""Room on disks, and bytes that are on them for good."""

import fcntl
import os
from pathlib import Path

import pytest

from lse_mlx.checkpoints.disk import SPARE, check_room, full_sync
from lse_mlx.errors import CheckpointError


def test_what_does_not_fit_is_told_with_both_sizes(tmp_path: Path) -> None:
    check_room(tmp_path, 5_000_000, "The work", free=lambda _: 5_000_000 + SPARE)
    with pytest.raises(CheckpointError) as told:
        check_room(tmp_path, 5_000_000, "The work", "do less", lambda _: 5_000_000 + SPARE - 1)
    # SPARE, 16 MiB, is 16.8 MB.
    assert str(told.value) == (
        f"The work needs 21.8 MB in {tmp_path}, but 21.8 MB are free: make room there, or do less."
    )


@pytest.mark.parametrize("known", [True, False])
def test_a_mac_is_asked_for_more_than_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    asked: list[object] = []

    def fcntl_call(descriptor: int, command: int) -> None:
        asked.append(command)
        if not known:
            raise OSError("this file system does not know it")

    with (tmp_path / "file").open("wb") as file:
        monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append("fsync"))
        monkeypatch.delattr(fcntl, "F_FULLFSYNC", raising=False)
        full_sync(file.fileno())
        assert asked == ["fsync"]
        monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", fcntl_call)
        full_sync(file.fileno())
        assert asked[1:] == ([51] if known else [51, "fsync"])
