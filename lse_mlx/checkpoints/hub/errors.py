"""What went wrong with the hub, as one sentence."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx

from lse_mlx.checkpoints.disk import NO_ROOM
from lse_mlx.checkpoints.hub.requests import TOO_OFTEN
from lse_mlx.errors import CheckpointError, printable, reason

HUB_FAULTS = (httpx.HTTPError, httpx.InvalidURL, OSError, HFValidationError, EntryNotFoundError)
"""Everything that huggingface_hub raises for a request, a wrong name, or a cache on disk."""

_FORBIDDEN = (errno.EACCES, errno.EPERM)
_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY)


@contextmanager
def as_sentences(name: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence about `name`, a CheckpointError."""
    try:
        yield
    except HUB_FAULTS as fault:
        raise hub_error(fault, name) from fault


def hub_error(fault: Exception, name: str) -> CheckpointError:
    """The error to raise for `fault`, one of HUB_FAULTS, that came of asking for `name`."""
    found = [fault, *_causes(fault)]
    for one in found:
        if said := _said_by_hub(one, name):
            return CheckpointError(said)
    for one in found:
        if said := _said_by_connection(one, name) or _said_by_disk(one, name):
            return CheckpointError(said)
    return CheckpointError(
        f"{name} could not be downloaded ({printable(reason(fault))}): start it again, and what is "
        "there stays."
    )


def _causes(fault: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    while (cause := fault.__cause__ or fault.__context__) is not None and cause not in found:
        found.append(cause)
        fault = cause
    return found


def _said_by_hub(fault: BaseException, name: str) -> str | None:
    match fault:
        case HFValidationError():
            return f"{name} is no name of a repository: give it as org/name."
        case OfflineModeIsEnabled():
            return f"{name} cannot be downloaded while HF_HUB_OFFLINE is set: unset it."
        case GatedRepoError():
            return (
                f"{name} is gated: accept its terms on its page and set HF_TOKEN to a token of "
                "that account."
            )
        case DisabledRepoError():
            return f"{name} was disabled by its hub: choose another repository."
        case RepositoryNotFoundError():
            return (
                f"{name} is not on the hub, or is private: check the name, and set HF_TOKEN if it "
                "is private."
            )
        case RevisionNotFoundError():
            return f"{name} has no such revision: check it, or leave it out for the newest."
        case HfHubHTTPError(response=answer) if answer is not None:
            return _said_by_status(answer.status_code, name)
    return None


def _said_by_status(status: int, name: str) -> str:
    if status in (401, 403):
        return (
            f"The hub refuses {name} (HTTP {status}): it may be private or not there; check the "
            "name, and set HF_TOKEN to a token that may read it."
        )
    if status == TOO_OFTEN:
        return (
            f"The hub is asked too often (HTTP {status}) and refuses {name}: start it again later, "
            "or set HF_TOKEN, as it lets its accounts ask more."
        )
    if status == 404:
        return f"{name} lacks a file that its list has (HTTP 404): start it again."
    return f"The hub answers HTTP {status} for {name}: try again later, and what is there stays."


def _said_by_connection(fault: BaseException, name: str) -> str | None:
    match fault:
        case httpx.ProxyError():
            return f"{name} cannot be downloaded through the proxy: check HTTPS_PROXY."
        case httpx.TooManyRedirects() | httpx.UnsupportedProtocol() | httpx.InvalidURL():
            return f"The hub sends the request for {name} on to nowhere: check HF_ENDPOINT."
        case httpx.TimeoutException():
            return f"The hub did not answer in time for {name}: check the network and try again."
        case httpx.ConnectError():
            return f"The hub cannot be reached for {name}: check the network (and HF_ENDPOINT)."
        case httpx.HTTPError():
            return f"The connection broke while {name} was downloading: start it again to go on."
    return None


def _said_by_disk(fault: BaseException, name: str) -> str | None:
    if not isinstance(fault, OSError):
        return None
    if fault.errno in NO_ROOM:
        return f"The disk is full while {name} is downloading: make room and start it again."
    path = fault.filename2 or fault.filename
    place = printable(str(path or "the Hugging Face cache"))
    if fault.errno == errno.EROFS:
        return f"{name} cannot be written to {place}, which is read-only: set HF_HOME elsewhere."
    if fault.errno in _FORBIDDEN:
        return (
            f"{name} cannot be read or written at {place}: change its permissions, or set HF_HOME "
            "elsewhere."
        )
    if fault.errno in _IN_THE_WAY and path is not None:
        there = (one for one in (Path(path), *Path(path).parents) if one.exists())
        return (
            f"{name} cannot be kept in the cache, as {printable(str(next(there, path)))} is in the "
            "way: remove that, or set HF_HOME elsewhere."
        )
    return None
