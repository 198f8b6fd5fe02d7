"""Whether a folder holds a whole checkpoint. Reads names, sizes, JSON and headers, never weights."""

import os
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from lse_mlx.checkpoints.json_object import read_json_object
from lse_mlx.checkpoints.names import CONFIG, INDEX, WEIGHTS, is_dflash2
from lse_mlx.checkpoints.safetensors_header import SafetensorsHeader, read_header
from lse_mlx.errors import CheckpointError

# What pickled or foreign weights are called; they are named in the refusal and never opened.
FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".npz", ".h5", ".msgpack")
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))

_SHARD = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")
_POINTER = b"version https://git-lfs.github.com/spec/"


def check_complete(folder: Path, *, tokenizer: bool = False) -> None:
    """Raise CheckpointError, naming the file, unless `folder` is a whole checkpoint.

    Whole is: a config.json that is a JSON object, and weights as safetensors (one file, the shards
    of an index, or every numbered shard) whose headers fill their files to the byte. With
    `tokenizer`, also the files of one; a drafter has none, so none is asked of it.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is not a folder: name the folder of a checkpoint.")
    config = _read_object(folder / CONFIG, "no config.json: name the folder of a checkpoint")
    headers = {path.name: _header(path) for path in weight_files(folder)}
    if os.path.exists(folder / INDEX):
        _check_index(folder, headers)
    if tokenizer and not is_dflash2(config.get("architectures")):
        _check_tokenizer(folder)


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights in `folder`, those that should be there; none is opened.

    Raises CheckpointError if there are none, or if a shard's name is missing from a numbered set.
    """
    if os.path.exists(folder / INDEX):
        names = sorted(set(_weight_map(folder).values()))
        # A loader takes every file of this name, also one that the index does not know.
        extra = {*safetensors_names(folder)} - {*names}
        return [folder / name for name in (*names, *sorted(extra))]
    found = safetensors_names(folder)
    if not found:
        _refuse_without_weights(folder)
    numbered = [match for name in found if (match := _SHARD.fullmatch(name))]
    wanted = set(found)
    for total in {match[2] for match in numbered}:
        wanted |= {f"model-{i:05}-of-{total}.safetensors" for i in range(1, int(total) + 1)}
    return [folder / name for name in sorted(wanted)]


def safetensors_names(folder: Path) -> list[str]:
    """Names of what mlx-lm loads as weights from `folder`, in order; raises as `file_names`."""
    return [name for name in _names(folder) if fnmatchcase(name, "model*.safetensors")]


def file_names(folder: Path) -> list[str]:
    """Names of all files in `folder`, in order. Raises CheckpointError where it cannot be listed."""
    return [name for name in _names(folder) if os.path.isfile(folder / name)]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be listed ({error.strerror}): make it readable, or name another folder."
        ) from error


def is_lfs_pointer(path: Path) -> bool:
    """Whether `path` is what Git leaves where a large file was not fetched."""
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def _refuse(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{path} {what}.")


def _check_file(path: Path, missing: str) -> None:
    """Refuse what cannot be the file: not there, a dangling link, empty, or a Git LFS pointer."""
    again = "download the checkpoint again"
    try:
        if path.is_symlink() and not path.exists():
            _refuse(path, f"is a link to a file that is not there: {again}")
        if not path.exists():
            if _interrupted(path):
                _refuse(path, f"is missing, its download was interrupted: {again}")
            raise CheckpointError(f"{path.parent} has {missing}.")
        if not path.is_file():
            _refuse(path, f"is not a file: {again}")
        if path.stat().st_size == 0:
            _refuse(path, f"is empty: {again}")
        if is_lfs_pointer(path):
            _refuse(path, "is a Git LFS pointer and not the file: run `git lfs pull` in its folder")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): {again}.") from error


def _interrupted(path: Path) -> bool:
    """Whether a download tool left a part of `path` (or of any file, where parts have no names)."""
    for folder in (path.parent, path.parent / ".cache" / "huggingface" / "download"):
        with suppress(OSError):
            if any(name.endswith(".incomplete") for name in os.listdir(folder)):
                return True
    return False


def _read_object(path: Path, missing: str) -> dict[str, Any]:
    _check_file(path, missing)
    return read_json_object(path)


def _header(path: Path) -> SafetensorsHeader:
    _check_file(path, f"no {path.name}, which is part of it: download the checkpoint again")
    return read_header(path)


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    named = _read_object(path, f"no {INDEX}").get("weight_map")
    if not isinstance(named, dict) or not named:
        _refuse(path, 'has no "weight_map": download the checkpoint again')
    for name in named.values():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            _refuse(path, f"names {name!r}, which is no file beside it: download it again")
        if not name.endswith(".safetensors"):
            _refuse(path, f"names {name!r}, but only safetensors files are read: use another build")
    return named


def _check_index(folder: Path, headers: dict[str, SafetensorsHeader]) -> None:
    for tensor, name in _weight_map(folder).items():
        if tensor not in headers[name].tensors:
            _refuse(
                folder / name,
                f"does not hold {tensor}, which {INDEX} places there: "
                "download the checkpoint again",
            )


def _check_tokenizer(folder: Path) -> None:
    for names in TOKENIZERS:
        if any(os.path.lexists(folder / name) for name in names):
            for name in names:
                _check_file(folder / name, f"no {name}: download the checkpoint again")
            return
    raise CheckpointError(
        f"{folder} has no tokenizer (tokenizer.json): download the checkpoint again."
    )


def _refuse_without_weights(folder: Path) -> NoReturn:
    foreign = [name for name in _names(folder) if name.endswith(FOREIGN)]
    if foreign:
        raise CheckpointError(
            f"{folder} holds its weights as {foreign[0]}, and such files can run code or are of "
            "another format: name a build with model.safetensors."
        )
    if _interrupted(folder / WEIGHTS):
        _refuse(folder / WEIGHTS, "is missing, its download was interrupted: download it again")
    raise CheckpointError(
        f"{folder} has no weights (model.safetensors or its shards): download the checkpoint again."
    )
