"""What the Hugging Face cache holds of a checkpoint, told without a connection."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from lse_mlx.checkpoints.complete import check_complete
from lse_mlx.checkpoints.hub.errors import as_sentences
from lse_mlx.checkpoints.hub.files import RemoteFile, is_needed
from lse_mlx.checkpoints.hub.listing import HASH, list_text, listed_sizes
from lse_mlx.errors import CheckpointError, printable


@dataclass(frozen=True)
class Wanted:
    """A checkpoint on the hub.

    revision: a commit, branch or tag; None is the main branch
    tokenizer: whether it is not whole without one, as a target's
    room: bytes that its first use writes besides, as a drafter's conversion
    pull_name: what `lse-mlx pull` is given to bring it; None where that is the repository
    """

    repository: str
    revision: str | None = None
    tokenizer: bool = False
    room: int = 0
    pull_name: str | None = None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which stays what it is."""
        revision = self.revision or ""
        return len(revision) == 40 and bool(HASH.fullmatch(revision))

    @property
    def pull(self) -> str:
        """The command that brings it into the cache."""
        return f"lse-mlx pull {self.pull_name or self}"


@dataclass(frozen=True)
class Cached:
    """What the cache holds of a checkpoint.

    folder: its snapshot, or None where there is none
    fault: why it cannot be used, or "" if it is whole
    bytes: of what is there, counting what a broken download left
    """

    folder: Path | None
    fault: str
    bytes: int

    @property
    def whole(self) -> bool:
        return self.folder is not None and not self.fault


@dataclass(frozen=True)
class HubCache:
    """The cache in `folder`, as huggingface_hub lays it out."""

    folder: Path

    def state(self, wanted: Wanted) -> Cached:
        """What is there of `wanted`. Reads names, sizes, JSON and headers."""
        with as_sentences(str(wanted)):
            storage = self.storage(wanted.repository)
            folder = self.snapshot(wanted)
            if folder is None or not folder.is_dir():
                return Cached(None, "is not in the cache", _size_of(storage / "blobs"))
            fault = self.fault(wanted, folder)
            # A part that a broken download left has no name in the snapshot yet.
            size = _size_of(folder) if not fault else _size_of(storage / "blobs")
            return Cached(folder, fault, size or _size_of(folder))

    def storage(self, repository: str) -> Path:
        """Where everything of a repository lies."""
        return self.folder / repo_folder_name(repo_id=repository, repo_type="model")

    def snapshot(self, wanted: Wanted) -> Path | None:
        """The folder of `wanted`, there or not; None where its branch was never downloaded."""
        commit = self.commit(wanted)
        return None if commit is None else self.storage(wanted.repository) / "snapshots" / commit

    def commit(self, wanted: Wanted) -> str | None:
        """The commit that is meant: the one asked for, or where the branch stood when last seen."""
        if wanted.pinned:
            return wanted.revision
        with suppress(OSError, ValueError):
            commit = self._branch(wanted).read_text("utf-8").strip()
            return commit if HASH.fullmatch(commit) else None
        return None

    def keep_commit(self, wanted: Wanted, commit: str) -> None:
        """Remember which commit a branch stands at, as huggingface_hub does."""
        if self.commit(wanted) != commit:
            _write(self._branch(wanted), commit)

    def keep_list(self, repository: str, commit: str, files: Sequence[RemoteFile]) -> None:
        """Remember the hub's list of a commit's files, which later tells what is missing."""
        path = self._list(repository, commit)
        if not listed_sizes(path):
            _write(path, list_text(files))

    def fault(self, wanted: Wanted, folder: Path) -> str:
        """Why `folder` is not all of `wanted`: by the hub's list if it was kept, and by itself."""
        for name, listed in listed_sizes(self._list(wanted.repository, folder.name)).items():
            if is_needed(name):
                path = folder / name
                if not path.exists():
                    return f"lacks {name}"
                if (size := path.stat().st_size) != listed:
                    return f"has {size} of {listed} bytes of {name}"
        try:
            check_complete(folder, tokenizer=wanted.tokenizer)
        except CheckpointError as error:
            return f"is not whole, {printable(str(error)).rstrip('.')}"
        return ""

    def _branch(self, wanted: Wanted) -> Path:
        name = wanted.revision or constants.DEFAULT_REVISION
        return self.storage(wanted.repository) / "refs" / name

    def _list(self, repository: str, commit: str) -> Path:
        return self.storage(repository) / "trees" / f"{commit}.json"


def _write(path: Path, text: str) -> None:
    """Put a file there in one step, as others may read it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, "utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _size_of(folder: Path) -> int:
    with suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return 0
