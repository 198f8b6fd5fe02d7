"""`lse-mlx models`: the known pairs, and what of them is on this machine."""

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lse_mlx.checkpoints.conversion.places import CacheSettings, cache_places
from lse_mlx.checkpoints.disk import human
from lse_mlx.checkpoints.hub.hub import Cached, Hub, Wanted
from lse_mlx.checkpoints.origin import find_origin
from lse_mlx.checkpoints.pairing import DrafterRecord, PairRecord, TargetRecord, registered
from lse_mlx.checkpoints.resolve import DEMO
from lse_mlx.cli.common import one_sentence_errors

FORM = "q8g64"
"""The conversion that a drafter gets by itself."""


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the known pairs of target and drafter, and what of them is on this machine."""
    with one_sentence_errors():
        hub = Hub()
        pairs = describe(hub, CacheSettings.from_environment(os.environ))
        if as_json:
            print(json.dumps({"cache": str(hub.cache), "pairs": pairs}, ensure_ascii=False))
        else:
            Console(highlight=False, soft_wrap=True).print(_table(pairs))


def describe(hub: Hub, settings: CacheSettings) -> list[dict[str, Any]]:
    """Every registered pair as JSON values. Reads names, sizes and headers; no network.

    A part's "state" is "packaged", "whole", "partial", "absent" or, where no repository is known,
    "unpublished"; "fault" says why a partial one cannot be used.
    """
    return [
        {
            "name": record.name,
            "targets": list(record.targets),
            "target": _part(record, record.target, hub),
            "drafter": {
                **_part(record, record.drafter, hub),
                "converted": _converted(record.drafter, hub, settings),
            },
        }
        for record in registered()
    ]


def _part(record: PairRecord, part: TargetRecord | DrafterRecord, hub: Hub) -> dict[str, Any]:
    held = {"repository": part.repository, "revision": part.revision, "bytes": part.bytes}
    if record.name == DEMO:
        return {**held, "state": "packaged", "fault": "", "cached_bytes": 0, "folder": None}
    if part.repository is None:
        return {**held, "state": "unpublished", "fault": "", "cached_bytes": 0, "folder": None}
    cached = hub.state(Wanted(part.repository, part.revision, isinstance(part, TargetRecord)))
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


def _converted(part: DrafterRecord, hub: Hub, settings: CacheSettings) -> str | None:
    """Where the conversion of a cached drafter lies, or None."""
    if part.repository is None:
        return None
    folder = hub.state(Wanted(part.repository, part.revision)).folder
    if folder is None:
        return None
    source = folder.resolve()
    weights = source / "model.safetensors"
    for place in cache_places(weights, find_origin(source), FORM, settings):
        if (place / "model.safetensors").is_file() and (place / "config.json").is_file():
            return str(place)
    return None


def _table(pairs: list[dict[str, Any]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(4):
        table.add_column(no_wrap=True, overflow="fold")
    for pair in pairs:
        table.add_row(pair["name"])
        for role in ("target", "drafter"):
            part = pair[role]
            size = human(part["bytes"]) if part["bytes"] else ""
            name = f"{part['repository']}@{part['revision'][:8]}" if part["repository"] else "-"
            table.add_row(f"  {role}", name, size, _here(part))
    return table


def _here(part: dict[str, Any]) -> str:
    here = {
        "packaged": "in the package",
        "whole": "whole",
        "absent": "no",
        "unpublished": "no build known",
        "partial": f"partly, {human(part['cached_bytes'])}",
    }[part["state"]]
    return f"{here}, converted" if part.get("converted") else here
