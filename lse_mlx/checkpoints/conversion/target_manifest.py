"""What a target's conversion says of itself and its source. Needs the standard library only."""

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.json_object import json_text, read_json_object
from lse_mlx.checkpoints.names import CONFIG, MANIFEST
from lse_mlx.errors import CheckpointError

WEIGHTS = "model*.safetensors"
WAY_OUT = "convert the checkpoint again"


@dataclass(frozen=True)
class WrittenFile:
    """Size and SHA-256 of a file of the conversion."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TargetManifest:
    """The content of source-repository.json beside a converted target, in the order of the file.

    source_weights: SHA-256 of each file of weights by its name; source_files: of the config and of
    what travels along; files: every file of the conversion but this one
    """

    source_repository: str
    source_revision: str
    source_weights: dict[str, str]
    source_files: dict[str, str]
    format: str
    conversion: str
    files: dict[str, WrittenFile]

    def write(self, folder: Path) -> None:
        """Write it to `folder`; raises OSError."""
        (folder / MANIFEST).write_text(json_text(asdict(self)), "ascii")

    @classmethod
    def read(cls, folder: Path) -> "TargetManifest":
        """Read it from `folder`; raises CheckpointError if it is not there or says anything else."""
        values = read_json_object(folder / MANIFEST, WAY_OUT)
        try:
            files = {name: WrittenFile(**about) for name, about in values.pop("files").items()}
            manifest = cls(**values, files=files)
        except (LookupError, TypeError, AttributeError) as error:
            raise _broken(folder) from error
        if not manifest._is_sound():
            raise _broken(folder)
        return manifest

    def _is_sound(self) -> bool:
        named: Any = (self.source_repository, self.source_revision, self.format, self.conversion)
        return (
            all(isinstance(text, str) for text in named)
            and _are_hashes(self.source_weights)
            and _are_hashes(self.source_files)
            and _are_hashes({name: file.sha256 for name, file in self.files.items()})
            and all(type(file.bytes) is int for file in self.files.values())
            # Names, not paths: nothing outside the folder is looked at.
            and not any("/" in name or name in ("", ".", "..") for name in self.files)
            and CONFIG in self.files
            and any(fnmatchcase(name, WEIGHTS) for name in self.files)
        )

    def fault(self, folder: Path) -> str | None:
        """What is missing in `folder`, by the sizes of its files."""
        for name, file in self.files.items():
            try:
                size = (folder / name).stat().st_size
            except (OSError, ValueError):  # ValueError: no file system has such a name
                return f"it is incomplete: {name} is missing"
            if size != file.bytes:
                return f"it is incomplete: {name} has {size} bytes instead of {file.bytes}"
        return None


def _are_hashes(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(value, str) for value in values.values())


def _broken(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder / MANIFEST} is not that of a converted target: {WAY_OUT}.")
