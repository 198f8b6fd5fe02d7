"""`lse-mlx models`: what is known and what is here, without a connection."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.disk import human
from lse_mlx.checkpoints.hub.cache import HubCache
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.names import WEIGHTS
from lse_mlx.cli.main import app
from lse_mlx.cli.models import describe, lines
from lse_mlx.demo_pair import DRAFTER as PACKAGED
from lse_mlx.demo_pair import TARGET
from tests.checkpoints.hub.fake_hub import safetensors

DRAFTER = "models--incoai--Qwen3.8-27B-DFlash2"
REVISION = "dedf8df68adfb1afeaf7b7480c0a0243108177b4"


def described(cache: Path, settings: CacheSettings | None = None) -> dict[str, Any]:
    return {
        pair["name"]: pair
        for pair in describe(HubCache(cache), settings or CacheSettings(user_cache=cache))
    }


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """The main pair's drafter, whole, as far as names and headers can tell."""
    folder = tmp_path / DRAFTER / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(100))
    return folder


def test_pairs_and_sizes_with_an_empty_cache(tmp_path: Path) -> None:
    pairs = described(tmp_path)
    assert list(pairs) == ["qwen3.8-27b", "glm-5.3-flash", "demo"]
    main = pairs["qwen3.8-27b"]
    assert main["target"]["state"] == main["drafter"]["state"] == "absent"
    assert main["drafter"]["bytes"] == 3_848_817_896
    assert main["drafter"]["revision"] == REVISION
    assert main["drafter"]["converted"] is None
    assert pairs["glm-5.3-flash"]["target"]["state"] == "unpublished"
    assert pairs["demo"]["target"]["state"] == pairs["demo"]["drafter"]["state"] == "packaged"
    assert not list(tmp_path.iterdir())


def test_whole_partial_and_converted(tmp_path: Path, drafter: Path) -> None:
    part = described(tmp_path)["qwen3.8-27b"]["drafter"]
    assert (part["state"], part["fault"], part["converted"]) == ("whole", "", None)
    assert part["folder"] == str(drafter)
    assert part["cached_bytes"] == 2 + len(safetensors(100))

    conversion = drafter / "lse-q8g64"
    conversion.mkdir()
    for name in ("config.json", "model.safetensors"):
        assert described(tmp_path)["qwen3.8-27b"]["drafter"]["converted"] is None
        (conversion / name).touch()
    assert described(tmp_path)["qwen3.8-27b"]["drafter"]["converted"] == str(conversion)
    elsewhere = CacheSettings(directory=tmp_path / "elsewhere")
    assert described(tmp_path, elsewhere)["qwen3.8-27b"]["drafter"]["converted"] is None

    (drafter / "model.safetensors").write_bytes(safetensors(100)[:-1])
    part = described(tmp_path)["qwen3.8-27b"]["drafter"]
    assert part["state"] == "partial"
    assert "model.safetensors is damaged" in part["fault"]


def test_a_download_that_broke_before_its_first_file_is_partial(tmp_path: Path) -> None:
    blobs = tmp_path / DRAFTER / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "a.incomplete").write_bytes(b"123")
    part = described(tmp_path)["qwen3.8-27b"]["drafter"]
    assert (part["state"], part["cached_bytes"], part["folder"]) == ("partial", 3, None)


def test_a_kept_list_that_is_none_hides_nothing(tmp_path: Path, drafter: Path) -> None:
    kept = tmp_path / DRAFTER / "trees" / f"{REVISION}.json"
    kept.parent.mkdir()
    for text in ("[]", "null", "[" * 100_000):
        kept.write_text(text)
        assert described(tmp_path)["qwen3.8-27b"]["drafter"]["state"] == "whole"


def test_the_list_has_every_column_whole(tmp_path: Path, drafter: Path) -> None:
    (drafter / "model.safetensors").write_bytes(b"")
    head, *rows = [re.split(r" {2,}", line) for line in lines(list(described(tmp_path).values()))]
    target, part = ["", "target"], ["", "drafter"]
    sizes = [human(f.stat().st_size) for f in (TARGET / WEIGHTS, PACKAGED / WEIGHTS)]
    assert head == ["PAIR", "REPOSITORY", "SIZE", "HERE"]
    assert rows == [
        ["qwen3.8-27b"],
        [*target, "mlx-community/Qwen3.8-27B-4bit@3e6447f0", "16.05 GB", "not downloaded"],
        [*part, f"incoai/Qwen3.8-27B-DFlash2@{REVISION[:8]}", "3.85 GB", "partly, 2 bytes"],
        ["glm-5.3-flash"],
        [*target, "-", "no build known"],
        [*part, "incoai/GLM-5.3-Flash-DFlash2@bf582e4e", "2.34 GB", "not downloaded"],
        ["demo"],
        [*target, "-", sizes[0], "in the package"],
        [*part, "-", sizes[1], "in the package"],
    ]


def test_the_command_prints_a_list_or_json() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["models"], env={"COLUMNS": "40"})
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) == 10
    for text in ("qwen3.8-27b", "incoai/Qwen3.8-27B-DFlash2@dedf8df6", "3.85 GB", "in the package"):
        assert text in shown.stdout
    printed = runner.invoke(app, ["models", "--json"])
    assert printed.exit_code == 0
    held = json.loads(printed.stdout)
    assert [pair["name"] for pair in held["pairs"]] == ["qwen3.8-27b", "glm-5.3-flash", "demo"]
    assert held["cache"] == str(Hub().cache.folder)
