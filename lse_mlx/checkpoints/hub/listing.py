"""The hub's list of a repository's files: asked for, and taken only where it is sound throughout."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from huggingface_hub import constants
from huggingface_hub.utils import validate_repo_id

from lse_mlx.checkpoints.hub.files import RemoteFile
from lse_mlx.checkpoints.hub.requests import opened
from lse_mlx.checkpoints.json_object import json_object_or_none, json_text
from lse_mlx.errors import CheckpointError

HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Names of commits and of contents. They become names of files here, so they are nothing else."""

LONGEST = 64 << 20
"""Bytes of the longest list that is read."""

_FORMAT = 1
_ADDRESS = re.compile(r"https?://[^\s/]")


def ask_for_list(
    repository: str, revision: str | None, endpoint: str | None, name: str
) -> tuple[str, list[RemoteFile]]:
    """The commit that a revision stands at, and all of its files.

    name: what errors call it. Raises CheckpointError for an answer that is no such list, and what
    huggingface_hub raises.
    """
    validate_repo_id(repository)
    address = endpoint or constants.ENDPOINT
    if not _ADDRESS.match(address):
        raise CheckpointError(
            f"HF_ENDPOINT is {address!r}, which is no address of a hub: unset it, or give one like "
            "https://huggingface.co."
        )
    url = f"{address}/api/models/{repository}"
    if revision is not None:
        url += f"/revision/{quote(revision, safe='')}"
    with opened(f"{url}?blobs=true") as answer:
        text = bytearray()
        for piece in answer.iter_bytes():
            text += piece
            if len(text) > LONGEST:
                break
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"The hub's answer for {name} is no JSON: check HF_ENDPOINT and the network."
        ) from error
    match held:
        case {"sha": str(commit), "siblings": list(entries)} if HASH.fullmatch(commit):
            files = [file for entry in entries if (file := _file(entry)) is not None]
            if len(files) == len(entries):
                return commit, files
    raise CheckpointError(f"The hub's list of {name} gives no sizes and hashes: check HF_ENDPOINT.")


def _file(entry: object) -> RemoteFile | None:
    match entry:
        case {"rfilename": str(name), "size": int(size), "blobId": str(git), **rest}:
            match rest.get("lfs"):
                case None:
                    blob, large = git, False
                case {"sha256": str(blob)}:
                    large = True
                case _:
                    return None
            if HASH.fullmatch(git) and HASH.fullmatch(blob) and type(size) is int and size >= 0:
                return RemoteFile(name, size, blob, git, large)
    return None


def list_text(files: Sequence[RemoteFile]) -> str:
    """A list as huggingface_hub keeps it in its cache, for whoever uses that next."""
    entries = {file.name: {"size": file.size, "blob_id": file.git} for file in files}
    return json_text({"format_version": _FORMAT, "files": entries})


def listed_sizes(path: Path) -> dict[str, int]:
    """The bytes of each file in a list that was kept; of none where it is missing or unsound."""
    sizes: dict[str, int] = {}
    match json_object_or_none(path):
        case {"format_version": version, "files": dict(files)} if version == _FORMAT:
            for name, entry in files.items():
                if not isinstance(entry, dict) or type(entry.get("size")) is not int:
                    return {}
                sizes[name] = entry["size"]
    return sizes
