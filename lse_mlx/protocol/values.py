"""Checks of single fields of a record: of the right type and in range, or a sentence that says so."""

import json
import math
import re
from collections.abc import Callable, Collection
from reprlib import Repr
from typing import Any, NoReturn

from lse_mlx.errors import ProtocolError, printable

LARGEST = (1 << 63) - 1
"""The largest integer of a record, except a seed: what other languages hold in one word."""
LARGEST_SEED = 1 << 1024
"""What no seed may reach: its digits have to fit in a line."""
LARGEST_ID = (1 << 31) - 1
"""The largest token, layer or expert id."""
LONGEST_TEXT = 200
"""Characters of a name, an owner or a revision."""
ROUNDING = 1e-6
"""What the sum of a distribution may miss 1 by."""

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 100


def shown(value: object) -> str:
    """`value` in a sentence: on one line, as JSON has it, and not without end."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if (
        type(value) is int and abs(value) >= LARGEST_SEED
    ):  # Python refuses to spell the largest ones
        return f"an integer of {value.bit_length()} bits"
    return printable(_REPR.repr(_as_lists(value)))


def refuse(field: str, value: object, wanted: str) -> NoReturn:
    """Raise ProtocolError: `field` holds `value`, and `wanted` says what belongs there."""
    raise ProtocolError(field, f"{field} is {shown(value)}: {wanted}.")


def check_integer(field: str, value: Any, least: int, most: int = LARGEST) -> None:
    """A Python int (no bool) from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        above = "up" if most == LARGEST else f"to {most}"
        refuse(field, value, f"give an integer from {least} {above}")


def check_number(field: str, value: Any, low: float, high: float = math.inf) -> None:
    """A finite float from `low` to `high`."""
    if type(value) is not float or not math.isfinite(value) or not low <= value <= high:
        above = "up" if high == math.inf else f"to {high:g}"
        refuse(field, value, f"give a finite number from {low:g} {above}")


def check_text(field: str, value: Any) -> None:
    """Text on one line, neither empty nor longer than `LONGEST_TEXT`."""
    if type(value) is not str or not 0 < len(value) <= LONGEST_TEXT or not value.isprintable():
        refuse(field, value, f"give 1 to {LONGEST_TEXT} printable characters")


def check_one_of(field: str, value: Any, known: Collection[str]) -> None:
    """One of the words in `known`."""
    if type(value) is not str or value not in known:
        refuse(field, value, f"give one of {', '.join(known)}")


def check_digest(field: str, value: Any) -> None:
    """A SHA-256 as 64 hexadecimal digits in lower case."""
    if type(value) is not str or re.fullmatch("[0-9a-f]{64}", value) is None:
        refuse(field, value, "give a SHA-256 as 64 hexadecimal digits in lower case")


def check_tuple(field: str, value: Any, entry: Callable[[str, Any], None]) -> None:
    """A tuple each of whose entries passes `entry`."""
    if type(value) is not tuple:
        refuse(field, value, "give a list")
    for held in value:
        entry(field, held)


def check_id(field: str, value: Any) -> None:
    """A token, layer or expert id, whose upper bound the record does not know."""
    check_integer(field, value, 0, LARGEST_ID)


def check_ids(field: str, value: Any, distinct: bool = True) -> None:
    """A tuple of ids, by default with none of them twice."""
    check_tuple(field, value, check_id)
    if distinct and len(set(value)) != len(value):
        refuse(field, value, "give each id once")


def check_shares(field: str, value: Any, whole: bool = False) -> None:
    """A tuple of probabilities, at least 0, that sum to at most 1, or to 1 where `whole`."""
    check_tuple(field, value, lambda name, held: check_number(name, held, 0, 1 + ROUNDING))
    total = math.fsum(value)
    if total > 1 + ROUNDING or (whole and total < 1 - ROUNDING):
        wanted = "1" if whole else "at most 1"
        refuse(field, value, f"they sum to {total!r}, so give probabilities that sum to {wanted}")


def _as_lists(value: object) -> object:
    return [_as_lists(held) for held in value] if isinstance(value, tuple) else value
