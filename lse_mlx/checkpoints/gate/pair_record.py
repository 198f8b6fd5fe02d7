"""The record of a pair, told from its two folders: `pair.json`, which the gate holds drafters to."""

import glob
import hashlib
import re
from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.drafter_kind import read_drafter_values
from lse_mlx.checkpoints.gate.target_facts import read_target
from lse_mlx.checkpoints.json_object import json_text
from lse_mlx.checkpoints.names import WEIGHTS
from lse_mlx.checkpoints.origin import Origin, find_origin
from lse_mlx.checkpoints.pairing import PairRecord
from lse_mlx.checkpoints.regular_file import open_regular
from lse_mlx.errors import CheckpointError, reason

PAIR_FILE = "pair.json"
"""What the record is called, beside a drafter's weights."""


def pair_record_of(
    name: str, target: Path, drafter: Path, patterns: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The record of a trained pair in the JSON shape of PairRecord.

    name: what the pair is called: lower-case letters, digits, ".", "_", "-"
    patterns: of the target's name; its repository or folder if none are given
    The drafter's whole config.json is in it, and the SHA-256 of its weights and of the target's
    tokenizer. Repositories and revisions are there where they are known.
    Raises CheckpointError if a folder is no such checkpoint, or `name` is no name.
    """
    facts, origin = read_target(target), find_origin(target)
    weights = drafter / WEIGHTS
    config = read_drafter_values(drafter)
    try:
        with open_regular(weights) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = weights.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"{weights} cannot be read ({reason(error)}): name a whole drafter."
        ) from error
    record = {
        "name": name,
        "targets": list(patterns) or [glob.escape(origin.repository)],
        "target": {
            **_published(origin),
            "hidden_size": facts.hidden_size,
            "num_hidden_layers": facts.layer_count,
            "vocab_size": facts.vocab_size,
            "tokenizer_sha256": facts.tokenizer.sha256,
        },
        "drafter": {
            **_published(find_origin(drafter)),
            "bytes": size,
            "sha256": sha256,
            "config": config,
        },
    }
    PairRecord.parse(record, f"The record of {name}")
    return record


def write_pair_record(
    path: Path, name: str, target: Path, drafter: Path, patterns: tuple[str, ...] = ()
) -> None:
    """Write `pair_record_of` the pair to `path`; raises as it does."""
    text = json_text(pair_record_of(name, target, drafter, patterns))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({reason(error)}): name another file."
        ) from error


def _published(origin: Origin) -> dict[str, str]:
    """Repository and revision, where the origin is one that a record can name."""
    is_commit = re.fullmatch(r"[0-9a-f]{40}", origin.revision)
    if not origin.known or not is_commit or origin.repository.count("/") != 1:
        return {}
    return {"repository": origin.repository, "revision": origin.revision}
