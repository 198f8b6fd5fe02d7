"""A bf16 DFlash2 drafter is converted once, when it is first used.

Needs NumPy and the standard library only.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lse_mlx import demo_pair
from lse_mlx.checkpoints.conversion.cached import NO_MANIFEST, WAY_OUT, Inspection, Keeper, verify
from lse_mlx.checkpoints.conversion.convert import convert
from lse_mlx.checkpoints.conversion.manifest import Manifest, format_name
from lse_mlx.checkpoints.conversion.places import CacheSettings, cache_places
from lse_mlx.checkpoints.conversion.plan import converted_config, is_planned, plan_conversion
from lse_mlx.checkpoints.conversion.source_hashes import SourceHashes
from lse_mlx.checkpoints.json_object import json_object_or_none
from lse_mlx.checkpoints.names import (
    CONFIG,
    MANIFEST,
    QUANTIZATION,
    WEIGHTS,
    is_dflash2,
)
from lse_mlx.checkpoints.origin import Origin, find_origin
from lse_mlx.checkpoints.progress import Progress
from lse_mlx.checkpoints.regular_file import open_regular
from lse_mlx.checkpoints.safetensors_header import read_header
from lse_mlx.errors import CheckpointError


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
    kind = _stated(folder)
    if kind is not Kind.SOURCE:
        return Found(kind)
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
    source = folder.resolve()
    if _stated(source) is not Kind.SOURCE or not os.path.isfile(source / WEIGHTS):
        return folder
    if source == demo_pair.DRAFTER.resolve():
        return folder
    if not settings.enabled:
        if detect(folder, bits).kind is Kind.SOURCE:
            progress.note(f"LSE_DFLASH2_AUTOCONVERT=0: using {folder} in bf16, as it is stored")
        return folder
    keeper = _keeper(source, settings, progress, bits)
    # A valid conversion shows that its source can be converted, so the source stays closed.
    if found := keeper.find():
        return found
    return keeper.make() if detect(folder, bits).kind is Kind.SOURCE else folder


@dataclass(frozen=True)
class DrafterConversion:
    """A bf16 drafter and its codes of `bits`; see cached.Conversion."""

    source: Path
    origin: Origin
    bits: int
    progress: Progress

    def inspect(self, place: Path) -> Inspection:
        try:
            manifest = Manifest.read(place)
        except CheckpointError:
            return NO_MANIFEST
        fault = self._fault(place, manifest)
        return Inspection(fault, (manifest.source_sha256,), {WEIGHTS: manifest.sha256})

    def _fault(self, place: Path, manifest: Manifest) -> str | None:
        weights = place / WEIGHTS
        try:
            size = weights.stat().st_size
            with open_regular(place / CONFIG) as file:
                config = file.read()
        except OSError:
            return "it is incomplete"
        if manifest.bytes != size:
            return f"it is incomplete: {size} bytes of weights instead of {manifest.bytes}"
        if manifest.format != format_name(self.bits):
            return f"its format is {manifest.format}"
        source = json_object_or_none(self.source / CONFIG) or {}
        if config != converted_config(source, self.bits).encode():
            return "its config.json is not that of its source"
        try:
            tensors = read_header(weights).tensors
        except CheckpointError:
            return "the header of its weights is damaged"
        if len(tensors) != manifest.tensors or not is_planned(tensors, self.bits, weights):
            return "its tensors are not the ones that a conversion has"
        return None

    def own_names(self, place: Path) -> Collection[str]:
        return CONFIG, WEIGHTS, MANIFEST

    def write(self, destination: Path, hashes: SourceHashes) -> None:
        convert(
            self.source,
            destination,
            self.origin.repository,
            self.origin.revision,
            bits=self.bits,
            progress=self.progress,
            hashes=hashes,
            way_out=WAY_OUT,
        )


def verify_conversion(
    source: Path,
    settings: CacheSettings,
    progress: Progress,
    bits: int | None = None,
    place: Path | None = None,
) -> Path:
    """Hash a drafter and its conversion again and hold both to the manifest; returns the place.

    bits: of its codes; None is 8, and 4 where that is what is there
    place: the conversion; None takes the one that `prepare_drafter` would find or make. Raises
    CheckpointError when there is none, or when anything differs.
    """
    forms, source = (bits,) if bits else (8, 4), source.resolve()
    return verify([_keeper(source, settings, progress, form, place) for form in forms])


def _keeper(
    source: Path,
    settings: CacheSettings,
    progress: Progress,
    bits: int,
    place: Path | None = None,
) -> Keeper:
    """What keeps the conversion of `source`: in `place` if there is one, else where settings say."""
    weights = source / WEIGHTS
    conversion = DrafterConversion(source, find_origin(source), bits, progress)
    kept = cache_places(weights, conversion.origin, f"q{bits}g64", settings)
    places = (place,) if place else kept
    return Keeper(conversion, places, SourceHashes((weights,), places, progress), progress)


def _stated(folder: Path) -> Kind:
    """What a folder's config.json says that it is, whether its weights hold that or not."""
    config = json_object_or_none(folder / CONFIG)
    named = None if config is None else config.get("architectures")
    if config is None or not is_dflash2(named):
        return Kind.OTHER
    quantized = any(config.get(name) for name in QUANTIZATION)
    return Kind.QUANTIZED if quantized else Kind.SOURCE
