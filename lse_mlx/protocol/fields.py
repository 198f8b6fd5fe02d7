"""Fields of records: strict JSON forms, a version, and checks of single values.

A check takes the field's name and its value, and raises ProtocolError, with that name, unless the
value is of the right type and in range.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any, ClassVar, NoReturn, Self

from lse_mlx.errors import ProtocolError, shown

SCHEMA_VERSION = 1
"""The one version that this package writes and reads."""
DIGESTS = "field_digests"
"""What a record in a file has besides its fields, to tell that one of them was changed."""
DIGITS = 8
"""Hexadecimal digits that are kept of each field's digest."""
DEEPEST = 2
"""Lists of a field within each other."""
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


@dataclass(frozen=True, kw_only=True)
class Record:
    """Fields that travel as one JSON object. Sequences are tuples here and lists there."""

    schema_version: int = SCHEMA_VERSION

    number_fields: ClassVar[frozenset[str]] = frozenset()
    """The fields of floats: JSON may spell 1.0 as 1 there."""

    def __post_init__(self) -> None:
        check_version(self.schema_version)

    def as_dict(self) -> dict[str, Any]:
        """Every field by its name, as JSON values."""
        return {field.name: as_json(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, held: Any) -> Self:
        """The record in a JSON object, whose fields are held to its `field_digests`, if it has them.

        Raises ProtocolError, which names the field, for another version, for a field that is
        missing, unknown, changed since its digest was written, of another type or out of range, and
        for fields that contradict each other.
        """
        if not isinstance(held, dict):
            raise ProtocolError("record", f"A record is {shown(held)}: give a JSON object.")
        names = [field.name for field in fields(cls)]
        if "schema_version" in held:  # first: another version has other fields
            check_version(held["schema_version"])
        for name in names:
            if name not in held:
                raise ProtocolError(name, f"{name} is missing: write every field of the record.")
        for name in held:
            if name not in names and name != DIGESTS:
                raise ProtocolError(
                    str(name),
                    f"{shown(name)} is no field of version {SCHEMA_VERSION}: leave it out.",
                )
        values = {name: _from_json(held[name], name in cls.number_fields) for name in names}
        if held.get(DIGESTS) is not None:
            _check_unchanged(values, held[DIGESTS])
        return cls(**values)


def check_version(version: Any) -> None:
    """Raise ProtocolError unless `version` is the one that is known here."""
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ProtocolError(
            "schema_version",
            f"schema_version is {shown(version)}, and this package knows version {SCHEMA_VERSION}: "
            "read it with the package that wrote it, or record it again.",
        )


def field_digests(values: Mapping[str, Any]) -> str:
    """Eight digits a field, by ascending name: the first of SHA-256 over its value's JSON.

    The last eight are of SHA-256 over all before them, so that a change of these digits is told from
    one of a field.
    """
    digits = "".join(_digits(_spelled(values[name])) for name in sorted(values))
    return digits + _digits(digits)


def _spelled(value: Any) -> str:
    """The JSON of a value, "" of what has none or is nested without end."""
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return ""


def _digits(text: str) -> str:
    return sha256(text.encode("ascii")).hexdigest()[:DIGITS]


def _check_unchanged(values: Mapping[str, Any], digests: Any) -> None:
    """Raise ProtocolError, which names the field, where a value is not the one of its digest."""
    changed = "it was changed after it was written, so copy the trace again or record it anew"
    size = DIGITS * len(values)
    if type(digests) is not str or digests[size:] != _digits(digests[:size]):
        refuse(DIGESTS, digests, changed)
    own = field_digests(values)
    for place, name in enumerate(sorted(values)):
        begin = DIGITS * place
        if own[begin : begin + DIGITS] != digests[begin : begin + DIGITS]:
            refuse(name, values[name], changed)


def refuse(field: str, value: object, wanted: str) -> NoReturn:
    """Raise ProtocolError: `field` holds `value`, and `wanted` says what belongs there."""
    raise ProtocolError(field, f"{field} is {shown(as_json(value))}: {wanted}.")


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


def as_json(value: Any) -> Any:
    """What JSON spells for a field: a list for a tuple."""
    return [as_json(held) for held in value] if isinstance(value, tuple) else value


def _from_json(value: Any, number: bool, depth: int = DEEPEST) -> Any:
    if isinstance(value, list) and depth:
        return tuple(_from_json(held, number, depth - 1) for held in value)
    if number and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    return value
