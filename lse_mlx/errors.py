"""The errors a caller can act on. Each message is one sentence: what was wrong, which value, what next."""

import re
import reprlib
import textwrap

SHOWN = 100
"""Characters of a value that a sentence quotes."""


class LseError(Exception):
    """Base of every error that lse-mlx raises on purpose."""


class RequestError(LseError):
    """The request cannot be served as asked: an empty prompt, a value out of range, no room left."""


class CheckpointError(LseError):
    """A checkpoint is missing, incomplete, unsupported, or does not belong to the other one."""


class DraftError(LseError):
    """The drafter failed, or produced what cannot be verified (non-finite scores, malformed ids)."""


class TargetError(LseError):
    """A pass of the target failed, or no token can be chosen from its logits (NaN, +inf)."""


class KernelError(LseError):
    """A device kernel was required and cannot run here."""


class ProtocolError(LseError):
    """A record, a trace or a ticket breaks the protocol, or belongs to another target or request.

    field: the name of the field that is wrong, as records spell it
    """

    def __init__(self, field: str, sentence: str):
        super().__init__(sentence)
        self.field = field


def reason(error: Exception) -> str:
    """The first sentence of another library's error, without its full stop, to quote in ours."""
    text = " ".join(str(error).split())
    first = re.split(r"(?<=[.?!]) ", text)[0].rstrip(".:") or type(error).__name__
    return textwrap.shorten(first, 200, placeholder=" ...")


def printable(text: str) -> str:
    """`text` on one line and without what a terminal obeys or a stream refuses.

    For what a file or the hub says, a name above all, wherever a person reads it.
    """
    return text if text.isprintable() else repr(text)[1:-1]


def shown(value: object) -> str:
    """A wrong value as a sentence quotes it: its Python form, on one line and not without end."""
    return printable(_Shown().repr(value))


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = SHOWN

    def repr_int(self, x: int, level: int) -> str:
        """Also one that is too long for Python to print."""
        return repr(x) if abs(x) < 10**SHOWN else f"an integer of {x.bit_length()} bits"


def counted(number: int, noun: str) -> str:
    """A number with its noun, for what a person reads: "1 prompt", "2 prompts"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
