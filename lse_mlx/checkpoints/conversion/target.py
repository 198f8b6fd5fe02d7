"""A bf16 target is converted once to 4-bit codes, by mlx-lm and only when somebody asks for it."""

import contextlib
import glob
import io
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from lse_mlx.checkpoints.complete import check_complete, file_names, safetensors_names
from lse_mlx.checkpoints.conversion.cached import NO_MANIFEST, WAY_OUT, Inspection, Keeper, verify
from lse_mlx.checkpoints.conversion.manifest import format_name
from lse_mlx.checkpoints.conversion.new_folder import check_new, new_folder, refusals_told
from lse_mlx.checkpoints.conversion.places import CacheSettings, cache_places
from lse_mlx.checkpoints.conversion.source_hashes import SourceHashes
from lse_mlx.checkpoints.conversion.target_manifest import WEIGHTS, TargetManifest, WrittenFile
from lse_mlx.checkpoints.disk import check_room
from lse_mlx.checkpoints.hashing import hash_file, hash_files
from lse_mlx.checkpoints.names import CONFIG, GROUP_SIZE, INDEX, MANIFEST, QUANTIZATION
from lse_mlx.checkpoints.origin import NOTE, Origin, find_origin
from lse_mlx.checkpoints.plain_name import plain_name
from lse_mlx.checkpoints.progress import Progress, Silent
from lse_mlx.checkpoints.safetensors_header import SafetensorsHeader, read_header
from lse_mlx.checkpoints.target_config import check_supported, read_config
from lse_mlx.errors import CheckpointError, reason

SMALL_FILES = ("*.json", "*.jsonl", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""What travels along with the weights: tokenizer, chat template, generation settings. No code."""
NOT_SMALL = (INDEX, MANIFEST, NOTE)
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
        weights = _weights(folder)
    except CheckpointError:
        return False
    if any(part.get(name) for part in (config, text) for name in QUANTIZATION):
        return False
    return not os.path.exists(folder / "hf_quant_config.json") and bool(weights)


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
    keeper = _keeper(folder, settings, progress, bits)
    return keeper.find() or keeper.make()


def find_target(
    folder: Path, settings: CacheSettings, progress: Progress, bits: int = 4
) -> Path | None:
    """The valid conversion that `prepare_target` would use, or None; it makes none."""
    if not is_unquantized_target(folder):
        return None
    return _keeper(folder, settings, progress, bits).find()


def convert_target(folder: Path, destination: Path, progress: Progress, bits: int = 4) -> None:
    """Convert the target in `folder` into the new folder `destination`.

    Raises CheckpointError when it is no unquantized target or cannot be converted.
    """
    conversion = _conversion(folder, progress, bits)
    check_new(destination)
    files = _weights(conversion.source)
    conversion.write(destination, SourceHashes(files, (), progress, "hash-target"))


def verify_target(
    folder: Path,
    settings: CacheSettings,
    progress: Progress,
    bits: int | None = None,
    place: Path | None = None,
) -> Path:
    """Hash a target and its conversion again and hold both to the manifest; returns the place.

    bits: of its codes; None is 4, and 8 where that is what is there
    place: the conversion; None takes the one that `prepare_target` would find or make. Raises
    CheckpointError when there is none, or when anything differs.
    """
    forms = (bits,) if bits else (4, 8)
    return verify([_keeper(folder, settings, progress, form, place) for form in forms])


@dataclass(frozen=True)
class TargetConversion:
    """An unquantized target and its codes of `bits`; see cached.Conversion."""

    source: Path
    origin: Origin
    bits: int
    progress: Progress

    def inspect(self, place: Path) -> Inspection:
        try:
            manifest = TargetManifest.read(place)
        except CheckpointError:
            return NO_MANIFEST
        names = [file.name for file in _weights(self.source)]
        recorded = manifest.source_weights
        # None where the source's files are others by now.
        hashes = tuple(recorded.values()) if list(recorded) == names else ()
        written = {name: file.sha256 for name, file in manifest.files.items()}
        return Inspection(self._fault(place, manifest), hashes, written)

    def _fault(self, place: Path, manifest: TargetManifest) -> str | None:
        if fault := manifest.fault(place):
            return fault
        if manifest.format != format_name(self.bits):
            return f"its format is {manifest.format}"
        if manifest.source_files != _small_hashes(self.source):
            return "the source's config or tokenizer changed"
        try:
            for name, file in manifest.files.items():
                small = not fnmatchcase(name, WEIGHTS)
                if small and hash_file(place / name, Silent(), "") != file.sha256:
                    return f"its {name} is not the one that was written"
            check_complete(place)
        except CheckpointError as error:
            return f"it is damaged: {error}".removesuffix(".")
        return None

    def own_names(self, place: Path) -> Collection[str]:
        names = set(_small_names(self.source))
        with contextlib.suppress(CheckpointError):
            names |= TargetManifest.read(place).files.keys()
        return CONFIG, INDEX, MANIFEST, WEIGHTS, *map(glob.escape, names)

    def write(self, destination: Path, hashes: SourceHashes) -> None:
        check_complete(self.source)
        small = _small_hashes(self.source)
        headers = [read_header(file) for file in _weights(self.source)]
        needed = sum(_output_bytes(header, self.bits) for header in headers)
        with refusals_told(self.source, destination):
            check_room(destination.parent, needed, f"The conversion of {self.source}", WAY_OUT)
            with new_folder(destination) as folder:
                weights = hashes.get("so that a later start can tell whether it changed")
                self._write_model(folder)
                for name in small:
                    if name != CONFIG:
                        shutil.copyfile(self.source / name, folder / name)
                self._manifest(folder, weights, small).write(folder)
                hashes.check_unchanged()

    def _write_model(self, folder: Path) -> None:
        try:
            config = read_config(self.source)
            # mlx-lm knows `qwen3_5` or `qwen3_5_moe`: the text part's own name is the same class.
            family = {"model_type": config["model_type"].removesuffix("_text")}
            with plain_name(self.source) as source:
                model, read = load_model(source, lazy=True, model_config=family)
            _cast(model, config)
            with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm tells bits per weight
                model, read = quantize_model(model, read, GROUP_SIZE, self.bits)
            _compute(model, self.progress)
            total = sum(array.nbytes for _, array in _arrays(model))
            self.progress.advance("write", 0, total)
            save_model(folder, model, donate_model=True)
            # Not the config as it was read: reading it moves and removes fields.
            save_config(config | {QUANTIZATION[0]: read[QUANTIZATION[0]]}, folder / CONFIG)
            self.progress.advance("write", total, total)
        except _CONVERSION_ERRORS as error:
            raise CheckpointError(
                f"{self.source} cannot be converted ({reason(error)}): check the room in "
                f"{folder.parent}, or download the checkpoint again."
            ) from error

    def _manifest(
        self, folder: Path, hashes: tuple[str, ...], small: dict[str, str]
    ) -> TargetManifest:
        names = [file.name for file in _weights(self.source)]
        written = tuple(folder / name for name in file_names(folder))
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


def _conversion(folder: Path, progress: Progress, bits: int) -> TargetConversion:
    if not is_unquantized_target(folder):
        raise CheckpointError(
            f"{folder} is no unquantized target: name the folder of a bf16 qwen3_5, qwen3_5_moe or "
            "qwen3 one."
        )
    source = folder.resolve()
    return TargetConversion(source, find_origin(source), bits, progress)


def _keeper(
    folder: Path,
    settings: CacheSettings,
    progress: Progress,
    bits: int,
    place: Path | None = None,
) -> Keeper:
    """What keeps the conversion of `folder`: in `place` if there is one, else where settings say."""
    conversion = _conversion(folder, progress, bits)
    files = _weights(conversion.source)
    kept = cache_places(files[0], conversion.origin, f"q{bits}g{GROUP_SIZE}", settings)
    places = (place,) if place else kept
    hashes = SourceHashes(files, places, progress, "hash-target")
    return Keeper(conversion, places, hashes, progress)


def _weights(folder: Path) -> tuple[Path, ...]:
    """The files that mlx-lm reads."""
    return tuple(folder / name for name in safetensors_names(folder))


def _small_names(source: Path) -> list[str]:
    """Names of config.json and of what travels along."""
    return [
        name
        for name in file_names(source)
        if name not in NOT_SMALL and any(fnmatchcase(name, pattern) for pattern in SMALL_FILES)
    ]


def _small_hashes(source: Path) -> dict[str, str]:
    return {name: hash_file(source / name, Silent(), "") for name in _small_names(source)}


def _output_bytes(header: SafetensorsHeader, bits: int) -> int:
    """Bytes of the conversion of one file: no less than it will have."""
    total = 0
    for tensor in header.tensors.values():
        # The experts of a layer are one stack of matrices.
        matrix = len(tensor.shape) in (2, 3) and tensor.shape[-1] % GROUP_SIZE == 0
        values = prod(tensor.shape)
        total += values * bits // 8 + values // GROUP_SIZE * 2 * 4 if matrix else tensor.size
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
