"""One field compared: what a drafter says, what it is held to, and how that reads in a sentence."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from lse_mlx.errors import printable

Kind = Literal["contract", "revision"]
"""A contract is never waived; a revision may be, where the user says so."""

MOST_SPELLED_OUT = 5
"""Mismatches that one sentence names; it counts the others."""
LONGEST_VALUE = 160


class Nothing(Enum):
    """The type of NOTHING, which is no value that JSON can hold."""

    NOTHING = 0

    def __repr__(self) -> str:
        return "nothing"


NOTHING = Nothing.NOTHING
"""Where one side does not have the field at all."""


class Words(str):
    """A description that stands in a sentence as it is, where other text is a quoted value."""

    __slots__ = ()


@dataclass(frozen=True)
class Check:
    """One comparison.

    field: a dotted name of config.json, `tensor <name>`, or a property such as `tokenizer`
    drafter: what the drafter has, NOTHING where it lacks the field
    target: what it is held to, a value, Words, or NOTHING where there may be no such field
    says: who asks for that, with its verb: "the target has", "lse-mlx needs"
    holds: the verdict
    """

    field: str
    drafter: object
    target: object
    holds: bool
    says: str = "the target has"
    kind: Kind = "contract"

    @classmethod
    def equal(cls, field: str, drafter: object, target: object, says: str) -> "Check":
        """A contract that holds where both are the same JSON value."""
        return cls(field, drafter, target, same(drafter, target), says)

    def clause(self) -> str:
        """The comparison as part of a sentence, worded for one that does not hold."""
        name = shown(Words(self.field))
        has = f"no {name}" if self.drafter is NOTHING else f"{name} = {shown(self.drafter)}"
        return f"{has}, but {self.says} {shown(self.target)}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the value of either side as `drafter` and `target`, left out where that side has
        no such field; what is no JSON value (words, an infinite number) as `drafter_text` instead."""
        said = {"field": self.field, "kind": self.kind, "holds": self.holds, "says": self.says}
        for side, value in (("drafter", self.drafter), ("target", self.target)):
            if _is_json(value):
                said[side] = value
            elif value is not NOTHING:
                said[f"{side}_text"] = str(value)
        return said


def _is_json(value: object) -> bool:
    if isinstance(value, Words | Nothing):
        return False
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def same(one: object, other: object) -> bool:
    """Whether two JSON values are the same: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def shown(value: object) -> str:
    """`value` in a sentence or a table: on one line, and not without end."""
    text = str(value) if isinstance(value, Words) else repr(value)
    text = printable(text)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 4]} ..."


def clauses(checks: Sequence[Check]) -> str:
    """What does not hold, for one sentence: every one up to a readable number."""
    failed = [check.clause() for check in checks if not check.holds]
    named, more = failed[:MOST_SPELLED_OUT], len(failed) - MOST_SPELLED_OUT
    return "; ".join([*named, f"and {more} more"] if more > 0 else named)
