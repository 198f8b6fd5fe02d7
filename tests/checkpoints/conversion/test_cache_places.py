"""Where conversions go: beside the source, into a directory of choice, or into the user's cache."""

import errno
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from lse_mlx.checkpoints.conversion.places import CacheSettings, path_hash
from lse_mlx.errors import CheckpointError
from tests.checkpoints.conversion.dflash2_sources import (
    Said,
    overwrite_keeping_stat,
    prepare,
    problems,
    sha256,
    write_origin,
    write_source,
)


def test_links_lead_to_one_conversion(source, settings, tmp_path):
    place, _ = prepare(source, settings)
    (tmp_path / "link").symlink_to(source)
    assert prepare(tmp_path / "link", settings) == (
        place,
        Said([f"using the conversion in {place}"]),
    )


def snapshot(tmp_path: Path, blob: str | None = None) -> Path:
    """A checkpoint as the Hugging Face cache has it: files that are links to blobs."""
    made = write_source(tmp_path / "made")
    repository = tmp_path / "hub" / "models--org--name"
    folder = repository / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        digest = blob if blob and name.startswith("model") else sha256(made / name)
        (made / name).rename(repository / "blobs" / digest)
        (folder / name).symlink_to(Path("../../blobs") / digest)
    return folder


def test_a_snapshot_s_blob_has_the_hash_in_its_name(tmp_path, settings):
    folder = snapshot(tmp_path)
    place, _ = prepare(folder, settings)
    assert place == folder / "lse-q8g64"
    assert problems(place, folder) == []
    manifest = json.loads((place / "source-repository.json").read_text())
    assert manifest["source_repository"] == "org/name"
    assert manifest["source_revision"] == "0123abcd"
    # Without a stamp the name is enough: the file is not read.
    stamp = folder / "lse-q8g64.source-stat"
    stamp.unlink()
    overwrite_keeping_stat(folder / "model.safetensors")
    assert prepare(folder, settings)[1].phases == []
    assert stamp.read_text().endswith(f" {manifest['source_sha256']}\n")


def test_a_blob_that_is_not_what_its_name_says_is_refused(tmp_path, settings):
    folder = snapshot(tmp_path, blob="0" * 64)
    with pytest.raises(CheckpointError, match=r"damaged.*download it again"):
        prepare(folder, settings)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_a_cache_directory_takes_the_conversion(source, tmp_path):
    write_origin(source)
    cache = tmp_path / "some" / "cache"
    place, _ = prepare(source, CacheSettings(directory=cache))
    assert place == cache / "test-fixture@0123abcd-q8g64"
    assert problems(place, source) == []
    assert sorted(os.listdir(cache)) == [place.name, f"{place.name}.source-stat"]
    assert sorted(os.listdir(source)) == ["config.json", "hf-origin.json", "model.safetensors"]
    assert prepare(source, CacheSettings(directory=cache))[1].phases == []
    four, _ = prepare(source, CacheSettings(directory=cache), bits=4)
    assert four == cache / "test-fixture@0123abcd-q4g64"


def test_every_sign_that_divides_paths_becomes_a_dash(source, tmp_path):
    write_origin(source, "a/b\\c:d", "e/f")
    place, _ = prepare(source, CacheSettings(directory=tmp_path / "cache"))
    assert place.name == "a-b-c-d@e-f-q8g64"


def test_folders_of_one_name_and_no_origin_are_told_apart(tmp_path):
    settings = CacheSettings(directory=tmp_path / "cache")
    places = [
        prepare(write_source(tmp_path / parent / "drafter", seed=n), settings)[0]
        for n, parent in enumerate("ab")
    ]
    for parent, place in zip("ab", places, strict=True):
        value = 1469598103934665603
        for byte in str(tmp_path / parent / "drafter" / "model.safetensors").encode():
            value = ((value ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
        assert place.name == f"drafter-{value:016x}-q8g64"
    assert len(set(places)) == 2


def test_the_path_hash_starts_where_it_should():
    # The start differs from FNV-1a's own 14695981039346656037; one round by hand:
    assert path_hash("") == 0x14650FB0739D0383
    assert path_hash("a") == (0x14650FB0739D0383 ^ 0x61) * 0x100000001B3 % 2**64


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, CacheSettings()),
        ({"LSE_DFLASH2_CACHE_DIR": ""}, CacheSettings()),
        ({"LSE_DFLASH2_CACHE_DIR": "/x/y"}, CacheSettings(directory=Path("/x/y"))),
        ({"LSE_DFLASH2_CACHE_DIR": "~/y"}, CacheSettings(directory=Path.home() / "y")),
        ({"LSE_DFLASH2_CACHE_DIR": "y"}, CacheSettings(directory=Path.cwd() / "y")),
        ({"LSE_DFLASH2_AUTOCONVERT": "0"}, CacheSettings(enabled=False)),
        ({"LSE_DFLASH2_AUTOCONVERT": "1"}, CacheSettings()),
        ({"LSE_DFLASH2_AUTOCONVERT": ""}, CacheSettings()),
        ({"XDG_CACHE_HOME": "/c"}, CacheSettings(user_cache=Path("/c/lse-mlx"))),
        ({"XDG_CACHE_HOME": "c"}, CacheSettings()),
    ],
)
def test_the_environment_settles_where(environ, expected):
    assert CacheSettings.from_environment(environ) == expected
    assert CacheSettings().user_cache == Path.home() / ".cache" / "lse-mlx"


@pytest.mark.parametrize("named", ["~nobody-is-called-so/x", "x" * 5000, "/" + "y" * 300])
def test_a_directory_that_cannot_be_is_one_sentence(named):
    with pytest.raises(CheckpointError) as told:
        CacheSettings.from_environment({"LSE_DFLASH2_CACHE_DIR": named})
    said = str(told.value)
    assert said.startswith(f"LSE_DFLASH2_CACHE_DIR is {named[:60]!r}, which can be no folder (")
    assert said.endswith(".") and len(said) < 300


def test_disabled_the_source_is_used_as_it_is(source, settings):
    prepare(source, settings)
    disabled = CacheSettings(enabled=False, user_cache=settings.user_cache)
    place, said = prepare(source, disabled)
    assert place == source
    assert said.mentions("LSE_DFLASH2_AUTOCONVERT=0", str(source))
    assert prepare(source / "lse-q8g64", disabled) == (source / "lse-q8g64", Said())


# A source folder that cannot be written to


def check_fallback(source: Path, settings: CacheSettings, fault: str) -> None:
    write_note = f"{source.name}-"
    place, said = prepare(source, settings)
    assert place.parent == settings.user_cache
    assert place.name.startswith(write_note) and place.name.endswith("-q8g64")
    assert problems(place, source) == []
    assert said.mentions(fault, str(place))
    again, said = prepare(source, settings)
    assert (again, said.phases) == (place, [])


def test_a_file_in_the_way_sends_it_to_the_user_cache(source, settings):
    (source / "lse-q8g64").write_text("mine")
    check_fallback(source, settings, "in the way")
    assert (source / "lse-q8g64").read_text() == "mine"


def test_a_dead_link_in_the_way_sends_it_to_the_user_cache(source, settings):
    (source / "lse-q8g64").symlink_to("nowhere")
    check_fallback(source, settings, "in the way")


@pytest.mark.parametrize("mine", ["thesis.txt", "model.safetensors/thesis.txt"])
def test_a_person_s_folder_in_the_way_sends_it_to_the_user_cache(source, settings, mine):
    place = source / "lse-q8g64"
    (place / mine).parent.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / mine).write_text("mine")
    check_fallback(source, settings, "in the way")
    assert (place / mine).read_text() == "mine"
    assert (place / "config.json").read_text() == "{}"
    directory = settings.user_cache / "other"
    there, _ = prepare(source, CacheSettings(directory=directory))
    (there / "config.json").unlink()
    (there / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"nowhere.*-q8g64 is in the way.*'thesis\.txt'"):
        prepare(source, CacheSettings(directory=directory))
    assert (there / "thesis.txt").read_text() == "mine"


def test_what_looking_at_a_folder_leaves_on_a_mac_is_nobody_s(source, settings):
    place, _ = prepare(source, settings)
    (place / "config.json").unlink()
    (place / ".DS_Store").write_bytes(b"")
    assert prepare(source, settings)[0] == place
    assert problems(place, source) == []


def test_a_folder_whose_path_leaves_no_room_sends_it_to_the_user_cache(tmp_path, settings):
    # The weights' path fits into the system's limit and a new folder's does not, whoever asks.
    limit = os.pathconf(tmp_path, "PC_PATH_MAX")
    deep = tmp_path
    while (left := limit - 30 - len(os.fsencode(deep))) > 1:
        deep /= "x" * min(200, left - 1 if left <= 200 else left - 3)
    source = write_source(deep)
    place, said = prepare(source, settings)
    assert place.parent == settings.user_cache
    assert problems(place, source) == []
    assert said.mentions("No folder can be made", os.strerror(errno.ENAMETOOLONG), str(place))
    assert prepare(source, settings)[1].phases == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
def test_a_folder_without_permission_sends_it_to_the_user_cache(source, settings):
    source.chmod(0o555)
    try:
        check_fallback(source, settings, "No folder can be made")
    finally:
        source.chmod(0o755)


def test_a_read_only_mount_sends_it_to_the_user_cache(disk, settings):
    source = write_source(disk / "source")
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * (1 << 20)):  # as a read-only image, it has no room either
            pass
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    check_fallback(source, settings, os.strerror(errno.EROFS))


def test_a_conversion_that_came_with_a_read_only_source_is_used(disk, settings):
    source = write_source(disk / "source")
    place, _ = prepare(source, settings)
    (source / "lse-q8g64.source-stat").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    again, said = prepare(source, settings)
    assert (again, said.phases) == (place, ["hash-source"])
    assert prepare(source, settings) == (place, Said([f"using the conversion in {place}"]))
    assert [name for name in os.listdir(settings.user_cache) if name.endswith("-q8g64")] == []


def test_where_nothing_can_be_written_one_sentence_says_so(source, tmp_path):
    (tmp_path / "file").write_text("in the way")
    (source / "lse-q8g64").write_text("in the way too")
    before = sorted(os.listdir(source))
    for settings in (
        CacheSettings(directory=tmp_path / "file"),
        CacheSettings(user_cache=tmp_path / "file"),
    ):
        with pytest.raises(CheckpointError, match=r"nowhere.*LSE_DFLASH2_CACHE_DIR"):
            prepare(source, settings)
    assert sorted(os.listdir(source)) == before
