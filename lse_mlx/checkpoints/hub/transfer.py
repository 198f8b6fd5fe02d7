"""Bytes from the hub: files piece by piece, so that a broken download goes on where it was."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import sleep

from huggingface_hub import hf_hub_url
from huggingface_hub.utils import HfHubHTTPError, WeakFileLock, httpx

from lse_mlx.checkpoints.disk import full_sync
from lse_mlx.checkpoints.hashing import content_name
from lse_mlx.checkpoints.hub.files import Place, RemoteFile, changed
from lse_mlx.checkpoints.hub.requests import opened
from lse_mlx.checkpoints.progress import Progress

WORKERS = 4
"""Files in flight at once."""

PIECE = 1 << 20
"""Bytes that are taken from a connection at once."""

ATTEMPTS = 5
"""How often a file is asked for without a byte that is new."""

PARTIAL, RANGE_REFUSED = 206, 416
BROKEN = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)


class Meter:
    """Counts the bytes of several files, from several threads, into one Progress."""

    def __init__(self, progress: Progress, total: int):
        self._progress, self._total = progress, total
        self._done = 0
        self._lock = Lock()
        self._stopped = False
        progress.advance("download", 0, total)

    def add(self, count: int, name: str) -> None:
        """Count `count` more bytes of the file `name`; raises InterruptedError after `stop`."""
        with self._lock:
            if self._stopped:
                raise InterruptedError("stopped")
            self._done += count
            # The last step is told once, by `finish`.
            shown = min(max(self._done, 0), max(self._total - 1, 0))
            self._progress.advance("download", shown, self._total, name)

    def stop(self) -> None:
        """Make every file's next piece its last. Afterwards only `finish` tells the Progress.

        A worker that told it later could bring back a bar that was taken off the screen.
        """
        with self._lock:
            self._stopped = True

    def finish(self) -> None:
        self._progress.advance("download", self._total, self._total)


def transfer(place: Place, files: Sequence[RemoteFile], progress: Progress) -> None:
    """Bring `files` into the cache's blobs, several at once, each proven by its hash.

    What an earlier download left of a file is kept and continued. Raises CheckpointError for a
    file that is not what the hub's list says, and what huggingface_hub raises.
    """
    if not files:
        return
    meter = Meter(progress, sum(file.size for file in files))
    waiting: SimpleQueue[RemoteFile] = SimpleQueue()
    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    for file in files:
        waiting.put(file)

    def work() -> None:
        with suppress(Empty):
            while True:
                file = waiting.get_nowait()
                try:
                    _fetch(place, file, meter)
                except BaseException as error:  # raised again below, in the thread that waits
                    ended.put(error)
                    return
                ended.put(None)

    try:
        # Daemons, so that Ctrl-C need not wait for what a slow hub still owes them.
        for _ in range(min(WORKERS, len(files))):
            Thread(target=work, daemon=True).start()
        for _ in files:
            if (error := ended.get()) is not None:
                raise error
    finally:
        meter.stop()
    meter.finish()


def _fetch(place: Place, file: RemoteFile, meter: Meter) -> None:
    place.locks.mkdir(parents=True, exist_ok=True)
    place.blob(file).parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(place.locks / f"{file.blob}.lock"):
        if place.blob(file).exists():  # another process brought it meanwhile
            meter.add(file.size, file.name)
            return
        url = hf_hub_url(
            place.repository, file.name, revision=place.commit, endpoint=place.endpoint
        )
        part = place.part(file)
        sent = _continue(url, part, file, meter)
        if not sent or content_name(part, large=file.large) != file.blob:
            part.unlink()
            raise changed(place, file)
        _keep(part, place.blob(file))


def _keep(part: Path, blob: Path) -> None:
    """Give the proven bytes in `part` the name that vouches for them, once they are on the disk."""
    with part.open("rb") as written:
        full_sync(written.fileno())
    part.replace(blob)


def _continue(url: str, part: Path, file: RemoteFile, meter: Meter) -> bool:
    """Append to `part` what is missing of `file`; False where what is sent is another file.

    A connection that breaks is taken up again. No byte is kept beyond the size that was listed.
    """
    with part.open("ab") as out:
        done = furthest = out.tell()
        if done > file.size:
            return False
        meter.add(done, file.name)
        attempts = ATTEMPTS
        while done < file.size:
            try:
                with opened(url, begin=done) as answer:
                    if done and answer.status_code != PARTIAL:  # it is sent from its start
                        meter.add(-done, file.name)
                        done = out.truncate(0)
                    for piece in answer.iter_bytes(PIECE):
                        done += len(piece)
                        if done > file.size:
                            return False
                        meter.add(len(piece), file.name)
                        out.write(piece)
            except HfHubHTTPError as error:
                if error.response is not None and error.response.status_code == RANGE_REFUSED:
                    return False
                raise
            except BROKEN:
                if attempts == 1:
                    raise
                sleep(1)
            attempts = ATTEMPTS if done > furthest else attempts - 1
            furthest = max(done, furthest)
            if not attempts:
                return False
    return True
