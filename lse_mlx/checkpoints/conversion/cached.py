"""A conversion that is made once and found again. Needs the standard library only."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lse_mlx.checkpoints.conversion.new_folder import (
    FolderNotWritable,
    FolderTaken,
    JudgedFolder,
    check_writable,
    sweep,
)
from lse_mlx.checkpoints.conversion.source_hashes import SourceHashes
from lse_mlx.checkpoints.origin import Origin
from lse_mlx.checkpoints.progress import Progress
from lse_mlx.errors import CheckpointError

WAY_OUT = "set LSE_DFLASH2_CACHE_DIR to a folder that can be written"


class Conversion(Protocol):
    """What is converted, and how one tells that it was."""

    @property
    def source(self) -> Path: ...

    @property
    def origin(self) -> Origin: ...

    def inspect(self, place: Path) -> tuple[str | None, tuple[str, ...]]:
        """What is wrong with the conversion in the folder `place`, its source's weights aside.

        And, of one reading, the hashes of the source's files that it names: another process may
        remove the folder at any time.
        """
        ...

    def source_hashes(self, hashes: SourceHashes) -> tuple[str, ...]:
        """The hashes to record in a new conversion."""
        ...

    def write(self, destination: Path, hashes: tuple[str, ...]) -> None:
        """Convert into the new folder `destination`. Raises FolderTaken, FolderNotWritable."""
        ...


@dataclass(frozen=True)
class Keeper:
    """Looks for a valid conversion in `places`, and makes one in the first that can be written."""

    conversion: Conversion
    places: Sequence[Path]
    hashes: SourceHashes
    progress: Progress

    def find(self) -> Path | None:
        """The first place with a valid conversion. Reads nothing of the source where stamps hold."""
        for place in self.places:
            if place.is_dir() and self._fault(place) is None:
                self.progress.note(f"using the conversion in {place}")
                sweep(place)
                return place
        return None

    def find_or_make(self) -> Path:
        """The place of a valid conversion, made now if there is none."""
        return self.find() or self._make()

    def _fault(self, place: Path) -> str | None:
        fault, recorded = self.conversion.inspect(place)
        if fault is not None:
            return fault
        why = "as nothing says whether it changed since it was converted"
        hashes = self.hashes.get(why)
        if hashes != recorded:
            return "the source's weights changed"
        self.hashes.stamp(place)
        return None

    def _make(self) -> Path:
        hashes: tuple[str, ...] | None = None
        last = len(self.places) - 1
        for number, place in enumerate(self.places):
            try:
                # Before the source is read, and before anyone asks how much room there is.
                check_writable(place)
                if self._clear(place):
                    return place
                if hashes is None:
                    hashes = self.conversion.source_hashes(self.hashes)
                return self._make_at(place, hashes)
            except FolderNotWritable as error:
                if number == last:
                    raise self._nowhere(error) from error
                self.progress.note(f"{error.fault}: using {self.places[number + 1]} instead")
        raise AssertionError("there is at least one place")

    def _clear(self, place: Path) -> bool:
        """Remove what is invalid in `place`; True if a valid conversion came to be there."""
        while os.path.lexists(place):
            try:
                with JudgedFolder(place) as folder:
                    fault = self._fault(place)
                    if fault is None:
                        return True
                    self.progress.note(f"discarding the conversion in {place}: {fault}")
                    folder.remove()
            except FileNotFoundError:
                if place.is_symlink():  # leads nowhere
                    raise _in_the_way(place) from None
            except OSError as error:
                raise _in_the_way(place) from error
        return False

    def _make_at(self, place: Path, hashes: tuple[str, ...]) -> Path:
        source = self.conversion.source
        self.progress.note(
            f"converting {source} ({self.conversion.origin}) into {place}; this runs once"
        )
        try:
            self.conversion.write(place, hashes)
        except FolderTaken as error:
            fault = self._fault(place) if place.is_dir() else "it is no folder"
            if fault is not None:
                raise CheckpointError(
                    f"{place} came to be while {source} was converted and cannot be used "
                    f"({fault}): remove it and try again."
                ) from error
            self.progress.note(f"another process was faster: using {place}")
            return place
        if self.hashes.changed():
            with JudgedFolder(place) as folder:
                folder.remove()
        self.hashes.check_unchanged()
        self.hashes.stamp(place)
        self.progress.note(f"complete: {place}")
        return place

    def _nowhere(self, error: FolderNotWritable) -> CheckpointError:
        return CheckpointError(
            f"The conversion of {self.conversion.source} can be written nowhere "
            f"({error.fault}): {WAY_OUT}."
        )


def _in_the_way(place: Path) -> FolderNotWritable:
    return FolderNotWritable(f"{place} is in the way and cannot be replaced", "remove it")
