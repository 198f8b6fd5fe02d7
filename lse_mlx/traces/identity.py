"""What a target is, by the contents of its files: the names that traces are bound to."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from lse_mlx.checkpoints.gate.tokenizer_identity import CONFIG as TOKENIZER_CONFIG
from lse_mlx.checkpoints.gate.tokenizer_identity import FILES, OTHER_FILES
from lse_mlx.checkpoints.hashing import hash_files
from lse_mlx.checkpoints.names import CONFIG
from lse_mlx.checkpoints.progress import Progress, Silent
from lse_mlx.errors import CheckpointError, printable
from lse_mlx.protocol.fields import LONGEST_TEXT
from lse_mlx.target.model import Target

PHASE = "hash-target"
TOKENIZER_FILES = (*FILES, *OTHER_FILES, TOKENIZER_CONFIG, "added_tokens.json")
"""Every file that says what a token is or how text becomes tokens; those that are there count."""


@dataclass(frozen=True)
class TargetIdentity:
    """Two revisions, each "sha256:" and 64 digits: of weights and config.json, and of the tokenizer.

    They name contents, not places: a copy in another folder has the same ones.
    """

    target_model_revision: str
    tokenizer_revision: str


def identify(folder: Path, progress: Progress | None = None) -> TargetIdentity:
    """The identity of the target checkpoint in `folder`. Reads its weights from end to end.

    progress: told how many bytes of the weights are hashed
    Raises CheckpointError for a file that is missing or cannot be read.
    """
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        raise CheckpointError(
            f"{folder} has no model*.safetensors: download the weights of this checkpoint."
        )
    tokenizer = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return TargetIdentity(
        _revision([folder / CONFIG, *weights], progress or Silent(), PHASE),
        _revision(tokenizer, Silent(), PHASE),
    )


def device_of(target: Target) -> str:
    """What a target's numbers were computed by; another may round them otherwise."""
    registry = target.registry
    chip = str(mx.device_info().get("device_name", "") or "unnamed chip")
    name = f"{registry.form} on {chip}, MLX {version('mlx')}"
    if registry.on_device:  # where other kernels are another device
        name += f", {registry.choices.mode} kernels{', exact' if registry.choices.exact else ''}"
    return printable(name)[:LONGEST_TEXT]


def _revision(files: Sequence[Path], progress: Progress, phase: str) -> str:
    """SHA-256 over a line `<SHA-256 of the file> <its name>` a file, in the order of the names."""
    named = sorted(files, key=lambda file: file.name)
    hashes = hash_files(named, progress, phase)
    lines = [f"{digest} {file.name}\n" for digest, file in zip(hashes, named, strict=True)]
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()
