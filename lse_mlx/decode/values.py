"""Checks of the numbers in a request: of the right kind, or a sentence that says what to give."""

import numbers
from typing import Any

from lse_mlx.errors import RequestError


def check_integer(name: str, value: Any, least: int, wanted: str) -> None:
    """Raise RequestError unless `value` is an integer (of Python or NumPy) from `least` up."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or int(value) < least:
        raise RequestError(f"{name} is {value!r}: give {wanted}.")


def check_number(name: str, value: Any, low: float, high: float, wanted: str) -> None:
    """Raise RequestError unless `value` is a finite number from `low` to `high`."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not low <= float(value) <= high:
        raise RequestError(f"{name} is {value!r}: give {wanted}.")
