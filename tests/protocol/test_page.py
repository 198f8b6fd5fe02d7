"""docs/protocol.md describes the fields that there are."""

import re
from dataclasses import fields
from pathlib import Path

from lse_mlx.protocol.records import RouteRecord, StepRecord, TraceHeader
from lse_mlx.protocol.trace import HEADER, PAYLOADS, ROUTES, SHARED, STEPS

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")


def described(title: str) -> set[str]:
    """The fields in the first column of the table under `title`."""
    section = PAGE.split(f"### {title}\n")[1].split("\n#")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.M)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def names(record: type) -> set[str]:
    return {field.name for field in fields(record)}


def test_every_field_is_described() -> None:
    assert described("The header") == names(TraceHeader)
    assert described("A route") == names(RouteRecord)
    # "both revisions, owner, generation" stand in words there, as they are the header's.
    in_words = {
        "target_model_revision",
        "tokenizer_revision",
        "request_owner",
        "request_generation",
    }
    assert in_words < set(SHARED)
    assert described("A step") == names(StepRecord) - in_words


def test_every_file_is_described() -> None:
    assert set(re.findall(r"^\| `(\S+\.\S+)` \|", PAGE, re.M)) == {HEADER, STEPS, ROUTES, PAYLOADS}
