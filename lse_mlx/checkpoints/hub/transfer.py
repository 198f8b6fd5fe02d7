"""Bytes from the hub: large files piece by piece, so that a broken download goes on where it was."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from types import TracebackType

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import HfHubHTTPError, WeakFileLock, build_hf_headers

from lse_mlx.checkpoints.hub.files import Place, RemoteFile, changed, content_name
from lse_mlx.checkpoints.progress import Progress

WORKERS = 4
"""Files in flight at once."""

RANGE_REFUSED = 416


class Meter:
    """Counts the bytes of several files, from several threads, into one Progress."""

    def __init__(self, progress: Progress, total: int):
        self._progress, self._total = progress, total
        self._done = 0
        self._lock = Lock()
        self._stop = Event()
        progress.advance("download", 0, total)

    def add(self, count: int, name: str) -> None:
        """Count `count` more bytes of the file `name`; raises InterruptedError after `stop`."""
        if self._stop.is_set():
            raise InterruptedError("stopped")
        with self._lock:
            self._done += count
            # The last step is told once, by `finish`.
            shown = min(max(self._done, 0), max(self._total - 1, 0))
            self._progress.advance("download", shown, self._total, name)

    def stop(self) -> None:
        """Make every file's next piece its last."""
        self._stop.set()

    def finish(self) -> None:
        self._progress.advance("download", self._total, self._total)


class _Bar:
    """What http_get tells of its bytes, handed on to a Meter."""

    def __init__(self, meter: Meter, name: str, initial: int):
        self._meter, self._name = meter, name
        meter.add(initial, name)

    def update(self, count: float | None = 1) -> None:
        self._meter.add(int(count or 0), self._name)

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


def transfer(place: Place, files: Sequence[RemoteFile], progress: Progress) -> None:
    """Bring large `files` into the cache's blobs, several at once, each proven by its SHA-256.

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
        told = get_hf_file_metadata(url, endpoint=place.endpoint)
        if told.etag != file.blob or told.size not in (None, file.size):
            raise changed(place, file)
        part = place.part(file)
        _continue(url, part, file, meter)
        if part.stat().st_size != file.size or content_name(part, large=True) != file.blob:
            part.unlink()
            raise changed(place, file)
        part.replace(place.blob(file))


def _continue(url: str, part: Path, file: RemoteFile, meter: Meter) -> None:
    """Append to `part` what is missing of `file`."""
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    with part.open("ab") as out:
        if out.tell() > file.size:
            out.truncate(0)
        try:
            http_get(
                url,
                out,
                resume_size=out.tell(),
                headers=headers,
                expected_size=file.size,
                displayed_filename=file.name,
                tqdm_class=lambda **bar: _Bar(meter, file.name, bar.get("initial") or 0),  # type: ignore[arg-type]
            )
        except HfHubHTTPError as error:
            if error.response is not None and error.response.status_code == RANGE_REFUSED:
                out.truncate(0)  # it is not the file that these bytes began
            raise
        except InterruptedError:
            raise
        except OSError as error:
            if error.errno is None:  # http_get's word for a body of another length
                out.truncate(0)
            raise
