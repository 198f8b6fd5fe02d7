"""A bf16 DFlash2 drafter is converted once, when it is first used.

Needs NumPy and the standard library only.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lse_mlx import demo_pair
from lse_mlx.checkpoints.conversion.cached import Keeper
from lse_mlx.checkpoints.conversion.convert import convert
from lse_mlx.checkpoints.conversion.manifest import Manifest, format_name, hash_file
from lse_mlx.checkpoints.conversion.places import CacheSettings, cache_places
from lse_mlx.checkpoints.conversion.plan import (
    ARCHITECTURE,
    CONFIG,
    WEIGHTS,
    converted_config,
    plan_conversion,
)
from lse_mlx.checkpoints.conversion.source_hashes import SourceHashes
from lse_mlx.checkpoints.json_object import json_object_or_none
from lse_mlx.checkpoints.origin import Origin, find_origin
from lse_mlx.checkpoints.progress import Progress
from lse_mlx.errors import CheckpointError

QUANTIZATION = ("quantization", "quantization_config")


class Kind(Enum):
    """What a folder is, as far as a conversion to MLX affine codes goes."""

    OTHER = "no DFlash2 drafter"
    QUANTIZED = "a quantized DFlash2 drafter"
    SOURCE = "a bf16 DFlash2 drafter"
    UNSUPPORTED = "a DFlash2 drafter that cannot be converted"


@dataclass(frozen=True)
class Found:
    """What a folder is; reason says why it is unsupported."""

    kind: Kind
    reason: str = ""


def detect(folder: Path, bits: int = 8) -> Found:
    """What the draft checkpoint in `folder` is. Reads its config and the header of its weights."""
    config = json_object_or_none(folder / CONFIG)
    if config is None or not _names_dflash2(config):
        return Found(Kind.OTHER)
    if any(config.get(name) for name in QUANTIZATION):
        return Found(Kind.QUANTIZED)
    try:
        plan_conversion(folder, bits)
    except CheckpointError as error:
        return Found(Kind.UNSUPPORTED, str(error))
    return Found(Kind.SOURCE)


def prepare_drafter(
    folder: Path, settings: CacheSettings, progress: Progress, bits: int = 8
) -> Path:
    """The folder to load: `folder` itself unless it is a bf16 DFlash2 source, then its conversion.

    The conversion lies in `lse-q8g64` beside the source (q4 with `bits` 4) or where `settings` say,
    and is made where no valid one is there. Whatever is no such source is left to its loader.
    Raises CheckpointError when the conversion is needed and cannot be made.
    """
    keeper = _keeper(folder, settings, progress, bits)
    if keeper is None:
        return folder
    if not settings.enabled:
        if detect(folder, bits).kind is Kind.SOURCE:
            progress.note(f"LSE_DFLASH2_AUTOCONVERT=0: using {folder} in bf16, as it is stored")
        return folder
    # A valid conversion shows that its source can be converted, so the source stays closed.
    found = keeper.find()
    if found is not None:
        return found
    return keeper.find_or_make() if detect(folder, bits).kind is Kind.SOURCE else folder


@dataclass(frozen=True)
class DrafterConversion:
    """A bf16 drafter and its codes of `bits`; see cached_conversion.Conversion."""

    source: Path
    origin: Origin
    bits: int
    progress: Progress

    def inspect(self, place: Path) -> tuple[str | None, tuple[str, ...]]:
        try:
            manifest = Manifest.read(place)
        except CheckpointError:
            return "it has no readable manifest", ()
        return self.fault(place, manifest), (manifest.source_sha256,)

    def fault(self, place: Path, manifest: Manifest) -> str | None:
        """What is wrong with the folder `place`, which has this manifest."""
        try:
            size = (place / WEIGHTS).stat().st_size
            config = (place / CONFIG).read_bytes()
        except OSError:
            return "it is incomplete"
        if manifest.bytes != size:
            return f"it is incomplete: {size} bytes of weights instead of {manifest.bytes}"
        if manifest.format != format_name(self.bits):
            return f"its format is {manifest.format}"
        source = json_object_or_none(self.source / CONFIG) or {}
        if config != converted_config(source, self.bits).encode():
            return "the source's config.json changed"
        return None

    def source_hashes(self, hashes: SourceHashes) -> tuple[str, ...]:
        return hashes.compute()

    def write(self, destination: Path, hashes: tuple[str, ...]) -> None:
        convert(
            self.source,
            destination,
            self.origin.repository,
            self.origin.revision,
            bits=self.bits,
            progress=self.progress,
            source_sha256=hashes[0],
        )


def verify_conversion(
    source: Path,
    settings: CacheSettings,
    progress: Progress,
    bits: int = 8,
    place: Path | None = None,
) -> Path:
    """Hash a drafter and its conversion again and hold both to the manifest; returns the place.

    place: the conversion; None takes the one that `prepare_drafter` would find or make. Raises
    CheckpointError when there is none, or when anything differs.
    """
    source = source.resolve()
    conversion = DrafterConversion(source, find_origin(source), bits, progress)
    places = (place,) if place else _places(conversion, settings)
    there = next((p for p in places if (p / WEIGHTS).exists()), None)
    if there is None:
        raise CheckpointError(
            f"{source} has no conversion in {places[0]}: make one with `lse-mlx convert`."
        )
    manifest = Manifest.read(there)
    fault = conversion.fault(there, manifest)
    if fault is None and hash_file(source / WEIGHTS, progress, "hash-source") != (
        manifest.source_sha256
    ):
        fault = "the source's weights are not the ones it was made of"
    if fault is None and hash_file(there / WEIGHTS, progress, "hash-output") != manifest.sha256:
        fault = "its weights are not the ones that were written"
    if fault is not None:
        raise CheckpointError(
            f"The conversion in {there} is not valid ({fault}): remove it and convert again."
        )
    return there


def _keeper(folder: Path, settings: CacheSettings, progress: Progress, bits: int) -> Keeper | None:
    """What keeps the conversion of `folder`, where its config and file could be a source's."""
    source = folder.resolve()
    config = json_object_or_none(source / CONFIG)
    if config is None or not _names_dflash2(config) or source == demo_pair.DRAFTER.resolve():
        return None
    if any(config.get(name) for name in QUANTIZATION) or not (source / WEIGHTS).is_file():
        return None
    conversion = DrafterConversion(source, find_origin(source), bits, progress)
    places = _places(conversion, settings)
    return Keeper(conversion, places, SourceHashes((source / WEIGHTS,), places, progress), progress)


def _places(conversion: DrafterConversion, settings: CacheSettings) -> tuple[Path, ...]:
    weights, form = conversion.source / WEIGHTS, f"q{conversion.bits}g64"
    return cache_places(weights, conversion.origin, form, settings)


def _names_dflash2(config: dict[str, Any]) -> bool:
    named = config.get("architectures")
    return isinstance(named, list | str) and ARCHITECTURE in named
