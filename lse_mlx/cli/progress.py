"""How long work shows on the command line: bytes as bars, checks as one line."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.status import Status

from lse_mlx.checkpoints.progress import COUNTED_PHASES, Lines, Progress
from lse_mlx.cli.common import notes
from lse_mlx.errors import printable


class Bar:
    """A bar a phase on a terminal, with percent, rate and time left.

    It is on the screen from a phase's beginning to its end; leaving the `with` block takes an
    unfinished one away and gives the cursor back.
    """

    def __init__(self, console: Console):
        self._console = console
        self._phase = ""
        self._bars: RichProgress | None = None
        self._task = TaskID(0)

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        if self._bars is None or phase != self._phase:
            self._stop()
            self._phase = phase
            self._bars = self._bar_columns()
            self._task = self._bars.add_task(phase, total=total)
            self._bars.start()
        self._bars.update(self._task, completed=done, total=total)
        if done >= total:
            self._stop()

    def _bar_columns(self) -> RichProgress:
        counted = self._phase in COUNTED_PHASES
        return RichProgress(
            TextColumn("{task.description:12}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            *([] if counted else [TransferSpeedColumn()]),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._phase = None, ""

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()


def progress(console: Console = notes) -> AbstractContextManager[Progress]:
    """What shows the work of one command inside a `with` block: a bar on a terminal, else lines."""
    return Bar(console) if console.is_terminal else nullcontext(Lines())


class Line:
    """Progress as one line of a terminal that changes: what is being done, and how far it is."""

    def __init__(self, status: Status):
        self._status = status

    def note(self, text: str) -> None:
        pass

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        what = f": {printable(tensor)}" if tensor else ""
        self._status.update(escape(f"{phase}, {done} of {total}{what}"))


class CheckLines(Lines):
    """Progress as lines, one for each tenth of a phase, with the check that is next in quotes."""

    def __init__(self) -> None:
        super().__init__(percent=10, field="check")

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        super().advance(phase, done, total, json.dumps(tensor) if tensor else "")


@contextmanager
def shown_progress(console: Console) -> Iterator[Progress]:
    """A line that changes on a terminal, else lines."""
    if not console.is_terminal:
        yield CheckLines()
        return
    with console.status("checking") as status:
        yield Line(status)
