"""Checkpoints from the Hugging Face hub: what is in the cache as it is, the rest downloaded once."""

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import tqdm

from lse_mlx.checkpoints.complete import check_complete
from lse_mlx.checkpoints.disk import free_bytes, human
from lse_mlx.checkpoints.hub.errors import HUB_FAULTS, hub_error
from lse_mlx.checkpoints.hub.files import (
    NEEDED,
    Place,
    RemoteFile,
    as_listed,
    changed,
    check_usable,
    discard,
    is_needed,
)
from lse_mlx.checkpoints.hub.transfer import transfer
from lse_mlx.checkpoints.pairing import by_drafter, registered
from lse_mlx.checkpoints.progress import Progress, Silent
from lse_mlx.errors import CheckpointError

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

SPARE = 16 << 20
"""Bytes left free beside what is downloaded."""


class QuietBars(tqdm):
    """huggingface_hub's bars, not shown: small files need none."""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs["disable"] = True
        super().__init__(*args, **kwargs)


@dataclass(frozen=True)
class Wanted:
    """A checkpoint on the hub.

    revision: a commit, branch or tag; None is the main branch
    tokenizer: whether it is not whole without one, as a target's
    room: bytes that its first use writes besides
    """

    repository: str
    revision: str | None = None
    tokenizer: bool = False
    room: int = 0

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


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
class _Listing:
    """What the hub has of one checkpoint: the files that are needed."""

    wanted: Wanted
    place: Place
    files: list[RemoteFile]


@dataclass(frozen=True)
class Hub:
    """The hub and its cache on this machine.

    offline: never connect; HF_HUB_OFFLINE says the same for the process
    endpoint: the hub's address, HF_ENDPOINT if None
    cache_dir: the cache, that of huggingface_hub (HF_HOME, HF_HUB_CACHE) if None
    free: tells the bytes free at a folder
    """

    offline: bool = False
    endpoint: str | None = None
    cache_dir: Path | None = None
    free: Callable[[Path], int] = free_bytes

    @property
    def cache(self) -> Path:
        return Path(self.cache_dir or constants.HF_HUB_CACHE).expanduser()

    def fetch(
        self,
        repository: str,
        revision: str | None = None,
        progress: Progress | None = None,
        files: Sequence[str] = NEEDED,
        *,
        tokenizer: bool = False,
        refresh: bool = False,
    ) -> Path:
        """The snapshot folder of one checkpoint; see `fetch_all`."""
        wanted = Wanted(repository, revision, tokenizer, conversion_room(repository))
        return self.fetch_all([wanted], progress, files, refresh=refresh)[0]

    def fetch_all(
        self,
        wanted: Sequence[Wanted],
        progress: Progress | None = None,
        files: Sequence[str] = NEEDED,
        *,
        refresh: bool = False,
    ) -> list[Path]:
        """The snapshot folders of checkpoints, downloaded where the cache has them not whole.

        Connects to nothing when all are whole, unless `refresh` asks for a branch's newest commit.
        Raises CheckpointError: offline, not on the hub, not permitted, no room on the disk for all
        of them together, the connection broke, or a file is not what the hub's list says. What came
        whole is kept, and the rest goes on from there next time.
        """
        progress = progress or Silent()
        missing = [
            one
            for one in wanted
            if (refresh and not _pinned(one)) or not self.state(one, files).whole
        ]
        if missing:
            self._check_online(missing[0], files)
            listings = [self._list(one, files) for one in missing]
            for listing in listings:
                self._drop_damaged(listing)
            self._check_room(listings)
            for listing in listings:
                self._download(listing, files, progress)
        return [self._folder(one) for one in wanted]

    def cached(
        self, repository: str, revision: str | None = None, *, tokenizer: bool = False
    ) -> Path | None:
        """The snapshot folder if the cache has the whole checkpoint, else None. No network."""
        state = self.state(Wanted(repository, revision, tokenizer))
        return state.folder if state.whole else None

    def missing_bytes(self, wanted: Sequence[Wanted], files: Sequence[str] = NEEDED) -> int:
        """Bytes that `fetch_all` would download, after the hub's lists; raises as it does."""
        absent = [one for one in wanted if not self.state(one, files).whole]
        if absent:
            self._check_online(absent[0], files)
        return sum(_missing(self._list(one, files)) for one in absent)

    def state(self, wanted: Wanted, files: Sequence[str] = NEEDED) -> Cached:
        """What the cache holds of `wanted`: names, sizes and headers are read, no network."""
        with _as_sentences(str(wanted)):
            storage = self._storage(wanted.repository)
            commit = self._cached_commit(wanted)
            folder = storage / "snapshots" / commit if commit else None
            if folder is None or not folder.is_dir():
                return Cached(None, "is not in the cache", _size_of(storage / "blobs"))
            fault = self._fault(wanted, commit or "", folder, files)
            # A part that a broken download left has no name in the snapshot yet.
            size = _size_of(folder) if not fault else _size_of(storage / "blobs")
            return Cached(folder, fault, size or _size_of(folder))

    def _storage(self, repository: str) -> Path:
        return self.cache / repo_folder_name(repo_id=repository, repo_type="model")

    def _cached_commit(self, wanted: Wanted) -> str | None:
        if _pinned(wanted):
            return wanted.revision
        name = wanted.revision or constants.DEFAULT_REVISION
        ref = self._storage(wanted.repository) / "refs" / name
        with suppress(OSError, ValueError):
            commit = ref.read_text("utf-8").strip()
            return commit if _HASH.fullmatch(commit) else None
        return None

    def _folder(self, wanted: Wanted) -> Path:
        return self._storage(wanted.repository) / "snapshots" / (self._cached_commit(wanted) or "")

    def _fault(self, wanted: Wanted, commit: str, folder: Path, files: Sequence[str]) -> str:
        """Why `folder` is not the whole checkpoint: by the hub's list if it was kept, by itself."""
        with suppress(CachedRepoTreeNotFoundError):
            for file in get_cached_repo_tree(
                wanted.repository, revision=commit, cache_dir=self.cache
            ):
                if is_needed(file.path, files):
                    path = folder / file.path
                    if not path.exists():
                        return f"lacks {file.path}"
                    if (size := path.stat().st_size) != file.size:
                        return f"has {size} of {file.size} bytes of {file.path}"
        try:
            check_complete(folder, tokenizer=wanted.tokenizer)
        except CheckpointError as error:
            return f"is not whole, {str(error).rstrip('.')}"
        return ""

    def _check_online(self, wanted: Wanted, files: Sequence[str]) -> None:
        if self.offline or constants.HF_HUB_OFFLINE:
            how = "--offline was given" if self.offline else "HF_HUB_OFFLINE is set"
            state = self.state(wanted, files)
            fault = state.fault if state.folder is None else f"in the cache {state.fault}"
            raise CheckpointError(
                f"{wanted} {fault}, and {how}: run `lse-mlx pull {pull_name(wanted)}` once with a "
                "network."
            )

    def _list(self, wanted: Wanted, files: Sequence[str]) -> _Listing:
        with _as_sentences(str(wanted)):
            info = HfApi(endpoint=self.endpoint).model_info(
                wanted.repository,
                revision=wanted.revision,
                files_metadata=True,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            )
        listed, commit = info.siblings or [], info.sha or ""
        found = [
            RemoteFile(
                name=file.rfilename,
                size=-1 if file.size is None else file.size,
                blob=file.lfs.sha256 if file.lfs else file.blob_id or "",
                large=file.lfs is not None,
            )
            for file in listed
            if is_needed(file.rfilename, files)
        ]
        # They become names of files here, so they must be nothing but hashes.
        if not _HASH.fullmatch(commit) or any(
            file.size < 0 or not _HASH.fullmatch(file.blob) for file in found
        ):
            raise CheckpointError(
                f"The hub's list of {wanted} gives no sizes and hashes: check HF_ENDPOINT."
            )
        check_usable(wanted, [file.rfilename for file in listed], found)
        storage = self._storage(wanted.repository)
        place = Place(
            repository=wanted.repository,
            commit=commit,
            endpoint=self.endpoint,
            storage=storage,
            locks=self.cache / ".locks" / storage.name,
        )
        return _Listing(wanted, place, found)

    def _drop_damaged(self, listing: _Listing) -> None:
        """Remove what the cache has of the listed files in another form than listed."""
        place = listing.place
        with _as_sentences(str(listing.wanted)):
            for file in listing.files:
                path, blob = place.snapshot / file.name, place.blob(file)
                if (path.exists() or path.is_symlink()) and not as_listed(path, file):
                    discard(path)
                if blob.exists() and not as_listed(blob, file):
                    blob.unlink()

    def _check_room(self, listings: Sequence[_Listing]) -> None:
        missing = sum(_missing(listing) for listing in listings)
        room = sum(listing.wanted.room for listing in listings if _missing(listing))
        free = self.free(self.cache)
        if missing and free < missing + room + SPARE:
            names = " and ".join(str(listing.wanted) for listing in listings)
            besides = f" and {human(room)} for the drafter's conversion" if room else ""
            raise CheckpointError(
                f"There is no room for {names}: {human(missing)} to download{besides} need "
                f"{human(missing + room + SPARE)}, but {self.cache} has {human(free)} free; make "
                "room, or set HF_HOME to a folder on a larger disk."
            )

    def _download(self, listing: _Listing, files: Sequence[str], progress: Progress) -> None:
        wanted, place = listing.wanted, listing.place
        missing = [file for file in listing.files if not (place.snapshot / file.name).exists()]
        if missing:
            size = human(sum(file.size for file in missing))
            free = human(self.free(self.cache))
            progress.note(
                f"Downloading {wanted}: {len(missing)} files, {size}, to {self.cache}, which has "
                f"{free} free."
            )
        with _as_sentences(str(wanted)):
            if self._cached_commit(wanted) is None:  # so that a broken download can be told
                self._keep_branch(listing)
            # The small files first: they bring the hub's list along, which says later what is whole.
            self._take(listing, [file for file in missing if not file.large])
            large = [file for file in missing if file.large]
            transfer(place, [file for file in large if not place.blob(file).exists()], progress)
            self._take(listing, large)
            self._keep_branch(listing)
            for file in missing:
                path = place.snapshot / file.name
                if not as_listed(path, file):
                    discard(path)
                    raise changed(place, file)
        if fault := self._fault(wanted, place.commit, place.snapshot, files):
            raise CheckpointError(
                f"{wanted} {fault}: run `lse-mlx pull {pull_name(wanted)}` again, or choose "
                "another build."
            )

    def _take(self, listing: _Listing, files: Sequence[RemoteFile]) -> None:
        """Let huggingface_hub put `files` into the snapshot; large ones are in the cache already."""
        if files:
            snapshot_download(
                listing.wanted.repository,
                revision=listing.place.commit,
                cache_dir=self.cache,
                endpoint=self.endpoint,
                allow_patterns=[glob.escape(file.name) for file in files],
                tqdm_class=QuietBars,
            )

    def _keep_branch(self, listing: _Listing) -> None:
        """Remember which commit a branch stood at, as huggingface_hub does."""
        if self._cached_commit(listing.wanted) != listing.place.commit:
            name = listing.wanted.revision or constants.DEFAULT_REVISION
            ref = listing.place.storage / "refs" / name
            ref.parent.mkdir(parents=True, exist_ok=True)
            fresh = ref.with_name(f"{ref.name}.{os.getpid()}")
            fresh.write_text(listing.place.commit, "utf-8")
            fresh.replace(ref)


def conversion_room(repository: str) -> int:
    """Bytes of the 8-bit conversion that the drafter in `repository` gets at its first use."""
    record = by_drafter(repository)
    return (record.drafter.q8_bytes or 0) if record else 0


def pull_name(wanted: Wanted) -> str:
    """What to give `lse-mlx pull` for `wanted`: the pair it belongs to, or the repository."""
    for record in registered():
        for part in (record.target, record.drafter):
            here = (part.repository, part.revision) == (wanted.repository, wanted.revision)
            if here and record.target.repository:
                return record.name
    return str(wanted)


def _pinned(wanted: Wanted) -> bool:
    return len(wanted.revision or "") == 40 and bool(_HASH.fullmatch(wanted.revision or ""))


def _missing(listing: _Listing) -> int:
    place = listing.place
    return sum(
        file.size - place.part_size(file)
        for file in listing.files
        if not (place.snapshot / file.name).exists() and not place.blob(file).exists()
    )


def _size_of(folder: Path) -> int:
    with suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return 0


@contextmanager
def _as_sentences(name: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence about `name`."""
    try:
        yield
    except HUB_FAULTS as fault:
        raise hub_error(fault, name) from fault
    except json.JSONDecodeError as fault:
        raise CheckpointError(
            f"The hub's answer for {name} is no JSON: check HF_ENDPOINT and the network."
        ) from fault
