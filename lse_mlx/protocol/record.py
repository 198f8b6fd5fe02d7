"""What every record of the protocol has in common: strict JSON forms, and a version."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from lse_mlx.errors import ProtocolError
from lse_mlx.protocol.values import shown

SCHEMA_VERSION = 1
"""The one version that this package writes and reads."""


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
        return {field.name: _as_json(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, held: Any) -> Self:
        """The record in a JSON object.

        Raises ProtocolError, which names the field, for another version, for a field that is
        missing, unknown, of another type or out of range, and for fields that contradict each other.
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
            if name not in names:
                raise ProtocolError(
                    str(name),
                    f"{shown(name)} is no field of version {SCHEMA_VERSION}: leave it out.",
                )
        return cls(**{name: _from_json(held[name], name in cls.number_fields) for name in names})


def check_version(version: Any) -> None:
    """Raise ProtocolError unless `version` is the one that is known here."""
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ProtocolError(
            "schema_version",
            f"schema_version is {shown(version)}, and this package knows version {SCHEMA_VERSION}: "
            "read it with the package that wrote it, or record it again.",
        )


def _as_json(value: Any) -> Any:
    return [_as_json(held) for held in value] if isinstance(value, tuple) else value


def _from_json(value: Any, number: bool) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(held, number) for held in value)
    if number and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    return value
