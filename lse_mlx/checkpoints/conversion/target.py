"""A bf16 target is converted once to 4-bit codes, by mlx-lm and only when somebody asks for it."""

import contextlib
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from lse_mlx.checkpoints.complete import check_complete
from lse_mlx.checkpoints.conversion.cached import WAY_OUT, Keeper
from lse_mlx.checkpoints.conversion.manifest import MANIFEST, format_name, hash_file
from lse_mlx.checkpoints.conversion.new_folder import check_new, new_folder
from lse_mlx.checkpoints.conversion.places import CacheSettings, cache_places
from lse_mlx.checkpoints.conversion.source_hashes import SourceHashes, hash_files
from lse_mlx.checkpoints.conversion.target_manifest import TargetManifest, WrittenFile
from lse_mlx.checkpoints.origin import NOTE, Origin, find_origin
from lse_mlx.checkpoints.plain_name import plain_name
from lse_mlx.checkpoints.progress import Progress, Silent
from lse_mlx.checkpoints.safetensors_header import SafetensorsHeader, read_header
from lse_mlx.checkpoints.target_config import check_supported, read_config
from lse_mlx.errors import CheckpointError, reason

GROUP = 64
SPARE_BYTES = 16 << 20
QUANTIZATION = ("quantization", "quantization_config")
SMALL_FILES = ("*.json", "*.jsonl", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""What travels along with the weights: tokenizer, chat template, generation settings. No code."""
CONFIG = "config.json"
NOT_SMALL = ("model.safetensors.index.json", MANIFEST, NOTE)
TYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}

_CONVERSION_ERRORS = (
    # What mlx-lm and MLX raise on files that hold anything but what they expect.
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
)


def is_unquantized_target(folder: Path) -> bool:
    """Whether `folder` holds a target that this package runs and that nobody has quantized."""
    try:
        config = read_config(folder)
        text = check_supported(config, folder)
    except CheckpointError:
        return False
    if any(part.get(name) for part in (config, text) for name in QUANTIZATION):
        return False
    return not (folder / "hf_quant_config.json").exists() and bool(_weights(folder))


def prepare_target(
    folder: Path, settings: CacheSettings, progress: Progress, bits: int = 4
) -> Path:
    """The folder to load: `folder` itself unless it is an unquantized target, then its conversion.

    The conversion lies in `lse-q4g64` beside the source or where `settings` say (their `enabled` is
    about drafters), and is made where no valid one is there: whether to is the caller's to ask. Raises
    CheckpointError when it cannot be made.
    """
    if not is_unquantized_target(folder):
        return folder
    source = folder.resolve()
    conversion = TargetConversion(source, find_origin(source), bits, progress)
    places = _places(conversion, settings)
    hashes = SourceHashes(_weights(source), places, progress, "hash-target")
    return Keeper(conversion, places, hashes, progress).find_or_make()


def convert_target(folder: Path, destination: Path, progress: Progress, bits: int = 4) -> None:
    """Convert the target in `folder` into the new folder `destination`.

    Raises CheckpointError when it is no unquantized target or cannot be converted.
    """
    if not is_unquantized_target(folder):
        raise CheckpointError(
            f"{folder} is no unquantized target: name the folder of a bf16 qwen3_5 or qwen3 one."
        )
    check_new(destination)
    source = folder.resolve()
    conversion = TargetConversion(source, find_origin(source), bits, progress)
    hashes = SourceHashes(_weights(source), (), progress, "hash-target")
    conversion.write(destination, conversion.source_hashes(hashes))


def verify_target(
    folder: Path,
    settings: CacheSettings,
    progress: Progress,
    bits: int = 4,
    place: Path | None = None,
) -> Path:
    """Hash a target and its conversion again and hold both to the manifest; returns the place.

    place: the conversion; None takes the one that `prepare_target` would find or make. Raises
    CheckpointError when there is none, or when anything differs.
    """
    source = folder.resolve()
    conversion = TargetConversion(source, find_origin(source), bits, progress)
    files = _weights(source)
    places = (place,) if place else _places(conversion, settings)
    there = next((p for p in places if (p / MANIFEST).exists()), None)
    if there is None:
        raise CheckpointError(
            f"{source} has no conversion in {places[0]}: make one with `lse-mlx convert`."
        )
    manifest = TargetManifest.read(there)
    fault = conversion.fault(there, manifest)
    if fault is None and hash_files(files, progress, "hash-target") != (
        conversion.hashes_in(manifest)
    ):
        fault = "the source's weights are not the ones it was made of"
    if fault is None:
        written = tuple(there / name for name in manifest.files)
        found = hash_files(written, progress, "hash-output")
        if found != tuple(file.sha256 for file in manifest.files.values()):
            fault = "its files are not the ones that were written"
    if fault is not None:
        raise CheckpointError(
            f"The conversion in {there} is not valid ({fault}): remove it and convert again."
        )
    return there


@dataclass(frozen=True)
class TargetConversion:
    """An unquantized target and its codes of `bits`; see cached_conversion.Conversion."""

    source: Path
    origin: Origin
    bits: int
    progress: Progress

    def inspect(self, place: Path) -> tuple[str | None, tuple[str, ...]]:
        try:
            manifest = TargetManifest.read(place)
        except CheckpointError:
            return "it has no readable manifest", ()
        return self.fault(place, manifest), self.hashes_in(manifest)

    def hashes_in(self, manifest: TargetManifest) -> tuple[str, ...]:
        """The recorded hashes of the source's files; none where they are other files by now."""
        names = [file.name for file in _weights(self.source)]
        recorded = manifest.source_weights
        return tuple(recorded.values()) if list(recorded) == names else ()

    def fault(self, place: Path, manifest: TargetManifest) -> str | None:
        """What is wrong with the folder `place`, which has this manifest."""
        if fault := manifest.fault(place):
            return fault
        if manifest.format != format_name(self.bits):
            return f"its format is {manifest.format}"
        if manifest.source_files != _small_hashes(self.source):
            return "the source's config or tokenizer changed"
        return None

    def source_hashes(self, hashes: SourceHashes) -> tuple[str, ...]:
        return hashes.get("so that a later start can tell whether it changed")

    def write(self, destination: Path, hashes: tuple[str, ...]) -> None:
        check_complete(self.source)
        small = _small_hashes(self.source)
        with new_folder(destination) as folder:
            self._check_room(folder)
            try:
                self._write_model(folder)
                for name in small:
                    if name != CONFIG:
                        shutil.copyfile(self.source / name, folder / name)
                self._manifest(folder, hashes, small).write(folder)
            except OSError as error:
                raise CheckpointError(
                    f"The conversion of {self.source} cannot be written in {destination.parent} "
                    f"({error.strerror}): free some room there and try again."
                ) from error
            except _CONVERSION_ERRORS as error:
                raise CheckpointError(
                    f"{self.source} cannot be converted ({reason(error)}): check the room in "
                    f"{destination.parent}, or download the checkpoint again."
                ) from error

    def _write_model(self, folder: Path) -> None:
        config = read_config(self.source)
        # mlx-lm knows `qwen3_5` alone: the text part's own name is the same class.
        family = {"model_type": config["model_type"].removesuffix("_text")}
        with plain_name(self.source) as source:
            model, read = load_model(source, lazy=True, model_config=family)
        _cast(model, config)
        with contextlib.redirect_stdout(sys.stderr):  # mlx-lm tells bits per weight
            model, read = quantize_model(model, read, GROUP, self.bits)
        _compute(model, self.progress)
        total = sum(array.nbytes for _, array in _arrays(model))
        self.progress.advance("write", 0, total)
        save_model(folder, model, donate_model=True)
        # Not the config as it was read: reading it moves and removes fields.
        save_config(config | {QUANTIZATION[0]: read[QUANTIZATION[0]]}, folder / CONFIG)
        self.progress.advance("write", total, total)

    def _check_room(self, folder: Path) -> None:
        headers = [read_header(file) for file in _weights(self.source)]
        needed = sum(_output_bytes(header, self.bits) for header in headers) + SPARE_BYTES
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise CheckpointError(
                f"The conversion of {self.source} needs {needed >> 20} MiB in {folder.parent}, where "
                f"{free >> 20} MiB are free: free some, or {WAY_OUT}."
            )

    def _manifest(
        self, folder: Path, hashes: tuple[str, ...], small: dict[str, str]
    ) -> TargetManifest:
        names = [file.name for file in _weights(self.source)]
        written = tuple(sorted(path for path in folder.iterdir() if path.is_file()))
        for path in written:
            if path.suffix == ".safetensors":
                read_header(path)  # whole, whatever the library did on a full disk
        sums = hash_files(written, self.progress, "hash-output")
        return TargetManifest(
            source_repository=self.origin.repository,
            source_revision=self.origin.revision,
            source_weights=dict(zip(names, hashes, strict=True)),
            source_files=small,
            format=format_name(self.bits),
            conversion=f"mlx-lm {version('mlx-lm')}",
            files={
                path.name: WrittenFile(path.stat().st_size, value)
                for path, value in zip(written, sums, strict=True)
            },
        )


def _places(conversion: TargetConversion, settings: CacheSettings) -> tuple[Path, ...]:
    source, form = conversion.source, f"q{conversion.bits}g{GROUP}"
    return cache_places(_weights(source)[0], conversion.origin, form, settings)


def _weights(folder: Path) -> tuple[Path, ...]:
    """The files that mlx-lm reads."""
    return tuple(sorted(folder.glob("model*.safetensors")))


def _small_hashes(source: Path) -> dict[str, str]:
    """Name and SHA-256 of config.json and of what travels along."""
    found = {p.name: p for pattern in SMALL_FILES for p in source.glob(pattern) if p.is_file()}
    names = sorted(name for name in found if name not in NOT_SMALL)
    return {name: hash_file(found[name], Silent(), "") for name in names}


def _output_bytes(header: SafetensorsHeader, bits: int) -> int:
    """Bytes of the conversion of one file: no less than it will have."""
    total = 0
    for tensor in header.tensors.values():
        matrix = len(tensor.shape) == 2 and tensor.shape[1] % GROUP == 0
        values = prod(tensor.shape)
        total += values * bits // 8 + values // GROUP * 2 * 4 if matrix else tensor.size
    return total


def _cast(model: nn.Module, config: dict[str, Any]) -> None:
    """Give the parameters the type that the config names, as mlx-lm's own converter does."""
    named = config.get("torch_dtype") or config.get("text_config", {}).get("dtype")
    dtype = TYPES.get(named) if isinstance(named, str) else None
    if dtype is None:
        return
    wanted = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, value: mx.array) -> mx.array:
        floats = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if floats and wanted(path) else value

    model.update(tree_map_with_path(cast, model.parameters()))


def _arrays(model: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())  # pyright: ignore[reportReturnType]


def _compute(model: nn.Module, progress: Progress) -> None:
    """Evaluate the parameters one after the other, so that no more of the source is in memory."""
    arrays = _arrays(model)
    total, done = sum(array.nbytes for _, array in arrays), 0
    progress.advance("quantize-target", 0, total)
    for name, array in arrays:
        mx.eval(array)
        mx.clear_cache()
        done += array.nbytes
        progress.advance("quantize-target", done, total, name)
