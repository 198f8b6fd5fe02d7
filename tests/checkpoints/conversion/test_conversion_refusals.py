"""What a conversion refuses or fails at: always one sentence, and nothing left behind."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lse_mlx.checkpoints import disk
from lse_mlx.checkpoints.conversion import convert as conversion
from lse_mlx.checkpoints.conversion.convert import convert
from lse_mlx.checkpoints.conversion.new_folder import FolderTaken
from lse_mlx.checkpoints.conversion.plan import plan_conversion
from lse_mlx.checkpoints.hashing import hash_file
from lse_mlx.errors import CheckpointError
from tests.checkpoints.conversion.conversion_sources import (
    CONFIG,
    QUANTIZATION,
    Recorder,
    matrix,
    names,
    run,
    small_tensors,
    vector,
    write_source,
)
from tests.checkpoints.conversion.scalar_quantizer import Tensors, safetensors_file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


def assert_refused(source: Path, words: str, **how: Any) -> None:
    before = names(source.parent), names(source)
    with pytest.raises(CheckpointError, match=words) as caught:
        run(source, **how)
    told = str(caught.value)
    assert told.endswith(".") and "\n" not in told and ": " in told
    assert (names(source.parent), names(source)) == before


# --- config.json


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures = \['LlamaForCausalLM'\]"),
        ({}, "architectures = None, not a DFlash2DraftModel"),
        ({"architectures": {"DFlash2DraftModel": 1}}, "architectures = "),
        ({**CONFIG, "quantization": QUANTIZATION}, "has a quantization block"),
        ({**CONFIG, "quantization_config": {"bits": 4}}, "has a quantization_config block"),
        ("[]", "holds a list, not a JSON object"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: Any, words: str) -> None:
    assert_refused(write_source(tmp_path / "source", config=config), words)


def test_a_missing_config_is_refused(source: Path) -> None:
    (source / "config.json").unlink()
    assert_refused(source, "config.json cannot be read .No such file")


# --- weights


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.weight": ("F16", (2, 64), bytes(256))}, "matrix a.weight .* is F16, but BF16"),
        ({"a.weight": ("F32", (2, 64), bytes(512))}, "matrix a.weight .* is F32, but BF16"),
        ({"a.weight": ("U32", (2, 64), bytes(512))}, "matrix a.weight .* is U32, but BF16"),
        ({"a.weight": ("BF16", (2, 65), bytes(260))}, r"shape \[2, 65\], which groups of 64"),
        ({"a.weight": ("BF16", (64, 32), bytes(4096))}, r"shape \[64, 32\], which groups of 64"),
        ({"a.weight": ("BF16", (0, 64), b"")}, r"shape \[0, 64\], which"),
        ({"a.weight": ("BF16", (64, 0), b"")}, r"shape \[64, 0\], which"),
        ({"a.weight": vector(64, 1), "b": matrix(1, 64, 1)}, "holds no matrix to quantize"),
        ({}, "holds no matrix to quantize"),
        (
            {"a.weight": matrix(1, 64, 1), "a.biases": vector(3, 1)},
            "The tensor a.biases .* has the name that a part of a converted matrix needs",
        ),
        (
            {"a.scales": vector(3, 1), "a.weight": matrix(1, 64, 1)},
            "The tensor a.scales .* has the name that a part of a converted matrix needs",
        ),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: Tensors, words: str) -> None:
    assert_refused(write_source(tmp_path / "source", tensors), words)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    whole = safetensors_file(small_tensors())
    assert_refused(write_source(tmp_path / "short" / "source", whole[:-1]), "is cut short")
    assert_refused(write_source(tmp_path / "long" / "source", whole + b"\0"), "is too long")
    assert_refused(write_source(tmp_path / "empty" / "source", b""), "is cut short")


def test_missing_weights_are_refused(source: Path) -> None:
    (source / "model.safetensors").unlink()
    assert_refused(source, "model.safetensors cannot be read .No such file")


def test_shards_are_refused(source: Path) -> None:
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    (source / "model.safetensors.index.json").write_text("{}")
    assert_refused(source, "keeps its weights in several files")


def test_other_bits_are_refused(source: Path) -> None:
    assert_refused(source, "Codes of 6 bits are not possible", bits=6)


# --- places


@pytest.mark.parametrize("kind", ["file", "folder", "empty", "link", "circle", "nowhere"])
def test_a_destination_that_exists_is_refused(source: Path, kind: str) -> None:
    place = source.parent / "converted"
    if kind == "file":
        place.write_text("kept")
    elif kind in ("link", "circle", "nowhere"):
        place.symlink_to({"link": "source", "circle": "converted"}.get(kind, kind))
    else:
        place.mkdir()
    if kind == "folder":
        (place / "mine").write_text("kept")
    with pytest.raises(CheckpointError):
        run(source)
    assert names(source.parent) == ["converted", "source"]
    if kind == "file":
        assert place.read_text() == "kept"
    if kind == "folder":
        assert (place / "mine").read_text() == "kept"


def test_the_error_says_that_a_folder_is_taken(source: Path) -> None:
    run(source)
    with pytest.raises(FolderTaken, match="exists already"):
        run(source)
    with pytest.raises(CheckpointError, match="is the source itself"):
        run(source, "source")
    with pytest.raises(CheckpointError, match="is the source itself"):
        run(source, "converted/../source")


# --- the disk


def free_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> list[Path]:
    asked: list[Path] = []

    def disk_usage(path: Path) -> Any:
        asked.append(path)
        return type("Usage", (), {"free": free})

    monkeypatch.setattr(disk.shutil, "disk_usage", disk_usage)
    return asked


def test_room_is_looked_for_before_anything_is_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = plan_conversion(source).output_bytes + (16 << 20)
    asked = free_disk(monkeypatch, need - 1)
    recorder = Recorder()
    where = source.parent / "far" / "away"
    told = f"needs 16.8 MB in {where.parent}, but 16.8 MB are free: make room there, or "
    with pytest.raises(CheckpointError, match=re.escape(told)):
        convert(source, where, "r", "v", progress=recorder)
    assert not recorder.steps and names(source.parent) == ["source"]
    assert asked == [source.parent], "the nearest folder that exists tells"
    free_disk(monkeypatch, need)
    convert(source, where, "r", "v")


def test_a_disk_that_becomes_full(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, real = 3, conversion._write

    def write(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments)

    monkeypatch.setattr(conversion, "_write", write)
    assert_refused(source, "became full while .*source was converted")


LIMITED = """
import resource, sys
from pathlib import Path
from lse_mlx.checkpoints.conversion.convert import convert
from lse_mlx.errors import CheckpointError
source, size = Path(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
try:
    convert(source, source.parent / "converted", "r", "v")
except CheckpointError as error:
    print(error)
"""


def test_a_write_that_the_system_refuses(source: Path) -> None:
    size = plan_conversion(source).output_bytes
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(source), str(size - 1)], capture_output=True, text=True
    )
    assert done.stderr == "" and "could not be converted to" in done.stdout
    assert "(File too large)" in done.stdout and done.stdout.count("\n") == 1
    assert names(source.parent) == ["source"]


# --- a source that does not hold still


def test_a_source_that_is_written_to_meanwhile(source: Path) -> None:
    weights = source / "model.safetensors"

    def write() -> None:
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + b"\1")
        os.utime(weights, ns=(1, 1))

    assert_refused(source, "changed while they were read", progress=Recorder("quantize", write))


def test_a_source_that_is_cut_short_meanwhile(source: Path) -> None:
    weights = source / "model.safetensors"
    size = weights.stat().st_size

    def cut() -> None:
        os.truncate(weights, size - 200)

    assert_refused(source, "was cut short while", progress=Recorder("quantize", cut))


def test_a_file_that_changes_while_it_is_hashed(source: Path) -> None:
    weights = source / "model.safetensors"
    for size in (100, 10**6):
        with pytest.raises(CheckpointError, match=f"to {size} bytes while it was read"):
            hash_file(weights, Recorder("p", lambda size=size: os.truncate(weights, size)), "p")


def test_too_little_memory_is_one_sentence(source: Path) -> None:
    def run_out() -> None:
        raise MemoryError

    assert_refused(source, "not enough memory to convert", progress=Recorder("quantize", run_out))


@pytest.mark.usefixtures("no_waiting")
def test_a_pipe_is_no_file_to_hash(source: Path) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        hash_file(source / "pipe", Recorder(), "p")


def test_an_interruption_leaves_nothing(source: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    for phase in ("hash-source", "quantize", "finish"):
        with pytest.raises(KeyboardInterrupt):
            run(source, progress=Recorder(phase, interrupt))
        assert names(source.parent) == ["source"]
    assert len(names(run(source))) == 3
