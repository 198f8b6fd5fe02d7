"""From names to folders: found, or one sentence."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.pairing import by_name
from lse_mlx.checkpoints.resolve import Pair, parse_repository, resolve_pair
from lse_mlx.errors import CheckpointError
from tests.checkpoints.hub.fake_hub import checkpoint

TARGET = "mlx-community/Qwen3.8-27B-4bit"
DRAFTER = "incoai/Qwen3.8-27B-DFlash2"
GEOMETRY = {"hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248320}


class Notes:
    """A Progress that keeps its notes."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        raise AssertionError("nothing is downloaded here")


def write(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A small whole checkpoint."""
    folder.mkdir(parents=True)
    for name, content in checkpoint(64).items():
        if "/" not in name and name.endswith((".json", ".safetensors")):
            (folder / name).write_bytes(content)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def snapshot(cache: Path, repository: str, revision: str) -> Path:
    """A small whole checkpoint in a Hugging Face cache."""
    return write(cache / f"models--{repository.replace('/', '--')}" / "snapshots" / revision)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub cache"


def revision_of(part: str) -> str:
    record = by_name("qwen3.8-27b")
    assert record is not None
    revision = record.target.revision if part == "target" else record.drafter.revision
    assert revision is not None
    return revision


@pytest.fixture
def cached_pair(cache: Path) -> Pair:
    target = snapshot(cache, TARGET, revision_of("target"))
    return Pair(target, snapshot(cache, DRAFTER, revision_of("drafter")))


def test_the_demo_comes_with_its_drafter_and_a_folder_alone(tmp_path: Path) -> None:
    assert resolve_pair("demo") == Pair(demo_pair.TARGET, demo_pair.DRAFTER)
    assert resolve_pair("demo", None) == Pair(demo_pair.TARGET, None)
    folder = write(tmp_path / "x")
    assert resolve_pair(folder) == Pair(folder, None)
    assert resolve_pair(str(folder), "demo") == Pair(folder, demo_pair.DRAFTER)
    assert resolve_pair(folder, write(tmp_path / "drafter")) == Pair(folder, tmp_path / "drafter")


def test_the_demos_target_by_its_path_gets_the_demos_drafter(tmp_path: Path) -> None:
    notes = Notes()
    pair = Pair(demo_pair.TARGET, demo_pair.DRAFTER)
    assert resolve_pair(demo_pair.TARGET, progress=notes) == pair
    copy = tmp_path / "copy"
    shutil.copytree(demo_pair.TARGET, copy)
    assert resolve_pair(copy, progress=notes) == replace(pair, target=copy)
    assert notes.said == [
        f"Drafter for {target}: that of the demo pair, as it is the demo's target."
        for target in (demo_pair.TARGET, copy)
    ]
    assert resolve_pair(copy, None, progress=notes).drafter is None
    tokenizer = copy / "tokenizer.json"
    held = json.loads(tokenizer.read_bytes())
    held["added_tokens"][0]["content"] = "another"
    tokenizer.write_text(json.dumps(held), "utf-8")
    assert resolve_pair(copy, progress=notes) == Pair(copy, None)
    assert len(notes.said) == 2


def test_a_folder_called_demo_does_not_hide_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "demo")
    write(tmp_path / "qwen3.8-27b")
    monkeypatch.chdir(tmp_path)
    assert resolve_pair("demo").target == demo_pair.TARGET
    assert resolve_pair("./demo") == Pair(Path("./demo"), None)
    assert resolve_pair("./qwen3.8-27b", None).target == Path("./qwen3.8-27b")
    with pytest.raises(CheckpointError, match="is not in the cache"):
        resolve_pair("qwen3.8-27b", None, Hub(cache_dir=tmp_path / "empty"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "  ",
        "no-such",
        "a/b/c",
        "~nosuchuser/x",
        "a" * 300,
        "org/no-such-model@",
        "org/name@../x",
        "org/name@a/../../../x",
        "org/name@a..b",
        "org/name@a//b",
        "org/name@a/.",
        "org/name@" + "a" * 201,
        "org/na me",
        "@main",
        "nul\0",
        5,
        True,
    ],
)
@pytest.mark.parametrize("role", ["model", "drafter"])
def test_a_name_that_leads_nowhere_is_one_sentence(role: str, name: Any) -> None:
    with pytest.raises(CheckpointError) as refused:
        resolve_pair(name, None) if role == "model" else resolve_pair("demo", name)
    message = str(refused.value)
    assert message.startswith(f"The {role} ")
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("role", ["model", "drafter"])
def test_a_repository_that_is_not_here_names_the_command(role: str, cache: Path) -> None:
    hub = Hub(cache_dir=cache)
    name = "org/no-such-model"
    with pytest.raises(CheckpointError, match=f"run `lse-mlx pull {name}`"):
        resolve_pair(name, None, hub) if role == "model" else resolve_pair("demo", name, hub)


def test_folders_are_found_whatever_their_names(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write(tmp_path / "my größtes model")
    (tmp_path / "link").symlink_to(folder)
    kept = snapshot(cache, "org/tiny", "1" * 40)
    (tmp_path / "volume").symlink_to(cache)
    through = tmp_path / "volume" / kept.relative_to(cache)
    for name in (folder, tmp_path / "link", kept, through):
        assert resolve_pair(name, None).target == name
        assert resolve_pair(str(name), None).target == name
    assert resolve_pair("~/my größtes model", None).target == folder
    assert resolve_pair("~/link", "~/link") == Pair(tmp_path / "link", tmp_path / "link")


def test_files_and_cache_folders_are_told_apart(cache: Path, tmp_path: Path) -> None:
    kept = snapshot(cache, "org/tiny", "1" * 40)
    blob = cache / "models--org--tiny" / "blobs" / ("a" * 64)
    blob.parent.mkdir()
    shard = next(kept.glob("*.safetensors"))
    shard.rename(blob)
    shard.symlink_to(blob)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name, said in (
        (blob, "is one file of the Hugging Face cache: name the snapshot folder"),
        (shard, "is one file of the Hugging Face cache: name the snapshot folder"),
        (kept / "config.json", "is a file: name the folder"),
        (tmp_path / "nowhere", "is a link to nothing"),
        (kept.parent.parent, "give org/tiny, or one of the folders in"),
    ):
        with pytest.raises(CheckpointError) as refused:
            resolve_pair(name, None)
        assert said in str(refused.value)


def test_a_folder_that_is_not_whole_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    folder = write(tmp_path / "Qwen3.8-27B-4bit", GEOMETRY)
    next(folder.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors is empty"):
        resolve_pair(folder)
    with pytest.raises(CheckpointError, match=r"is empty"):
        resolve_pair("demo", folder)


def test_a_pairs_name_stands_for_both(cache: Path, cached_pair: Pair) -> None:
    hub = Hub(cache_dir=cache)
    assert resolve_pair("qwen3.8-27b", "auto", hub) == cached_pair
    assert resolve_pair("Qwen3.8-27B", "qwen3.8-27b", hub) == cached_pair
    assert resolve_pair("qwen3.8-27b", None, hub) == Pair(cached_pair.target, None)
    assert resolve_pair("demo", "qwen3.8-27b", hub) == Pair(demo_pair.TARGET, cached_pair.drafter)
    with pytest.raises(CheckpointError, match="names no build of its target"):
        resolve_pair("glm-5.3-flash", "auto", hub)


def test_a_registered_repository_gets_its_registered_revision_and_drafter(
    cache: Path, cached_pair: Pair
) -> None:
    notes = Notes()
    assert resolve_pair(TARGET.lower(), "auto", Hub(cache_dir=cache), notes) == cached_pair
    revision = revision_of("drafter")
    assert notes.said == [f"Drafter for {TARGET}: {DRAFTER}@{revision}, registered for it."]
    assert resolve_pair("demo", DRAFTER, Hub(cache_dir=cache)).drafter == cached_pair.drafter


def test_another_build_by_its_name_gets_the_registered_drafter(
    cache: Path, cached_pair: Pair, tmp_path: Path
) -> None:
    notes, hub = Notes(), Hub(cache_dir=cache)
    folder = write(tmp_path / "qwen3.8-27b-4bit-mine", GEOMETRY)
    assert resolve_pair(folder, "auto", hub, notes) == Pair(folder, cached_pair.drafter)
    nested = write(tmp_path / "Qwen3.8-27B-MLX-4bit", {"text_config": GEOMETRY})
    assert resolve_pair(nested, "auto", hub, notes).drafter == cached_pair.drafter
    assert len(notes.said) == 2
    assert resolve_pair(folder, None, hub, notes).drafter is None
    other = write(tmp_path / "Qwen3.8-27B-4bit", {**GEOMETRY, "vocab_size": 151936})
    assert resolve_pair(other, "auto", hub, notes) == Pair(other, None)
    assert notes.said[-1] == (
        "No drafter: Qwen3.8-27B-4bit is called like qwen3.8-27b but has vocab_size 151936, "
        "not 248320."
    )


def test_a_registered_drafter_that_is_not_here_is_no_silent_absence(
    cache: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "Qwen3.8-27B-4bit", GEOMETRY)
    with pytest.raises(CheckpointError, match=r"DFlash2@dedf8df6.*`lse-mlx pull qwen3.8-27b`"):
        resolve_pair(folder, "auto", Hub(cache_dir=cache), Notes())


def test_repositories_are_parsed(cache: Path) -> None:
    found = parse_repository("org/name@v1.0")
    assert found is not None
    assert (found.repository, found.revision, found.room) == ("org/name", "v1.0", 0)
    drafter = parse_repository(DRAFTER)
    assert drafter is not None and drafter.room == 2_044_950_184
    assert drafter.revision == revision_of("drafter")
    other = parse_repository(f"{DRAFTER}@main")
    assert other is not None and other.revision == "main"
    assert other.room == drafter.room
    # What `pull` brings by the pair's name is the recorded revision and no other.
    assert drafter.pull == "lse-mlx pull qwen3.8-27b"
    assert other.pull == f"lse-mlx pull {DRAFTER}@main"
    target = parse_repository(TARGET.upper())
    assert target is not None and (target.repository, target.tokenizer) == (TARGET, True)
    kept = snapshot(cache, "org/name", "2" * 40)
    assert resolve_pair(f"org/name@{'2' * 40}", None, Hub(cache_dir=cache)).target == kept
