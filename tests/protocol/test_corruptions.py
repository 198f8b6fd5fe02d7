"""Every single field of a golden trace that is changed is refused by its name."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lse_mlx.errors import ProtocolError
from lse_mlx.protocol.records import RouteRecord, StepRecord, TraceHeader
from lse_mlx.protocol.trace_files import read_trace
from tests.golden.generate import FOLDER
from tests.protocol.corruptions import (
    CORRUPTIONS,
    Corruption,
    Files,
    changed_alone,
    corrupt,
    named_by,
)
from tests.protocol.native_table import NativeTable
from tests.protocol.test_golden import BY_NAME


def id_of(corruption: Corruption) -> str:
    return corruption.where


def refusal(trace: str, folder: Path, corruption: Corruption) -> str | None:
    corrupt(FOLDER / trace, folder, corruption)
    return named_by(folder, lambda: NativeTable.of(BY_NAME[trace]))


@pytest.mark.parametrize("corruption", [c for c in CORRUPTIONS if c.part != "routes"], ids=id_of)
def test_named(corruption: Corruption, tmp_path: Path) -> None:
    assert refusal("greedy", tmp_path, corruption) == corruption.named


@pytest.mark.parametrize("corruption", [c for c in CORRUPTIONS if c.part == "routes"], ids=id_of)
def test_named_in_routes(corruption: Corruption, tmp_path: Path) -> None:
    assert refusal("routes", tmp_path, corruption) == corruption.named


def test_a_digest_alone_is_held_to_the_target(tmp_path: Path) -> None:
    """Without payloads a changed digest still reads, and the replay finds it."""

    def change(files: Files) -> None:
        files.steps[0]["hidden_digest"] = "0" * 64

    assert (
        refusal("limit", tmp_path, Corruption("steps", "hidden_digest", change)) == "hidden_digest"
    )


@pytest.mark.parametrize("trace", ["greedy", "routes", "sampled", "limit"])
def test_unchanged_nothing_is_named(trace: str, tmp_path: Path) -> None:
    """Also where another writer spells the JSON otherwise."""
    assert refusal(trace, tmp_path, Corruption("nothing", "", lambda files: None)) is None


RECORDS = {"header": TraceHeader, "step": StepRecord, "route": RouteRecord}
FIELDS = [(part, field.name) for part, kind in RECORDS.items() for field in fields(kind)]


@pytest.mark.parametrize(("part", "field"), FIELDS)
def test_every_field_that_is_changed_alone_is_named(part: str, field: str, tmp_path: Path) -> None:
    """By its digest, also where no rule and no target could know."""
    assert changed_alone(FOLDER / "routes", tmp_path, part, field) == field


# What neither a rule nor the target can tell.
UNSEEN = {
    "drafter": "another",
    "device": "desk",
    "package_version": "0",
    "seed": 1,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "stop_token_ids": [5, 0],
}


@pytest.mark.parametrize("field", UNSEEN)
def test_what_nothing_else_would_notice_is_named(field: str, tmp_path: Path) -> None:
    files = Files.read(FOLDER / "greedy")
    files.header[field] = UNSEEN[field]
    files.write(tmp_path, digests=True)
    assert refused(tmp_path).field == field
    files.write(tmp_path)
    assert named_by(tmp_path, lambda: NativeTable.of(BY_NAME["greedy"])) is None


def test_the_candidates_of_a_greedy_step_are_named(tmp_path: Path) -> None:
    files = Files.read(FOLDER / "greedy")
    files.step["candidate_probabilities"][0][1] /= 2
    files.write(tmp_path, digests=True)
    error = refused(tmp_path)
    assert error.field == "candidate_probabilities"
    assert "steps.jsonl, line 2: " in str(error)


@pytest.mark.parametrize("part", RECORDS)
@pytest.mark.parametrize(
    "change",
    [
        lambda digits: other_digit(digits, 0),
        lambda digits: other_digit(digits, len(digits) // 2),
        lambda digits: other_digit(digits, len(digits) - 1),
        lambda digits: digits[:-1],
        lambda digits: digits[8:],
        lambda digits: digits + "0",
        lambda digits: digits.upper(),
        lambda digits: "",
        lambda digits: [digits],
        lambda digits: 0,
    ],
)
def test_changed_digests_are_named_themselves(part: str, change: Any, tmp_path: Path) -> None:
    files = Files.read(FOLDER / "routes")
    held = getattr(files, part)
    held["field_digests"] = change(held["field_digests"])
    files.write(tmp_path, digests=True)
    assert refused(tmp_path).field == "field_digests"


@pytest.mark.parametrize("part", RECORDS)
def test_digests_may_be_null_and_not_missing(part: str, tmp_path: Path) -> None:
    files = Files.read(FOLDER / "routes")
    getattr(files, part)["field_digests"] = None
    files.write(tmp_path, digests=True)
    read_trace(tmp_path)
    del getattr(files, part)["field_digests"]
    files.write(tmp_path, digests=True)
    error = refused(tmp_path)
    assert error.field == "field_digests" and "missing" in str(error)


def test_digests_are_of_values_however_they_are_spelled(tmp_path: Path) -> None:
    files = Files.read(FOLDER / "greedy")
    files.header |= {"temperature": 0, "top_p": 1}
    files.write(tmp_path, digests=True)
    assert read_trace(tmp_path).header == read_trace(FOLDER / "greedy").header


def other_digit(digits: str, place: int) -> str:
    digit = "0" if digits[place] != "0" else "1"
    return digits[:place] + digit + digits[place + 1 :]


def refused(folder: Path) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        read_trace(folder)
    return caught.value
