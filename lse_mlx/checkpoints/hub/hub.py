"""Checkpoints from the Hugging Face hub: what is in the cache as it is, the rest downloaded once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from lse_mlx.checkpoints.disk import check_room, free_bytes, human
from lse_mlx.checkpoints.hub.cache import HubCache, Wanted
from lse_mlx.checkpoints.hub.errors import as_sentences
from lse_mlx.checkpoints.hub.files import (
    Place,
    RemoteFile,
    as_listed,
    check_usable,
    discard,
    is_needed,
)
from lse_mlx.checkpoints.hub.listing import ask_for_list
from lse_mlx.checkpoints.hub.transfer import transfer
from lse_mlx.checkpoints.progress import Progress, Silent
from lse_mlx.errors import CheckpointError

LARGEST = constants.MAX_HTTP_DOWNLOAD_SIZE
"""Bytes of the largest file that the hub sends in one piece."""

BeforeWeights = Callable[[Sequence[Path]], None]
"""Told the snapshot folders once all but the weights is there; what it raises ends the download."""


@dataclass(frozen=True)
class _Listing:
    """What the hub has of one checkpoint.

    files: those that are needed; repository: all of them
    """

    wanted: Wanted
    place: Place
    files: list[RemoteFile]
    repository: list[RemoteFile]

    def missing(self) -> list[RemoteFile]:
        """The files that the snapshot does not name yet."""
        return [file for file in self.files if not (self.place.snapshot / file.name).exists()]

    def missing_bytes(self) -> int:
        """The bytes that are not in the cache under any name."""
        place = self.place
        return sum(
            file.size - place.part_size(file)
            for file in self.missing()
            if not place.blob(file).exists()
        )


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
    def cache(self) -> HubCache:
        return HubCache(Path(self.cache_dir or constants.HF_HUB_CACHE).expanduser())

    def fetch_all(
        self,
        wanted: Sequence[Wanted],
        progress: Progress | None = None,
        *,
        refresh: bool = False,
        before_weights: BeforeWeights | None = None,
    ) -> list[Path]:
        """The snapshot folders of checkpoints, downloaded where the cache has them not whole.

        Connects to nothing when all are whole, unless `refresh` asks for a branch's newest commit.
        Where something is downloaded, `before_weights` is told before its large files are begun.
        Raises CheckpointError: offline, not on the hub, not permitted, no room on the disk for all
        of them together, the connection broke, or a file is not what the hub's list says. What came
        whole is kept, and the rest goes on from there next time.
        """
        progress = progress or Silent()
        missing = [
            one for one in wanted if (refresh and not one.pinned) or not self.cache.state(one).whole
        ]
        listings = self._list_all(missing)
        if listings:
            for listing in listings.values():
                self._drop_damaged(listing)
            self._check_room(list(listings.values()))
            for listing in listings.values():
                self._fetch_small(listing, progress)
            if before_weights is not None:
                before_weights([self._folder(one, listings) for one in wanted])
            for listing in listings.values():
                self._fetch_large(listing, progress)
        return [self._folder(one, listings) for one in wanted]

    def missing_bytes(self, wanted: Sequence[Wanted]) -> int:
        """Bytes that `fetch_all` would download, after the hub's lists; raises as it does."""
        absent = [one for one in wanted if not self.cache.state(one).whole]
        return sum(listing.missing_bytes() for listing in self._list_all(absent).values())

    def _folder(self, wanted: Wanted, listings: dict[Wanted, _Listing]) -> Path:
        if wanted in listings:
            return listings[wanted].place.snapshot
        folder = self.cache.snapshot(wanted)
        assert folder is not None  # it is whole
        return folder

    def _list_all(self, wanted: Sequence[Wanted]) -> dict[Wanted, _Listing]:
        if wanted:
            self._check_online(wanted[0])
        return {one: self._list(one) for one in wanted}

    def _check_online(self, wanted: Wanted) -> None:
        if self.offline or constants.HF_HUB_OFFLINE:
            how = "nothing is to be downloaded" if self.offline else "HF_HUB_OFFLINE is set"
            state = self.cache.state(wanted)
            fault = state.fault if state.folder is None else f"in the cache {state.fault}"
            raise CheckpointError(
                f"{wanted} {fault}, and {how}: run `{wanted.pull}` once with a network."
            )

    def _list(self, wanted: Wanted) -> _Listing:
        with as_sentences(str(wanted)):
            commit, files = ask_for_list(
                wanted.repository, wanted.revision, self.endpoint, str(wanted)
            )
        if wanted.pinned and commit != wanted.revision:
            raise CheckpointError(
                f"The hub's list of {wanted} is of commit {commit}: check HF_ENDPOINT."
            )
        found = [file for file in files if is_needed(file.name)]
        check_usable(wanted, [file.name for file in files], found)
        storage = self.cache.storage(wanted.repository)
        place = Place(
            repository=wanted.repository,
            commit=commit,
            endpoint=self.endpoint,
            storage=storage,
            locks=self.cache.folder / ".locks" / storage.name,
        )
        return _Listing(wanted, place, found, files)

    def _drop_damaged(self, listing: _Listing) -> None:
        """Remove what the cache has of the listed files in another form than listed."""
        place = listing.place
        with as_sentences(str(listing.wanted)):
            for file in listing.files:
                path, blob = place.snapshot / file.name, place.blob(file)
                if (path.exists() or path.is_symlink()) and not as_listed(path, file):
                    discard(path)
                if blob.exists() and not as_listed(blob, file):
                    blob.unlink()

    def _check_room(self, listings: Sequence[_Listing]) -> None:
        absent = [listing for listing in listings if listing.missing_bytes()]
        for listing in absent:
            for file in listing.missing():
                if file.size > LARGEST:
                    raise CheckpointError(
                        f"{file.name} of {listing.wanted} has {human(file.size)}, and the hub sends "
                        f"no more than {human(LARGEST)} as one file: choose a build in shards."
                    )
        if absent:
            missing = sum(listing.missing_bytes() for listing in absent)
            room = sum(listing.wanted.room for listing in absent)
            names = " and ".join(str(listing.wanted) for listing in absent)
            besides = f" and {human(room)} for the drafter's conversion" if room else ""
            check_room(
                self.cache.folder,
                missing + room,
                f"{names} ({human(missing)} to download{besides})",
                "set HF_HOME to a folder on a larger disk",
                self.free,
            )

    def _fetch_small(self, listing: _Listing, progress: Progress) -> None:
        """Bring all but the large files, and with them the hub's list, which later tells the rest."""
        wanted, place, cache = listing.wanted, listing.place, self.cache
        missing = listing.missing()
        with as_sentences(str(wanted)):
            if missing:
                size, free = sum(file.size for file in missing), self.free(cache.folder)
                progress.note(
                    f"Downloading {wanted}: {len(missing)} files, {human(size)}, to "
                    f"{cache.folder}, which has {human(free)} free."
                )
            if cache.commit(wanted) is None:  # so that a broken download can be told
                cache.keep_commit(wanted, place.commit)
            cache.keep_list(wanted.repository, place.commit, listing.repository)
            _bring(place, [file for file in missing if not file.large], Silent())

    def _fetch_large(self, listing: _Listing, progress: Progress) -> None:
        wanted, place = listing.wanted, listing.place
        with as_sentences(str(wanted)):
            _bring(place, listing.missing(), progress)
            self.cache.keep_commit(wanted, place.commit)
            fault = self.cache.fault(wanted, place.snapshot)
        if fault:
            raise CheckpointError(
                f"{wanted} {fault}: run `{wanted.pull}` again, or choose another build."
            )


def _bring(place: Place, files: Sequence[RemoteFile], progress: Progress) -> None:
    """Have `files` in the snapshot: download what no blob holds, and name the blobs there."""
    transfer(place, [file for file in files if not place.blob(file).exists()], progress)
    for file in files:
        place.name(file)
