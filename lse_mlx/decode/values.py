"""Checks of what a request asks: right as it is, or a sentence that says what to give."""

import numbers
from collections.abc import Sequence
from typing import Any

from lse_mlx.errors import RequestError, shown


def check_integer(name: str, value: Any, least: int, wanted: str) -> None:
    """Raise RequestError unless `value` is an integer (of Python or NumPy) from `least` up."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or int(value) < least:
        raise RequestError(f"{name} is {shown(value)}: give {wanted}.")


def check_number(name: str, value: Any, low: float, high: float, wanted: str) -> None:
    """Raise RequestError unless `value` is a finite number from `low` to `high`."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # An integer or a fraction as it is, since it may be too large for a float; a float as Python's,
    # since the bounds may be too large for a narrow one of NumPy.
    number: Any = float(value) if real and not isinstance(value, numbers.Rational) else value
    if not real or not low <= number <= high:
        raise RequestError(f"{name} is {shown(value)}: give {wanted}.")


def room_after(prompt: Sequence[int], context_length: int) -> int:
    """How many tokens a context of `context_length` holds after `prompt` (token ids).

    Raises RequestError where it holds none.
    """
    room = context_length - len(prompt)
    if room < 1:
        raise RequestError(
            f"The prompt has {len(prompt)} tokens and the context holds {context_length} with the "
            "reply: shorten the prompt."
        )
    return room
