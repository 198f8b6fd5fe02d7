"""Every single field of a golden trace that is changed is refused by its name."""

from pathlib import Path

import pytest

from tests.golden.generate import FOLDER
from tests.protocol.corruptions import CORRUPTIONS, Corruption, Files, corrupt, named_by
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
