"""Requests to the hub, patient where it is asked too often."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, httpx

TOO_OFTEN = 429
PATIENCE = 60
"""Seconds that a request waits, in all, for a hub that is asked too often."""

# Of Retry-After, and of "api";r=0;t=55 in the hub's own header.
_SECONDS = re.compile(r"(?:.*\bt=)?([0-9]{1,6})")


@contextmanager
def opened(url: str, begin: int = 0) -> Iterator[httpx.Response]:
    """The hub's answer to a request for `url` from byte `begin` on, whose body is still to be read.

    Raises what huggingface_hub raises for an answer that is a refusal, and for a broken connection.
    """
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    left = PATIENCE
    while True:
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as answer:
            wait = asked_to_wait(answer)
            if wait is None or wait > left:
                hf_raise_for_status(answer)
                yield answer
                return
        left -= wait
        time.sleep(wait)


def asked_to_wait(answer: httpx.Response) -> int | None:
    """Seconds to wait before the same request again, at least one; None where that is no use."""
    if answer.status_code != TOO_OFTEN:
        return None
    told = answer.headers.get("ratelimit") or answer.headers.get("retry-after", "")
    found = _SECONDS.fullmatch(told)
    return max(1, int(found[1])) if found else 1
