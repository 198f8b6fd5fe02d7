"""How long work on files says how far it is. Needs the standard library only."""

import sys
import time
from typing import Protocol, TextIO

from lse_mlx.errors import printable


class Progress(Protocol):
    """Whoever shows the work: lines in a log, a bar on a terminal, nothing in a test."""

    def note(self, text: str) -> None:
        """Something worth a line, once: what begins, what is reused, what went elsewhere."""
        ...

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        """`done` of `total` bytes of `phase` are finished; `tensor` is the one at work, if any.

        The phases in `COUNTED_PHASES` count steps instead of bytes.

        A phase begins with `done` 0 and ends with `done` equal to `total`.
        """
        ...


COUNTED_PHASES = ("race", "warm-up")
"""Of loading: what they count are steps of no size."""

CONVERTER_PHASES = ("hash-source", "quantize", "finish")
"""Of a drafter's conversion: their lines begin as the reference engine's do."""


class Lines:
    """Progress as lines: one for each so many percent of a phase, and its first and last."""

    def __init__(self, stream: TextIO | None = None, *, percent: int = 1, field: str = "tensor"):
        """stream: where lines go, standard error if None.

        percent: how far from one line to the next; field: what the thing at work is called
        """
        self._stream = stream
        self._percent = percent
        self._field = field
        self._began = time.monotonic()
        self._said = ("", -1)

    def note(self, text: str) -> None:
        self._print("lse-mlx", text)

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        percent = done * 100 // total if total else 100
        step = percent // self._percent
        if (phase, step) == self._said:
            return
        self._said = (phase, step)
        line = f"phase={phase} done={done} total={total} percent={percent}"
        line += f" elapsed_s={time.monotonic() - self._began:.1f}"
        name = "dflash2-convert" if phase in CONVERTER_PHASES else "lse-mlx"
        self._print(name, f"{line} {self._field}={tensor}" if tensor else line)

    def _print(self, name: str, text: str) -> None:
        # Names of tensors and files come from a checkpoint.
        print(f"[{name}] {printable(text)}", file=self._stream or sys.stderr, flush=True)


class Silent:
    """Progress that nobody looks at."""

    def note(self, text: str) -> None:
        pass

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        pass
