"""JSON objects in files: read with a sentence for what is none, or written the one way.

Needs the standard library only.
"""

import json
from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.regular_file import open_regular
from lse_mlx.errors import CheckpointError, reason

DOWNLOAD_AGAIN = "download the checkpoint again"
DEEPEST = 100
"""Objects and lists within each other that are read; what follows a value down may then recurse."""


def read_json_object(path: Path, way_out: str = DOWNLOAD_AGAIN) -> dict[str, Any]:
    """The object in the JSON file `path`, its keys in their order.

    Raises CheckpointError, which names the file and ends in `way_out`, if there is none.
    """
    try:
        with open_regular(path) as file:
            held = json.loads(file.read().decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): {way_out}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({reason(error)}): {way_out}.") from error
    if not isinstance(held, dict):
        kind = type(held).__name__
        raise CheckpointError(f"{path} holds a {kind}, not a JSON object: {way_out}.")
    if _too_deep(held):
        raise CheckpointError(f"{path} nests its values more than {DEEPEST} deep: {way_out}.")
    return held


def json_object_or_none(path: Path) -> dict[str, Any] | None:
    """The same, or None where there is no such object: somebody else says so better."""
    try:
        return read_json_object(path)
    except CheckpointError:
        return None


def json_text(values: dict[str, Any]) -> str:
    """`values` indented by two, in ASCII, with one line end."""
    return json.dumps(values, indent=2) + "\n"


def _too_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
