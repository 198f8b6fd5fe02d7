"""What an error quotes of a value stays one short line."""

from typing import Any

import pytest

from lse_mlx.errors import shown

DEEP: list[Any] = []
DEEP.append(DEEP)


class Loud:
    def __repr__(self) -> str:
        return "two\nlines" * 1000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (1.5, "1.5"),
        ("a\nb\x1b", r"'a\nb\x1b'"),
        ([1, (2,)], "[1, (2,)]"),
        (10**99, "1" + "0" * 99),
        (-(10**5000), "an integer of 16610 bits"),
        ([10**5000], "[an integer of 16610 bits]"),
    ],
    ids=["none", "float", "text", "nested", "long", "very long", "very long, nested"],
)
def test_a_value_is_shown_as_python_has_it(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    "value", ["x" * 10**6, Loud(), [Loud()] * 50, DEEP, list(range(10**5))], ids=range(5)
)
def test_a_long_value_is_cut_to_one_line(value: object) -> None:
    text = shown(value)
    assert len(text) < 1000 and text.isprintable()
