"""A conversion that is made once and found again. Needs the standard library only."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from lse_mlx.checkpoints.conversion.manifest import format_name, stated_format
from lse_mlx.checkpoints.conversion.new_folder import (
    FolderNotWritable,
    FolderTaken,
    JudgedFolder,
    check_writable,
    sweep,
)
from lse_mlx.checkpoints.conversion.source_hashes import SourceHashes, stamp_path
from lse_mlx.checkpoints.hashing import hash_files
from lse_mlx.checkpoints.names import MANIFEST
from lse_mlx.checkpoints.origin import Origin
from lse_mlx.checkpoints.progress import Progress
from lse_mlx.errors import CheckpointError

WAY_OUT = "set LSE_DFLASH2_CACHE_DIR to a folder that can be written"
OTHER_WEIGHTS = "the source's weights changed"
NOBODYS = ".DS_Store"
"""What looking at a folder leaves there, on a Mac."""


@dataclass(frozen=True)
class Inspection:
    """What one reading of a conversion's manifest told: the folder may be gone a moment later.

    fault: what is wrong with the folder, all hashes of weights aside; None if nothing is
    source_hashes: of the source's weights, as recorded; written: of its own files, by name
    """

    fault: str | None
    source_hashes: tuple[str, ...] = ()
    written: dict[str, str] = field(default_factory=dict)


NO_MANIFEST = Inspection("it has no readable manifest")


class Conversion(Protocol):
    """What is converted, and how one tells that it was."""

    @property
    def source(self) -> Path: ...

    @property
    def origin(self) -> Origin: ...

    @property
    def bits(self) -> int: ...

    def inspect(self, place: Path) -> Inspection:
        """What is wrong with the conversion in the folder `place`, and what it says of itself."""
        ...

    def own_names(self, place: Path) -> Collection[str]:
        """Patterns of the files' names of a conversion in `place`; all others are a person's."""
        ...

    def write(self, destination: Path, hashes: SourceHashes) -> None:
        """Convert into the new folder `destination`, and record what `hashes` say of the source.

        Raises FolderTaken, FolderNotWritable, and CheckpointError also where the source changes
        before all is written.
        """
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
            if os.path.isdir(place) and self._fault(place) is None:
                self.progress.note(f"using the conversion in {place}")
                sweep(place)
                return place
        return None

    def make(self) -> Path:
        """Convert now. Returns the place, also where another process was faster."""
        last = len(self.places) - 1
        for number, place in enumerate(self.places):
            try:
                # Before the source is read, and before anyone asks how much room there is.
                check_writable(place)
                return place if self._clear(place) else self._make_at(place)
            except FolderNotWritable as error:
                if number == last:
                    raise self._nowhere(error) from error
                self.progress.note(f"{error.fault}: using {self.places[number + 1]} instead")
        raise AssertionError("there is at least one place")

    def verify(self) -> Path:
        """Read source and conversion whole and hold both to the manifest; returns the place.

        Raises CheckpointError when there is no conversion, or when anything differs.
        """
        source = self.conversion.source
        place = next((p for p in self.places if os.path.isfile(p / MANIFEST)), None)
        if place is None:
            raise CheckpointError(
                f"{source} has no conversion in {self.places[0]}: make one with `lse-mlx convert`."
            )
        found = self.conversion.inspect(place)
        fault, files = found.fault, [place / name for name in found.written]
        if fault is None and self.hashes.compute() != found.source_hashes:
            fault = OTHER_WEIGHTS
        if fault is None and hash_files(files, self.progress, "hash-output") != (
            tuple(found.written.values())
        ):
            fault = "its files are not the ones that were written"
        if fault is not None:
            raise CheckpointError(
                f"The conversion in {place} is not valid ({fault}): remove it and convert again."
            )
        return place

    def _fault(self, place: Path) -> str | None:
        found = self.conversion.inspect(place)
        if found.fault is not None:
            return found.fault
        why = "as nothing says whether it changed since it was converted"
        if any(os.path.lexists(stamp_path(p)) for p in self.places):
            why = "as its size or time stamp is not the one noted when it was converted"
        if self.hashes.get(why) != found.source_hashes:
            return OTHER_WEIGHTS
        self.hashes.stamp(place)
        return None

    def _clear(self, place: Path) -> bool:
        """Remove what is invalid in `place`; True if a valid conversion came to be there."""
        while os.path.lexists(place):
            try:
                with JudgedFolder(place) as folder:
                    fault = self._fault(place)
                    if fault is None:
                        return True
                    self._check_own(place, folder)
                    self.progress.note(f"discarding the conversion in {place}: {fault}")
                    folder.remove()
            except FileNotFoundError:
                if os.path.islink(place):  # leads nowhere
                    raise _in_the_way(place) from None
            except OSError as error:
                raise _in_the_way(place) from error
        return False

    def _check_own(self, place: Path, folder: JudgedFolder) -> None:
        """Raise FolderNotWritable where removing the folder would take a person's files along."""
        own = (*self.conversion.own_names(place), NOBODYS)
        for name, is_folder in folder.held():
            if is_folder or not any(fnmatchcase(name, pattern) for pattern in own):
                raise _in_the_way(place, f", as a conversion has no {name!r}")

    def _make_at(self, place: Path, once_more: bool = True) -> Path:
        source = self.conversion.source
        self.progress.note(
            f"converting {source} ({self.conversion.origin}) into {place}; this runs once"
        )
        try:
            self.conversion.write(place, self.hashes)
        except FolderTaken as error:
            fault = self._fault(place) if os.path.isdir(place) else "it is no folder"
            if fault is not None and once_more:  # somebody removes it, perhaps
                return place if self._clear(place) else self._make_at(place, once_more=False)
            if fault is not None:
                raise CheckpointError(
                    f"{place} came to be while {source} was converted and cannot be used "
                    f"({fault}): remove it and try again."
                ) from error
            self.progress.note(f"another process was faster: using {place}")
            return place
        self.hashes.stamp(place)
        self.progress.note(f"complete: {place}")
        return place

    def _nowhere(self, error: FolderNotWritable) -> CheckpointError:
        return CheckpointError(
            f"The conversion of {self.conversion.source} can be written nowhere "
            f"({error.fault}): {WAY_OUT}."
        )


def verify(keepers: Sequence[Keeper]) -> Path:
    """`Keeper.verify` of the first with a conversion of its form; they differ in their bits."""
    for keeper in keepers:
        there = [stated_format(p) for p in keeper.places if os.path.isfile(p / MANIFEST)]
        if format_name(keeper.conversion.bits) in there or None in there:  # or in no form at all
            return keeper.verify()
    return keepers[0].verify()


def _in_the_way(place: Path, why: str = "") -> FolderNotWritable:
    return FolderNotWritable(f"{place} is in the way and cannot be replaced{why}", "remove it")
