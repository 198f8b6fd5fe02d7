"""The program of a Fetcher: it does what each line of its input asks for, one JSON line an answer.

An order is a JSON object: "command" with the arguments of `lse-mlx`; or "hub" with those of Hub, and
either "pair" with a model and a drafter to resolve, or "wanted" with the fields of a Wanted to fetch.
"""

import json
import sys
from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.hub.cache import Wanted
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.resolve import resolve_pair
from lse_mlx.errors import CheckpointError


class Recorder:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.told: list[tuple[str, int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        self.told.append((phase, done, total))


def fetch(order: dict[str, Any]) -> dict[str, Any]:
    settings = order["hub"]
    if "cache_dir" in settings:
        settings["cache_dir"] = Path(settings["cache_dir"])
    if (free := settings.pop("free", None)) is not None:
        settings["free"] = lambda folder: free
    hub, recorder = Hub(**settings), Recorder()
    answer: dict[str, Any] = {}
    try:
        if "pair" in order:
            model, drafter = order["pair"]
            pair = resolve_pair(model, drafter, hub, recorder)
            answer = {"target": str(pair.target), "drafter": str(pair.drafter)}
        else:
            wanted = Wanted(**order["wanted"])
            [folder] = hub.fetch_all([wanted], recorder, refresh=order.get("refresh", False))
            answer = {"folder": str(folder)}
    except CheckpointError as error:
        answer = {"error": str(error)}
    return {**answer, "notes": recorder.notes, "told": recorder.told}


def run(arguments: list[str]) -> dict[str, Any]:
    from typer.testing import CliRunner

    from lse_mlx.cli.main import app  # which takes longer than all the rest

    ran = CliRunner().invoke(app, arguments)
    return {"status": ran.exit_code, "out": ran.stdout, "err": ran.stderr}


if __name__ == "__main__":
    for line in sys.stdin:
        order = json.loads(line)
        answer = run(order["command"]) if "command" in order else fetch(order)
        print(json.dumps(answer), flush=True)
