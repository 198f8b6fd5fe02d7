"""The errors a caller can act on. Each message is one sentence: what was wrong, which value, what next."""

import re
import textwrap


class LseError(Exception):
    """Base of every error that lse-mlx raises on purpose."""


class RequestError(LseError):
    """The request cannot be served as asked: an empty prompt, a value out of range, no room left."""


class CheckpointError(LseError):
    """A checkpoint is missing, incomplete, unsupported, or does not belong to the other one."""


class DraftError(LseError):
    """The drafter produced something that cannot be verified (non-finite scores, malformed ids)."""


class TargetError(LseError):
    """The target produced logits that no token can be chosen from (NaN, +inf, or nothing finite)."""


class KernelError(LseError):
    """A device kernel was required and cannot run here."""


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


def counted(number: int, noun: str) -> str:
    """A number with its noun, for what a person reads: "1 prompt", "2 prompts"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
