"""A process that fetches from a hub on this machine, and a cache that it fetches into."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.hub.cache import Cached, HubCache, Wanted
from tests.checkpoints.hub.fake_hub import NEEDED, REPOSITORY, FakeHub
from tests.checkpoints.waiting import read_line

ORDERS = Path(__file__).with_name("orders.py")
TOKEN = "hf_of_the_tests"


class Fetcher:
    """A process that fetches. Its environment has no HF_HUB_OFFLINE."""

    def __init__(self, home: Path, **environment: str):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LSE_"))}
        self.process = subprocess.Popen(
            [sys.executable, ORDERS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **kept,
                "HF_HOME": str(home),
                "HF_TOKEN": TOKEN,
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "HF_HUB_DOWNLOAD_TIMEOUT": "60",  # a busy machine is no silent hub
                "HF_HUB_ETAG_TIMEOUT": "60",
                "NO_PROXY": "127.0.0.1,localhost",
                **environment,
            },
        )

    def start(self, **order: Any) -> None:
        """Send an order; see `orders`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order, default=str) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        return json.loads(read_line(self.process))

    def fetch(self, hub: dict[str, Any], *, refresh: bool = False, **wanted: Any) -> dict[str, Any]:
        """The answer to one order: "folder" or "error", "notes", and "told" for each phase."""
        wanted = {"repository": REPOSITORY, "tokenizer": True, **wanted}
        self.start(hub=hub, wanted=wanted, refresh=refresh)
        return self.answer()

    def run(self, *arguments: str) -> dict[str, Any]:
        """ "status", "out" and "err" of the command `lse-mlx` with `arguments`."""
        self.start(command=arguments)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Client:
    """Fetches the repository of `hub` into one cache."""

    fetcher: Fetcher
    hub: FakeHub
    cache: Path

    def fetch(self, settings: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
        told = {"endpoint": self.hub.endpoint, "cache_dir": self.cache, **(settings or {})}
        return self.fetcher.fetch(told, **arguments)

    def folder(self) -> Path:
        answer = self.fetch()
        assert "folder" in answer, answer
        return Path(answer["folder"])

    def error(self, settings: dict[str, Any] | None = None, **arguments: Any) -> str:
        answer = self.fetch(settings, **arguments)
        assert "error" in answer, answer
        assert answer["error"].endswith(".") and answer["error"].isprintable()
        return answer["error"]

    def here(self, tokenizer: bool = False) -> Cached:
        """What this process, which never connects, finds in the cache."""
        return HubCache(self.cache).state(Wanted(REPOSITORY, tokenizer=tokenizer))

    def resolve(self, model: str, drafter: str) -> dict[str, Any]:
        """The answer to an order for a pair: "target" and "drafter", or "error"."""
        told = {"endpoint": self.hub.endpoint, "cache_dir": self.cache}
        self.fetcher.start(hub=told, pair=(model, drafter))
        return self.fetcher.answer()


def is_served(hub: FakeHub, folder: Path) -> bool:
    """Whether `folder` has the needed files as `hub` serves them, and no other."""
    return {p.name: p.read_bytes() for p in folder.iterdir()} == {
        name: hub.files[name] for name in NEEDED
    }
