"""What hub, connection and disk refuse, as one sentence."""

import errno
import json
import socket
from pathlib import Path

import pytest
from huggingface_hub.utils import httpx

from lse_mlx.checkpoints.hub.errors import hub_error
from lse_mlx.checkpoints.hub.requests import asked_to_wait
from tests.checkpoints.hub.fake_hub import COMMIT, FIRST, REPOSITORY
from tests.checkpoints.hub.fetcher import Client, Fetcher, is_served


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("size", value) for value in ("abc", True, 1.5, -5, None)),
        *(("blobId", value) for value in (5, None, "../../../../evil")),
        *(("lfs", value) for value in ("x", {}, [], 0, {"sha256": 5}, {"sha256": "../../x"})),
        *(("rfilename", value) for value in (5, None)),
    ],
)
def test_an_entry_of_a_list_that_is_not_sound_is_refused(
    client: Client, field: str, value: object
) -> None:
    client.hub.lie[field] = value
    assert "The hub's list of org/tiny gives no sizes and hashes" in client.error()
    assert not client.cache.exists()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"[]", "gives no sizes and hashes"),
        (b"null", "gives no sizes and hashes"),
        (b"{}", "gives no sizes and hashes"),
        (b'{"sha": 5, "siblings": []}', "gives no sizes and hashes"),
        (b'{"sha": "../evil", "siblings": []}', "gives no sizes and hashes"),
        (b'{"sha": "%s", "siblings": "abc"}' % COMMIT.encode(), "gives no sizes and hashes"),
        (b'{"sha": "%s", "siblings": ["a"]}' % COMMIT.encode(), "gives no sizes and hashes"),
        (b'{"sha": "%s", "siblings": []}' % COMMIT.encode(), "has no config.json"),
        (b"<html>a captive portal</html>", "is no JSON"),
        (b"\xff\xfe\x00{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"id": ' + b"9" * 5_000 + b"}", "is no JSON"),
        (b" " * (65 << 20) + b"{}", "is no JSON"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_an_answer_that_is_no_list_is_refused(client: Client, answer: bytes, said: str) -> None:
    client.hub.answer = answer
    assert said in client.error()
    assert not client.cache.exists()


def test_what_a_list_says_besides_does_not_matter(client: Client) -> None:
    held = {"sha": COMMIT, "siblings": client.hub.listing(REPOSITORY), "lastModified": "yesterday"}
    client.hub.answer = json.dumps(held).encode()
    assert is_served(client.hub, client.folder())


def test_a_list_of_another_commit_than_the_one_asked_for_is_refused(client: Client) -> None:
    client.hub.commits[REPOSITORY], client.hub.revisions = "2" * 40, (COMMIT,)
    assert f"is of commit {'2' * 40}" in client.error(revision=COMMIT)
    assert not client.cache.exists()


def test_a_hub_that_is_asked_too_often_is_asked_again(client: Client) -> None:
    client.hub.busy = {"/api/models/": [{"Retry-After": "1"}], f"/cdn/{FIRST}": [{}]}
    assert is_served(client.hub, client.folder())
    assert not any(client.hub.busy.values())


@pytest.mark.parametrize("path", ["/api/models/", f"/cdn/{FIRST}", "/config.json"])
def test_a_hub_that_wants_a_longer_wait_is_one_sentence(client: Client, path: str) -> None:
    client.hub.status[path] = (429, {"Retry-After": "100000"})
    assert client.error().startswith("The hub is asked too often (HTTP 429) and refuses org/tiny:")


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (200, {"Retry-After": "5"}, None),
        (429, {"Retry-After": "5"}, 5),
        (429, {"Retry-After": "0"}, 1),
        (429, {"Retry-After": "\N{SUPERSCRIPT TWO}"}, 1),
        (429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 1),
        (429, {"ratelimit": '"api";r=0;t=55', "Retry-After": "5"}, 55),
        (429, {}, 1),
    ],
)
def test_how_long_the_hub_asks_to_wait(
    status: int, headers: dict[str, str], seconds: int | None
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert asked_to_wait(httpx.Response(status, headers=raw)) == seconds


@pytest.mark.parametrize("path", ["/api/models/", FIRST, "/config.json"])
@pytest.mark.parametrize("place", ["/api/models/org/tiny", "nowhere://x"])
def test_a_redirect_that_leads_nowhere_is_one_sentence(
    client: Client, path: str, place: str
) -> None:
    client.hub.status[path] = (302, {"Location": place if "://" in place else f"{place}{path}"})
    assert "sends the request for org/tiny on to nowhere" in client.error()


@pytest.mark.parametrize("name", [FIRST, "config.json"])
def test_a_body_without_an_end_is_left_where_the_file_ends(client: Client, name: str) -> None:
    client.hub.endless = name
    assert client.error().startswith(f"{name} of {REPOSITORY} is not what the hub's list says")
    assert client.hub.sent < 1 << 26
    assert not list(client.cache.rglob(f"{client.hub.etag(name)}.incomplete"))
    client.hub.endless = ""
    assert is_served(client.hub, client.folder())


@pytest.mark.parametrize("address", ["garbage", "ftp://h", "https://", "/tmp/hub", "http:/h"])
def test_an_endpoint_that_is_no_address_is_named(client: Client, address: str) -> None:
    said = f"HF_ENDPOINT is {address!r}, which is no address of a hub"
    assert client.error({"endpoint": address}).startswith(said)


@pytest.mark.parametrize("address", ["http://[", "http://h:99999", "http://h\x7f"])
def test_an_endpoint_that_nothing_can_be_asked_of(client: Client, address: str) -> None:
    assert "HF_ENDPOINT" in client.error({"endpoint": address})


def test_a_branch_that_another_one_is_in_the_way_of(client: Client, tmp_path: Path) -> None:
    client.hub.revisions = ("main", "main/x")
    client.folder()
    asked = len(client.hub.requests)
    branch = client.cache / "models--org--tiny/refs/main"
    said = f"org/tiny@main/x cannot be kept in the cache, as {branch} is in the way: remove that"
    assert client.error(revision="main/x").startswith(said)
    assert not [path for _, path, _ in client.hub.requests[asked:] if "/resolve/" in path]

    client.cache = tmp_path / "other"
    client.fetch(revision="main/x")
    branch = client.cache / "models--org--tiny/refs/main"
    said = f"org/tiny cannot be kept in the cache, as {branch} is in the way: remove that"
    assert client.error().startswith(said)
    assert [path.name for path in branch.parent.iterdir()] == ["main"]


@pytest.mark.parametrize(
    ("path", "status", "code", "said"),
    [
        (f"resolve/{COMMIT}/config.json", 404, "EntryNotFound", "lacks a file that its list has"),
        (f"resolve/{COMMIT}/", 403, "GatedRepo", "is gated: accept its terms"),
        (f"resolve/{COMMIT}/{FIRST}", 403, "GatedRepo", "is gated: accept its terms"),
        (f"/cdn/{FIRST}", 500, "", "The hub answers HTTP 500"),
        (f"/cdn/{FIRST}", 403, "", "The hub refuses org/tiny"),
    ],
)
def test_one_file_that_fails_is_one_sentence(
    client: Client, path: str, status: int, code: str, said: str
) -> None:
    client.hub.status[path] = (status, {"X-Error-Code": code} if code else {})
    assert said in client.error()
    client.hub.status.clear()
    assert is_served(client.hub, client.folder())


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (401, {}, "(HTTP 401): it may be private or not there"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "HTTP 401"),
        (403, {"X-Error-Code": "GatedRepo"}, "is gated: accept its terms"),
        (403, {}, "The hub refuses org/tiny"),
        (404, {"X-Error-Code": "RepoNotFound"}, "is not on the hub, or is private"),
        (500, {}, "The hub answers HTTP 500 for org/tiny"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    client: Client, status: int, headers: dict[str, str], said: str
) -> None:
    client.hub.status["/api/models/"] = (status, headers)
    assert said in client.error()


def test_a_hub_that_does_not_answer_is_one_sentence(client: Client, tmp_path: Path) -> None:
    client.hub.status["/api/models/"] = (0, {})
    client.fetcher = Fetcher(tmp_path / "home", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert client.error().startswith("The hub did not answer in time for org/tiny")
    client.fetcher.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "The disk is full while org/tiny"),
        (
            PermissionError(errno.EACCES, "denied", "/a/b"),
            "org/tiny cannot be read or written at /a/b",
        ),
        (OSError(errno.EROFS, "Read-only"), "org/tiny cannot be written to the Hugging Face cache"),
        (httpx.RemoteProtocolError("peer left"), "The connection broke while org/tiny"),
        (httpx.ReadTimeout("slow"), "The hub did not answer in time for org/tiny"),
        (httpx.ProxyError("no"), "org/tiny cannot be downloaded through the proxy"),
        (OSError("Consistency check failed: 1 of 2"), "org/tiny could not be downloaded (Consist"),
        (OSError("bad \x1b[2J"), "org/tiny could not be downloaded (bad \\x1b[2J)"),
        (
            PermissionError(errno.EACCES, "denied", "/\x1b[2J"),
            "org/tiny cannot be read or written at /\\x1b",
        ),
    ],
)
def test_what_breaks_on_the_way_is_one_sentence(fault: Exception, said: str) -> None:
    text = str(hub_error(fault, "org/tiny"))
    assert text.startswith(said)
    assert text.endswith(".") and text.isprintable()


def test_the_cause_behind_a_wrapped_fault_is_told() -> None:
    wrapped = OSError("cannot find the file in the cache")
    wrapped.__cause__ = httpx.ConnectError("refused")
    assert str(hub_error(wrapped, "org/tiny")).startswith("The hub cannot be reached for org/tiny")


def test_an_unknown_revision_and_an_unreachable_hub_are_one_sentence(client: Client) -> None:
    assert "has no such revision" in client.error(revision="v9")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert "cannot be reached" in client.error({"endpoint": f"http://127.0.0.1:{port}"})
    assert "is not on the hub" in client.error(repository="org/other")
    assert "is no name of a repository" in client.error(repository="org//other--x")


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (("config.json", "pytorch_model.bin"), "no model.safetensors but pytorch_model.bin"),
        (("config.json", "a\x1b[2J.bin"), "no model.safetensors but a\\x1b[2J.bin"),
        (("config.json",), "no model.safetensors: choose"),
        ((FIRST,), "no config.json"),
    ],
)
def test_a_repository_that_is_no_checkpoint_is_not_downloaded(
    client: Client, kept: tuple[str, ...], said: str
) -> None:
    client.hub.files = {name: client.hub.files.get(name, b"") for name in kept}
    assert said in client.error()
    assert not [path for _, path, _ in client.hub.requests if "/resolve/" in path]


def test_a_repository_that_is_whole_but_wrong_is_refused(client: Client) -> None:
    del client.hub.files["tokenizer.json"]
    assert "has no tokenizer" in client.error()
    assert "folder" in client.fetch(tokenizer=False)
