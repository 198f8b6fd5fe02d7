"""Where conversions are kept: beside their source, or elsewhere. Needs the standard library only."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from lse_mlx.checkpoints.origin import Origin
from lse_mlx.errors import CheckpointError, reason

FNV_START = 1469598103934665603  # not the usual start of FNV-1a
FNV_PRIME = 1099511628211


def _user_cache() -> Path:
    return Path.home() / ".cache" / "lse-mlx"


@dataclass(frozen=True)
class CacheSettings:
    """Where conversions go, and whether a drafter is converted at all.

    directory: takes every conversion; None keeps each beside its source
    enabled: False loads a bf16 drafter as it is stored
    user_cache: takes the conversions whose source folder cannot be written
    """

    directory: Path | None = None
    enabled: bool = True
    user_cache: Path = field(default_factory=_user_cache)

    def as_enabled(self) -> "CacheSettings":
        """The same places, converting also where the environment says not to by itself."""
        return replace(self, enabled=True)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "CacheSettings":
        """Read LSE_DFLASH2_CACHE_DIR, LSE_DFLASH2_AUTOCONVERT (0 disables) and XDG_CACHE_HOME.

        Raises CheckpointError where the first can be no folder.
        """
        directory = environ.get("LSE_DFLASH2_CACHE_DIR")
        home = environ.get("XDG_CACHE_HOME", "")
        return cls(
            directory=_directory(directory) if directory else None,
            enabled=environ.get("LSE_DFLASH2_AUTOCONVERT") != "0",
            # A relative one is to be ignored: XDG Base Directory Specification, "Basics".
            user_cache=Path(home) / "lse-mlx" if Path(home).is_absolute() else _user_cache(),
        )


def _directory(named: str) -> Path:
    try:
        directory = Path(named).expanduser().absolute()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # told when used
            directory.stat()
        return directory
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"LSE_DFLASH2_CACHE_DIR is {named[:60]!r}, which can be no folder ({reason(error)}): "
            "set it to another one, or not at all."
        ) from error


def cache_places(
    weights: Path, origin: Origin, form: str, settings: CacheSettings
) -> tuple[Path, ...]:
    """Where a conversion of `weights` may be, the preferred place first.

    weights: the absolute path of the source's file; form: as in "q8g64"
    """
    name = f"{_key(weights, origin)}-{form}"
    if settings.directory is not None:
        return (settings.directory / name,)
    return (weights.parent / f"lse-{form}", settings.user_cache / name)


def _key(weights: Path, origin: Origin) -> str:
    if not origin.known:
        return f"{weights.parent.name}-{path_hash(str(weights)):016x}"
    return str(origin).translate(str.maketrans("/\\:", "---"))


def path_hash(path: str) -> int:
    """64 bits that tell apart folders of one name: FNV-1a from a start of its own."""
    value = FNV_START
    for byte in os.fsencode(path):
        value = (value ^ byte) * FNV_PRIME % (1 << 64)
    return value
