"""What a conversion says of itself and its source. Needs the standard library only."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.json_object import json_object_or_none, json_text, read_json_object
from lse_mlx.checkpoints.names import MANIFEST
from lse_mlx.errors import CheckpointError

REFERENCE_IMPLEMENTATION = (
    "https://github.com/z-lab/dflash/blob/"
    "07ebd93db9f472af339b644bb70221ad8428328a/dflash/model_mlx.py"
)
CONVERSION = "FP32 min/max; BF16 scale and bias; codes selected against stored scale/bias"


def format_name(bits: int) -> str:
    """What a manifest calls the format with `bits` bits a code."""
    return f"MLX affine Q{bits} group64"


def stated_format(folder: Path) -> object:
    """The format that the conversion in `folder` says it has; None where it says none."""
    return (json_object_or_none(folder / MANIFEST) or {}).get("format")


@dataclass(frozen=True)
class Manifest:
    """The content of source-repository.json, in the order of the file.

    source_sha256, sha256: of the two model.safetensors, 64 lower-case hexadecimal digits
    bytes: size of the converted model.safetensors; tensors: how many it holds
    """

    source_repository: str
    source_revision: str
    source_sha256: str
    reference_implementation: str
    format: str
    conversion: str
    bytes: int
    sha256: str
    tensors: int

    def text(self) -> str:
        """The file's text."""
        return json_text(asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read `folder`/source-repository.json.

        Raises CheckpointError, naming the file, if it cannot be read or does not say all of this.
        """
        path = folder / MANIFEST
        values = read_json_object(path, "convert the checkpoint again")
        held: dict[str, Any] = {field.name: values.get(field.name) for field in fields(cls)}
        for field in fields(cls):
            if type(held[field.name]) is not field.type:
                raise CheckpointError(
                    f"The {field.name} in {path} is {held[field.name]!r} instead of "
                    f"{'a count' if field.type is int else 'text'}: convert the checkpoint again."
                )
        return cls(**held)
