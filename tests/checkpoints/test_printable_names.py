"""Names out of files reach no terminal as they are: neither escapes nor line ends nor megabytes."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from lse_mlx import demo_pair
from lse_mlx.checkpoints.conversion.plan import plan_conversion
from lse_mlx.checkpoints.drafter_kind import read_drafter_values
from lse_mlx.checkpoints.gate.gate import check_pair
from lse_mlx.checkpoints.gate.target_facts import read_target
from lse_mlx.checkpoints.gate.tokenizer_identity import read_tokenizer
from lse_mlx.checkpoints.pairing import PairRecord
from lse_mlx.checkpoints.progress import Lines
from lse_mlx.checkpoints.safetensors_header import read_header
from lse_mlx.cli.common import one_sentence_errors
from lse_mlx.errors import CheckpointError, printable
from tests.checkpoints.gate.sparse_checkpoints import (
    hollow,
    read_json,
    save_tokenizer,
    write_json,
    write_sparse,
)

ODD = "a\n\x1b[31m\ud800"
SPELLED = r"a\n\x1b[31m\ud800"
LONG = "n" * 1_000_000


def header_of(folder: Path, name: str, dtype: object, shape: object, end: int = 2) -> Path:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}
    text = json.dumps({name: entry}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"00")
    return folder / "model.safetensors"


def no_entry(folder: Path, name: str) -> None:
    text = json.dumps({name: 1}).encode()
    (folder / "x").write_bytes(len(text).to_bytes(8, "little") + text)
    read_header(folder / "x")


def overlapping(folder: Path, name: str) -> None:
    entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    text = json.dumps({name: entry, f"{name}b": entry}).encode()
    (folder / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"00")
    read_header(folder / "x")


def odd_matrix(folder: Path, name: str) -> None:
    write_json(folder / "config.json", {"architectures": ["DFlash2DraftModel"]})
    write_sparse(folder / "model.safetensors", {f"{name}.weight": ("BF16", [2, 65])})
    plan_conversion(folder)


def float_matrix(folder: Path, name: str) -> None:
    write_json(folder / "config.json", {"architectures": ["DFlash2DraftModel"]})
    write_sparse(folder / "model.safetensors", {f"{name}.weight": ("F32", [2, 64])})
    plan_conversion(folder)


def taken_name(folder: Path, name: str) -> None:
    write_json(folder / "config.json", {"architectures": ["DFlash2DraftModel"]})
    entries = {f"{name}.weight": ("BF16", [2, 64]), f"{name}.scales": ("BF16", [2])}
    write_sparse(folder / "model.safetensors", entries)
    plan_conversion(folder)


def twice_in_a_target(folder: Path, name: str) -> None:
    config = {"model_type": "qwen3", "hidden_size": 64, "vocab_size": 97, "num_hidden_layers": 2}
    write_json(folder / "config.json", config)
    for file in ("model-a.safetensors", "model-b.safetensors"):
        write_sparse(folder / file, {name: ("BF16", [1])})
    read_target(save_tokenizer(folder, 10, []))


def in_a_tokenizer(folder: Path, name: str) -> None:
    write_json(folder / "vocab.json", {name: -1})
    read_tokenizer(folder)


def added_to_a_tokenizer(folder: Path, name: str) -> None:
    write_json(folder / "vocab.json", {"a": 0})
    entry = {"content": name, "special": name}
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": {"1": entry}})
    read_tokenizer(folder)


def in_a_record(folder: Path, name: str) -> None:
    PairRecord.parse({"name": f"{name} "})


def unknown_to_a_record(folder: Path, name: str) -> None:
    PairRecord.parse(read_json(demo_pair.TARGET.parent / "pair.json") | {name: 1})


def in_a_refusal(folder: Path, name: str) -> None:
    drafter = hollow(demo_pair.DRAFTER, folder / "drafter")
    write_json(drafter / "config.json", read_json(drafter / "config.json") | {name: name})
    check_pair(demo_pair.TARGET, drafter)


WAYS: list[Callable[[Path, str], object]] = [
    lambda folder, name: read_header(header_of(folder, name, "BF17", [1])),
    lambda folder, name: read_header(header_of(folder, "a", name, [1])),
    lambda folder, name: read_header(header_of(folder, name, "BF16", name)),
    lambda folder, name: read_header(header_of(folder, name, "BF16", [1 << 62, 4])),
    lambda folder, name: read_header(header_of(folder, name, "BF16", [2])),
    lambda folder, name: read_header(header_of(folder, name, "BF16", [1], -1)),
    no_entry,
    overlapping,
    twice_in_a_target,
    in_a_tokenizer,
    added_to_a_tokenizer,
    in_a_record,
    unknown_to_a_record,
    in_a_refusal,
]
PLANS: list[Callable[[Path, str], object]] = [odd_matrix, float_matrix, taken_name]


@pytest.mark.parametrize("way", [*WAYS, *PLANS])
def test_an_odd_name_is_spelled_out(tmp_path: Path, way: Callable[[Path, str], object]) -> None:
    with pytest.raises(CheckpointError) as refusal:
        way(tmp_path, ODD)
    assert SPELLED in str(refusal.value) or "a" + repr(ODD)[2:6] in str(refusal.value)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("way", WAYS)
def test_a_long_name_is_cut(tmp_path: Path, way: Callable[[Path, str], object]) -> None:
    with pytest.raises(CheckpointError) as refusal:
        way(tmp_path, LONG)
    assert len(str(refusal.value)) < 1000


def test_odd_names_of_files_are_spelled_out(tmp_path: Path) -> None:
    (tmp_path / "a\n\x1b[31m").touch()
    with pytest.raises(CheckpointError, match=r"a\\n\\x1b\[31m") as refusal:
        read_drafter_values(tmp_path)
    assert str(refusal.value).isprintable()
    (tmp_path / "model\x1b[31m.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\\x1b\[31m.safetensors is damaged") as refusal:
        read_header(tmp_path / "model\x1b[31m.safetensors")
    assert str(refusal.value).isprintable()


def test_lines_of_progress_spell_them_out() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    lines.advance("quantize", 0, 1, ODD)
    lines.note(f"converting {ODD}")
    first, second, end = stream.getvalue().split("\n")
    assert first.endswith(f"tensor={SPELLED}")
    assert second == f"[lse-mlx] converting {SPELLED}"
    assert not end


def test_what_is_printable_stays_as_it_is() -> None:
    for text in ("", "layers.0.mlp", 'it\'s "a" \\ \u00e9\u4e2d'):
        assert printable(text) == text


def test_the_error_of_a_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), one_sentence_errors():
        raise CheckpointError(f"{ODD} is none.")
    assert capsys.readouterr().err == f"error: {SPELLED} is none.\n"
