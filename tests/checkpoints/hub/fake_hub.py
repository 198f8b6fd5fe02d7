"""A hub on this machine that serves what huggingface_hub asks for and misbehaves on demand.

Run as a program, this file is the other side: a process without the HF_HUB_OFFLINE of the tests,
which fetches what it is told to, one JSON line for each answer.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = "org/tiny"
COMMIT = "1111111111111111111111111111111111111111"
TOKEN = "hf_of_the_tests"


def git_name(content: bytes) -> str:
    """Git's name of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def safetensors(size: int, name: str = "w") -> bytes:
    """A safetensors file of one tensor with `size` bytes, written from the format's definition."""
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({name: entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(i % 251 for i in range(251)) * (
        size // 251
    ) + bytes(size % 251)  # fmt: skip


def checkpoint(shard: int = 1000) -> dict[str, bytes]:
    """A target of two shards with `shard` bytes each, and files that nobody needs."""
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    return {
        "config.json": b'{"model_type": "qwen3"}',
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        names[0]: safetensors(shard, "a"),
        names[1]: safetensors(shard, "b"),
        "pytorch_model.bin": b"a pickle that must not be fetched",
        "modeling_tiny.py": b"raise SystemExit('must not be fetched')",
        "original/config.json": b"not needed",
        ".hidden.json": b"not needed",
    }


@dataclass
class FakeHub:
    """What is served, how it fails, and what was asked for.

    files: of every repository; those of .safetensors count as large files
    commits: the newest commit of each repository
    served: other contents of files, under the name that the list gives them
    other_names: files whose ETag is the one of what is served, as after a change on the hub
    stall_at: the byte of a file where its connection stands still
    cut_once: the byte of a file where its connection breaks, the first time
    lie: fields of every entry of the list, put over the true ones
    status: an answer for every request whose path contains the text
    """

    files: dict[str, bytes]
    commits: dict[str, str] = field(default_factory=lambda: {REPOSITORY: COMMIT})
    served: dict[str, bytes] = field(default_factory=dict)
    other_names: bool = False
    stall_at: dict[str, int] = field(default_factory=dict)
    cut_once: dict[str, int] = field(default_factory=dict)
    status: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    lie: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: list[tuple[str, str | None]] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, method: str, name: str) -> list[str | None]:
        """The ranges of the requests for file `name`."""
        return [r for m, path, r in self.requests if m == method and path.endswith(f"/{name}")]

    def listing(self) -> list[dict[str, Any]]:
        return [
            {
                "rfilename": name,
                "path": name,
                "type": "file",
                "size": len(content),
                "blobId": git_name(content),
                "oid": git_name(content),
                **(
                    {
                        "lfs": {
                            "sha256": hashlib.sha256(content).hexdigest(),
                            "oid": hashlib.sha256(content).hexdigest(),
                            "size": len(content),
                            "pointerSize": 100,
                        },
                        "xetHash": hashlib.sha256(content).hexdigest(),
                    }
                    if name.endswith(".safetensors")
                    else {}
                ),
                **self.lie,
            }
            for name, content in self.files.items()
        ]

    def etag(self, name: str) -> str:
        content = self.files[name]
        if self.other_names:
            content = self.served.get(name, content)
        if name.endswith(".safetensors"):
            return hashlib.sha256(content).hexdigest()
        return git_name(content)


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        hub.tokens.append((path, self.headers.get("Authorization")))
        for part, (status, headers) in hub.status.items():
            if part in path:
                if status == 0:  # no answer at all
                    hub.released.wait(60)
                    self.close_connection = True
                    return
                return self._send(status, b"", headers)
        for repository, commit in hub.commits.items():
            api, resolve = f"/api/models/{repository}", f"/{repository}/resolve/{commit}/"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{commit}"):
                info = {"id": repository, "sha": commit, "siblings": hub.listing()}
                return self._send(200, json.dumps(info).encode(), {})
            if path == f"{api}/tree/{commit}":
                return self._send(200, json.dumps(hub.listing()).encode(), {})
            if path.startswith(f"{api}/revision/"):
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            if path.startswith(resolve) and path.removeprefix(resolve) in hub.files:
                return self._file(path.removeprefix(resolve), commit)
        if path.startswith("/cdn/") and path.removeprefix("/cdn/") in hub.files:
            name = path.removeprefix("/cdn/")
            return self._body(name, {"ETag": '"of-the-cdn"'})
        self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _file(self, name: str, commit: str) -> None:
        content = self.hub.served.get(name, self.hub.files[name])
        headers = {"X-Repo-Commit": commit}
        if name.endswith(".safetensors"):  # large files lie on another host
            headers["X-Linked-Etag"] = f'"{self.hub.etag(name)}"'
            headers["X-Linked-Size"] = str(len(content))
            headers["X-Xet-Hash"] = hashlib.sha256(content).hexdigest()
            headers["X-Xet-Refresh-Route"] = "/xet-token"
            headers["Location"] = f"http://localhost:{self.hub.port}/cdn/{name}"
            return self._send(302, b"", headers)
        return self._body(name, {**headers, "ETag": f'"{self.hub.etag(name)}"'})

    def _body(self, name: str, headers: dict[str, str]) -> None:
        hub = self.hub
        content = hub.served.get(name, hub.files[name])
        begin, status = 0, 200
        if asked := self.headers.get("Range"):
            begin = int(asked.removeprefix("bytes=").split("-")[0])
            if begin >= len(content):
                return self._send(416, b"", headers)
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            status = 206
        stop = min(hub.stall_at.get(name, len(content)), hub.cut_once.get(name, len(content)))
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content) - begin)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[begin:stop])
        if stop < len(content):
            if name not in hub.cut_once:
                hub.stalled.set()
                hub.released.wait(60)
            hub.cut_once.pop(name, None)
            self.close_connection = True

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that was killed in the middle is what some tests are about


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve `hub` on a free port."""
    handler = type("Answer", (_Answer,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class Fetcher:
    """A process that fetches. Its environment has no HF_HUB_OFFLINE."""

    def __init__(self, home: Path, **environment: str):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LSE_"))}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
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
        """Send an order: the arguments of Hub under "hub", those of fetch under "fetch"."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order, default=str) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def fetch(self, hub: dict[str, Any], **fetch: Any) -> dict[str, Any]:
        """The answer to one order: "folder" or "error", "notes", and "told" for each phase."""
        self.start(hub=hub, fetch={"repository": REPOSITORY, "tokenizer": True, **fetch})
        return self.answer()

    def run(self, *arguments: str) -> dict[str, Any]:
        """ "status", "out" and "err" of the command `lse-mlx` with `arguments`."""
        self.start(command=arguments)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def _serve_orders() -> None:
    from lse_mlx.checkpoints.hub.hub import Hub
    from lse_mlx.errors import CheckpointError

    class Recorder:
        def __init__(self) -> None:
            self.notes: list[str] = []
            self.told: list[tuple[str, int, int]] = []

        def note(self, text: str) -> None:
            self.notes.append(text)

        def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
            self.told.append((phase, done, total))

    for line in sys.stdin:
        order = json.loads(line)
        if "command" in order:
            print(json.dumps(_run_command(order["command"])), flush=True)
            continue
        settings = order["hub"]
        if "cache_dir" in settings:
            settings["cache_dir"] = Path(settings["cache_dir"])
        if (free := settings.pop("free", None)) is not None:
            settings["free"] = lambda folder, free=free: free
        recorder = Recorder()
        try:
            answer = {"folder": str(Hub(**settings).fetch(progress=recorder, **order["fetch"]))}
        except CheckpointError as error:
            answer = {"error": str(error)}
        print(json.dumps({**answer, "notes": recorder.notes, "told": recorder.told}), flush=True)


def _run_command(arguments: list[str]) -> dict[str, Any]:
    from typer.testing import CliRunner

    from lse_mlx.cli.main import app

    ran = CliRunner().invoke(app, arguments)
    return {"status": ran.exit_code, "out": ran.stdout, "err": ran.stderr}


if __name__ == "__main__":
    _serve_orders()
