"""Which repository and revision a checkpoint on disk came from. Needs the standard library only."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from lse_mlx.checkpoints.json_object import json_object_or_none
from lse_mlx.checkpoints.names import MANIFEST

NOTE = "hf-origin.json"
"""What a download tool or a person leaves beside the weights."""
UNKNOWN = "unknown"
"""The revision where none is known."""


@dataclass(frozen=True)
class Origin:
    """A repository and its revision; known is False where both are only a guess from the folder."""

    repository: str
    revision: str
    known: bool

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


def find_origin(folder: Path) -> Origin:
    """The origin of the checkpoint in `folder`, from the first of these that says both:

    the path of a Hugging Face snapshot (`models--org--name/snapshots/revision`), which no file in a
    download can change; source-repository.json of a conversion (the origin of what was converted);
    hf-origin.json beside the weights. Else the repository is the folder's name and the revision
    "unknown". Raises nothing.
    """
    folder = folder.resolve()
    return (
        _of_snapshot(folder)
        or _stated(folder / MANIFEST, "source_repository", "source_revision")
        or _stated(folder / NOTE, "repository", "revision")
        or Origin(folder.name, UNKNOWN, known=False)
    )


def _of_snapshot(folder: Path) -> Origin | None:
    owner = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not owner.startswith("models--"):
        return None
    repository = owner.removeprefix("models--").replace("--", "/")
    return Origin(repository, folder.name, known=True) if repository else None


def _stated(path: Path, repository: str, revision: str) -> Origin | None:
    held = json_object_or_none(path) or {}
    named, at = held.get(repository), held.get(revision)
    if not _is_name(named) or not _is_name(at):
        return None
    return Origin(named, at, known=at != UNKNOWN)


def _is_name(said: object) -> TypeGuard[str]:
    # It becomes part of a folder's name.
    return isinstance(said, str) and said != "" and said.isprintable()
