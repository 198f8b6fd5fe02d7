"""A hub on this machine that serves what huggingface_hub asks for and misbehaves on demand."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = "org/tiny"
COMMIT = "1111111111111111111111111111111111111111"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NEEDED = {"config.json", "tokenizer.json", "model.safetensors.index.json", FIRST, SECOND}
"""What of `checkpoint` is to be downloaded."""


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
    index = {"weight_map": {"a": FIRST, "b": SECOND}}
    return {
        "config.json": b'{"model_type": "qwen3"}',
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        FIRST: safetensors(shard, "a"),
        SECOND: safetensors(shard, "b"),
        "pytorch_model.bin": b"a pickle that must not be fetched",
        "modeling_tiny.py": b"raise SystemExit('must not be fetched')",
        "original/config.json": b"not needed",
        ".hidden.json": b"not needed",
    }


@dataclass
class FakeHub:
    """What is served, how it fails, and what was asked for.

    files: of every repository; those of .safetensors count as large files
    configs: the config.json of a repository that has another than that of `files`
    commits: the newest commit of each repository
    revisions: the names, besides the commits, that stand for the newest one
    served: other contents of files, under the name that the list gives them
    other_names: files whose ETag is the one of what is served, as after a change on the hub
    stall_at: the byte of a file where its connection stands still
    cut_once: the byte of a file where its connection breaks, the first time
    lie: fields of every entry of the list, put over the true ones
    status: an answer for every request whose path contains the text
    busy: headers of the answers, each given once, that such a path was asked for too often
    answer: what is sent for a repository's list
    no_ranges: whether a file is always sent from its start
    endless: files that go on after their end; sent: the bytes of such a file that were sent
    """

    files: dict[str, bytes]
    configs: dict[str, bytes] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=lambda: {REPOSITORY: COMMIT})
    revisions: tuple[str, ...] = ("main",)
    served: dict[str, bytes] = field(default_factory=dict)
    other_names: bool = False
    stall_at: dict[str, int] = field(default_factory=dict)
    cut_once: dict[str, int] = field(default_factory=dict)
    status: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    lie: dict[str, Any] = field(default_factory=dict)
    busy: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    answer: bytes | None = None
    no_ranges: bool = False
    endless: str = ""
    sent: int = 0
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

    def content(self, name: str, repository: str) -> bytes:
        """What the list says of file `name`."""
        own = self.configs.get(repository) if name == "config.json" else None
        return self.files[name] if own is None else own

    def listing(self, repository: str) -> list[dict[str, Any]]:
        return [
            {
                "rfilename": name,
                "size": len(content),
                "blobId": git_name(content),
                **(
                    {
                        "lfs": {
                            "sha256": hashlib.sha256(content).hexdigest(),
                            "size": len(content),
                            "pointerSize": 100,
                        },
                    }
                    if name.endswith(".safetensors")
                    else {}
                ),
                **self.lie,
            }
            for name in self.files
            for content in [self.content(name, repository)]
        ]

    def etag(self, name: str, repository: str = REPOSITORY) -> str:
        content = self.content(name, repository)
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
        for part, waits in hub.busy.items():
            if part in path and waits:
                return self._send(429, b"", waits.pop(0))
        for part, (status, headers) in hub.status.items():
            if part in path:
                if status == 0:  # no answer at all
                    hub.released.wait(60)
                    self.close_connection = True
                    return
                return self._send(status, b"", headers)
        for repository, commit in hub.commits.items():
            api, resolve = f"/api/models/{repository}", f"/{repository}/resolve/{commit}/"
            if path in (api, *(f"{api}/revision/{one}" for one in (*hub.revisions, commit))):
                info = {"id": repository, "sha": commit, "siblings": hub.listing(repository)}
                text = json.dumps(info).encode() if hub.answer is None else hub.answer
                return self._send(200, text, {})
            if path.startswith(f"{api}/revision/"):
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            if path.startswith(resolve) and path.removeprefix(resolve) in hub.files:
                return self._file(path.removeprefix(resolve), repository, commit)
        if path.startswith("/cdn/") and path.removeprefix("/cdn/") in hub.files:
            name = path.removeprefix("/cdn/")
            return self._body(name, hub.files[name], {"ETag": '"of-the-cdn"'})
        self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _file(self, name: str, repository: str, commit: str) -> None:
        listed = self.hub.content(name, repository)
        content, etag = self.hub.served.get(name, listed), self.hub.etag(name, repository)
        headers = {"X-Repo-Commit": commit}
        if name.endswith(".safetensors"):  # large files lie on another host
            headers["X-Linked-Etag"] = f'"{etag}"'
            headers["X-Linked-Size"] = str(len(content))
            headers["X-Xet-Hash"] = hashlib.sha256(content).hexdigest()
            headers["X-Xet-Refresh-Route"] = "/xet-token"
            headers["Location"] = f"http://localhost:{self.hub.port}/cdn/{name}"
            return self._send(302, b"", headers)
        return self._body(name, listed, {**headers, "ETag": f'"{etag}"'})

    def _body(self, name: str, listed: bytes, headers: dict[str, str]) -> None:
        hub = self.hub
        content = hub.served.get(name, listed)
        begin, status = 0, 200
        if (asked := self.headers.get("Range")) and not hub.no_ranges:
            begin = int(asked.removeprefix("bytes=").split("-")[0])
            if begin >= len(content):
                return self._send(416, b"", headers)
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            status = 206
        if name == hub.endless:
            return self._without_end(content, headers)
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

    def _without_end(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for key, value in {**headers, "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()
        while self.hub.sent < 1 << 28:
            self.wfile.write(content.ljust(1 << 20))
            self.hub.sent += 1 << 20

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
