"""Where a checkpoint came from: a snapshot's path, a note beside it, a conversion's manifest."""

import json
from pathlib import Path

import pytest

from lse_mlx.checkpoints.origin import Origin, find_origin

SNAPSHOT = "models--test-org--fix--ture/snapshots/0123abcd"


def write(folder: Path, name: str, **values: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(values), "utf-8")
    return folder


def test_a_snapshot_says_it_by_its_path(tmp_path):
    folder = tmp_path / SNAPSHOT
    folder.mkdir(parents=True)
    expected = Origin("test-org/fix/ture", "0123abcd", known=True)
    assert find_origin(folder) == expected
    (tmp_path / "link").symlink_to(folder)
    assert find_origin(tmp_path / "link") == expected
    write(folder, "hf-origin.json", repository="other/one", revision="1")
    assert find_origin(folder) == expected


@pytest.mark.parametrize(
    "path",
    ["models--a--b/0123", "models--a--b/refs/0123", "datasets--a/snapshots/1", "snapshots/1"],
)
def test_other_paths_are_no_snapshots(tmp_path, path):
    (tmp_path / path).mkdir(parents=True)
    assert not find_origin(tmp_path / path).known


def test_a_note_beside_the_weights_says_it(tmp_path):
    folder = write(tmp_path / "x", "hf-origin.json", repository="org/name", revision="abc")
    assert find_origin(folder) == Origin("org/name", "abc", known=True)


def test_a_conversion_names_what_it_was_made_of(tmp_path):
    manifest = {"source_repository": "org/name", "source_revision": "abc"}
    folder = write(tmp_path / SNAPSHOT / "lse-q8g64", "source-repository.json", **manifest)
    assert find_origin(folder) == Origin("org/name", "abc", known=True)
    unknown = manifest | {"source_revision": "unknown"}
    folder = write(tmp_path / "y", "source-repository.json", **unknown)
    assert find_origin(folder) == Origin("org/name", "unknown", known=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"repository": "org/name"}',
        '{"repository": "org/name", "revision": 7}',
        '{"repository": "", "revision": "abc"}',
        '{"repository": "org/\\u0000name", "revision": "abc"}',
        '{"repository": "org/\\ud800", "revision": "abc"}',
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_note_that_says_nothing_leaves_the_folder_s_name(tmp_path, text):
    folder = tmp_path / "plain name"
    folder.mkdir()
    (folder / "hf-origin.json").write_text(text, "latin-1")
    assert find_origin(folder) == Origin("plain name", "unknown", known=False)


def test_no_folder_at_all_has_a_name_too(tmp_path):
    assert find_origin(tmp_path / "none") == Origin("none", "unknown", known=False)
