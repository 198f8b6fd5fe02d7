"""`lse-mlx models`: the known pairs, and what of them is on this machine."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lse_mlx import demo_pair
from lse_mlx.checkpoints.conversion.places import CacheSettings, cache_places
from lse_mlx.checkpoints.disk import human
from lse_mlx.checkpoints.hub.cache import Cached, HubCache
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.names import CONFIG, WEIGHTS
from lse_mlx.checkpoints.origin import find_origin
from lse_mlx.checkpoints.pairing import DrafterRecord, PairRecord, TargetRecord, registered
from lse_mlx.checkpoints.resolve import DEMO, wanted_drafter, wanted_target
from lse_mlx.cli.common import one_sentence_errors
from lse_mlx.errors import CheckpointError

FORM = "q8g64"
"""The conversion that a drafter gets by itself."""


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the known pairs of target and drafter, and what of them is on this machine."""
    with one_sentence_errors():
        cache = Hub().cache
        pairs = describe(cache, CacheSettings.from_environment(os.environ))
        if as_json:
            print(json.dumps({"cache": str(cache.folder), "pairs": pairs}, ensure_ascii=False))
        else:
            print("\n".join(lines(pairs)))


def describe(cache: HubCache, settings: CacheSettings) -> list[dict[str, Any]]:
    """Every registered pair as JSON values. Reads names, sizes and headers; no network.

    A part's "state" is "packaged", "whole", "partial", "absent", "unreadable" or, where no
    repository is known, "unpublished"; "fault" says why a partial or unreadable one cannot be used.
    """
    pairs: list[dict[str, Any]] = []
    for record in registered():
        target = _part(record, record.target, cache)
        drafter = _part(record, record.drafter, cache)
        drafter["converted"] = _converted(drafter["folder"], settings)
        pairs.append(
            {
                "name": record.name,
                "targets": list(record.targets),
                "target": target,
                "drafter": drafter,
            }
        )
    return pairs


def _part(
    record: PairRecord, part: TargetRecord | DrafterRecord, cache: HubCache
) -> dict[str, Any]:
    held = {"repository": part.repository, "revision": part.revision, "bytes": part.bytes}
    absent = {"fault": "", "cached_bytes": 0, "folder": None}
    is_target = isinstance(part, TargetRecord)
    if record.name == DEMO:
        weights = (demo_pair.TARGET if is_target else demo_pair.DRAFTER) / WEIGHTS
        return {**held, "bytes": os.path.getsize(weights), "state": "packaged", **absent}
    if part.repository is None:
        return {**held, "state": "unpublished", **absent}
    try:
        cached = cache.state(wanted_target(record) if is_target else wanted_drafter(record))
    except CheckpointError as error:  # one that may not be looked into does not hide the others
        return {**held, "state": "unreadable", **absent, "fault": str(error)}
    state = _state(cached)
    return {
        **held,
        "state": state,
        "fault": cached.fault if state == "partial" else "",
        "cached_bytes": cached.bytes,
        "folder": str(cached.folder) if cached.folder else None,
    }


def _state(cached: Cached) -> str:
    if cached.whole:
        return "whole"
    return "partial" if cached.folder or cached.bytes else "absent"


def _converted(folder: str | None, settings: CacheSettings) -> str | None:
    """Where the conversion of the drafter in a folder of the cache lies, or None."""
    if folder is None:
        return None
    source = Path(folder).resolve()
    for place in cache_places(source / WEIGHTS, find_origin(source), FORM, settings):
        if all(os.path.isfile(place / name) for name in (CONFIG, WEIGHTS)):
            return str(place)
    return None


def lines(pairs: list[dict[str, Any]]) -> list[str]:
    """A line for each part, in columns that are as wide as what they hold, whatever the terminal."""
    rows = [("PAIR", "REPOSITORY", "SIZE", "HERE")]
    for pair in pairs:
        rows.append((pair["name"], "", "", ""))
        for role in ("target", "drafter"):
            part = pair[role]
            name = f"{part['repository']}@{part['revision'][:8]}" if part["repository"] else "-"
            rows.append(
                (f"  {role}", name, human(part["bytes"]) if part["bytes"] else "", _here(part))
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _here(part: dict[str, Any]) -> str:
    here = {
        "packaged": "in the package",
        "whole": "whole",
        "absent": "not downloaded",
        "unpublished": "no build known",
        "unreadable": "cannot be read",
        "partial": f"partly, {human(part['cached_bytes'])}",
    }[part["state"]]
    return f"{here}, converted" if part.get("converted") else here
