"""Checks of the numbers in a request: of the right kind, or a sentence that says what to give."""

import numbers
import reprlib
from typing import Any

from lse_mlx.errors import RequestError

SHOWN = 60


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


def shown(value: Any) -> str:
    """A wrong value as a sentence quotes it: its Python form, cut where it is long."""
    return _Shown().repr(value)


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = SHOWN

    def repr_int(self, x: int, level: int) -> str:
        """Also one that is too long for Python to print."""
        if abs(x) >= 10**SHOWN:
            return f"an integer of {x.bit_length()} bits"
        return repr(x)
