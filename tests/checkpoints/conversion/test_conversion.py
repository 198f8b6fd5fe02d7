"""Whole conversions: the bytes of all three files, and what they do not depend on."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lse_mlx.checkpoints.conversion import convert as conversion
from lse_mlx.checkpoints.conversion.convert import convert
from lse_mlx.checkpoints.conversion.manifest import Manifest
from lse_mlx.checkpoints.conversion.plan import plan_conversion
from lse_mlx.checkpoints.conversion.source_hashes import SourceHashes
from lse_mlx.checkpoints.hashing import hash_file, hash_files
from lse_mlx.checkpoints.progress import Silent
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
from tests.checkpoints.conversion.scalar_quantizer import (
    Tensors,
    converted_tensors,
    safetensors_file,
)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.mark.parametrize("bits", [8, 4])
def test_all_three_files(source: Path, bits: int) -> None:
    expected = safetensors_file(converted_tensors(small_tensors(), bits))
    made = run(source, bits=bits)
    assert names(made) == ["config.json", "model.safetensors", "source-repository.json"]
    assert (made / "model.safetensors").read_bytes() == expected
    assert (made / "config.json").read_text() == (
        '{\n  "architectures": [\n    "DFlash2DraftModel"\n  ],\n  "hidden_size": 128,\n'
        f'  "quantization": {{\n    "bits": {bits},\n    "group_size": 64,\n'
        '    "mode": "affine"\n  }\n}\n'
    )
    origin = sha256((source / "model.safetensors").read_bytes())
    assert (made / "source-repository.json").read_text() == (
        "{\n"
        '  "source_repository": "org/name",\n'
        '  "source_revision": "0123abcd",\n'
        f'  "source_sha256": "{origin}",\n'
        '  "reference_implementation": "https://github.com/z-lab/dflash/blob/'
        '07ebd93db9f472af339b644bb70221ad8428328a/dflash/model_mlx.py",\n'
        f'  "format": "MLX affine Q{bits} group64",\n'
        '  "conversion": "FP32 min/max; BF16 scale and bias; '
        'codes selected against stored scale/bias",\n'
        f'  "bytes": {len(expected)},\n'
        f'  "sha256": "{sha256(expected)}",\n'
        '  "tensors": 16\n'
        "}\n"
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("rows", "chunk"), [(128, 8 << 20), (7, 8 << 20), (1, 128), (128, 384)])
def test_blocks_and_threads_change_nothing(
    source: Path, threads: int, rows: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "BLOCK_ROWS", rows)
    monkeypatch.setattr(conversion, "CHUNK_BYTES", chunk)
    made = run(source, threads=threads)
    expected = safetensors_file(converted_tensors(small_tensors()))
    assert (made / "model.safetensors").read_bytes() == expected


def test_the_plan_tells_what_will_be_written(source: Path) -> None:
    plan = plan_conversion(source)
    made = run(source)
    assert plan.output_bytes == (made / "model.safetensors").stat().st_size
    assert plan.config_text == (made / "config.json").read_text()
    # The four matrices, two bytes a value.
    assert plan.quantized_bytes == 2 * (5 * 192 + 3 * 64 + 131 * 64 + 2 * 128)


def test_a_manifest_is_read_as_it_was_written(source: Path) -> None:
    manifest = convert(source, source.parent / "converted", 'a "b" \u00fc\U0001f600', "c")
    text = (source.parent / "converted" / "source-repository.json").read_text("ascii")
    assert '"source_repository": "a \\"b\\" \\u00fc\\ud83d\\ude00",' in text
    assert Manifest.read(source.parent / "converted") == manifest
    assert manifest.text() == text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("sha256"), "The sha256 in .* is None instead of text"),
        (lambda m: m.update(bytes="7"), "The bytes in .* is '7' instead of a count"),
        (lambda m: m.update(tensors=True), "The tensors in .* is True instead of a count"),
    ],
)
def test_a_manifest_that_lacks_something_is_refused(
    source: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    made = run(source)
    values = json.loads((made / "source-repository.json").read_text())
    change(values)
    (made / "source-repository.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=words):
        Manifest.read(made)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), (b"{", "is not JSON"), (b"[]", "holds a list, not a JSON object")],
)
def test_a_manifest_that_is_none_is_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "source-repository.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        Manifest.read(tmp_path)


def test_progress(source: Path) -> None:
    recorder = Recorder()
    made = run(source, progress=recorder)
    phases = list(dict.fromkeys(step[0] for step in recorder.steps))
    assert phases == ["hash-source", "quantize", "finish"]
    for phase, total in (
        ("hash-source", (source / "model.safetensors").stat().st_size),
        ("quantize", plan_conversion(source).quantized_bytes),
        ("finish", (made / "model.safetensors").stat().st_size),
    ):
        steps = [step for step in recorder.steps if step[0] == phase]
        done = [step[1] for step in steps]
        assert done[0] == 0 and done[-1] == total and done == sorted(done)
        assert {step[2] for step in steps} == {total}
    # At most 128 rows at a time, so 128 and then 3 of this matrix.
    done = [step[1] for step in recorder.steps if step[3] == "layers.0.mlp.up_proj.weight"]
    assert done[1] - done[0] == 3 * 64 * 2
    assert list(dict.fromkeys(step[3] for step in recorder.steps if step[3])) == [
        "fc.weight",
        "candidate_selector.predecessor_codebook.weight",
        "layers.0.mlp.up_proj.weight",
        "candidate_selector.successor_codebook.weight",
    ]


def test_a_known_hash_is_not_computed_again(source: Path) -> None:
    weights, recorder = source / "model.safetensors", Recorder()
    hashes = SourceHashes((weights,), (), Silent())
    hashes.compute()
    manifest = Manifest.read(run(source, progress=recorder, hashes=hashes))
    assert manifest.source_sha256 == sha256(weights.read_bytes())
    assert "hash-source" not in {step[0] for step in recorder.steps}


def test_of_two_tensors_with_one_name_the_later_takes_the_place_of_the_former(
    tmp_path: Path,
) -> None:
    name = "candidate_selector.predecessor_codebook"
    tensors: Tensors = {name: matrix(3, 64, 1), "a.weight": vector(5, 2)}
    tensors[f"{name}.weight"] = matrix(2, 128, 3)
    made = run(write_source(tmp_path / "source", tensors))
    expected: Tensors = {f"{name}.weight": tensors[f"{name}.weight"], "a.weight": vector(5, 2)}
    assert (made / "model.safetensors").read_bytes() == safetensors_file(
        converted_tensors(expected)
    )


def test_the_order_of_the_header_is_kept_where_the_data_lies_in_another(tmp_path: Path) -> None:
    first, second = matrix(2, 64, 1), matrix(3, 64, 2)
    entries = {
        "b.weight": {"dtype": "BF16", "shape": [2, 64], "data_offsets": [384, 640]},
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "BF16", "shape": [3, 64], "data_offsets": [0, 384]},
    }
    header = json.dumps(entries, indent=1).encode()
    content = len(header).to_bytes(8, "little") + header + second[2] + first[2]
    made = run(write_source(tmp_path / "source", content))
    expected = safetensors_file(converted_tensors({"b.weight": first, "a.weight": second}))
    assert (made / "model.safetensors").read_bytes() == expected


# --- config.json


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0.000001", "1e-06"),
        ("1e-6", "1e-06"),
        ("1e16", "1e+16"),
        ("1E15", "1000000000000000.0"),
        ("0.0001", "0.0001"),
        ("100000000000000000000000000", "100000000000000000000000000"),
        ("-0.0", "-0.0"),
        ("5e-324", "5e-324"),
        ("[]", "[]"),
        ("{}", "{}"),
        ('"\u00e9\U0001f600\\u2028\\/"', '"\\u00e9\\ud83d\\ude00\\u2028/"'),
        ("[[], {}, [1]]", "[\n    [],\n    {},\n    [\n      1\n    ]\n  ]"),
        ("null", "null"),
    ],
)
def test_values_in_the_config(tmp_path: Path, written: str, expected: str) -> None:
    config = f'{{"architectures": ["DFlash2DraftModel"], "x": {written}, "a": 1}}'
    plan = plan_conversion(write_source(tmp_path / "source", config=config))
    assert plan.config_text == (
        '{\n  "architectures": [\n    "DFlash2DraftModel"\n  ],\n'
        f'  "x": {expected},\n  "a": 1,\n'
        '  "quantization": {\n    "bits": 8,\n    "group_size": 64,\n    "mode": "affine"\n  }\n}\n'
    )


@pytest.mark.parametrize("empty", [None, {}, 0, False, ""])
def test_an_empty_quantization_block_keeps_its_place(tmp_path: Path, empty: object) -> None:
    config = {"quantization": empty, **CONFIG, "quantization_config": empty}
    plan = plan_conversion(write_source(tmp_path / "source", config=config))
    held = json.loads(plan.config_text)
    assert list(held) == ["quantization", "architectures", "hidden_size", "quantization_config"]
    assert held["quantization"] == QUANTIZATION and held["quantization_config"] == empty


# --- places


def test_links_are_followed(source: Path) -> None:
    whole = run(source)
    snapshot = source.parent / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../source/{name}")
    (source.parent / "link").symlink_to("snapshot")
    made = run(source.parent / "link", "from links")
    for path in whole.iterdir():
        assert (made / path.name).read_bytes() == path.read_bytes()
    assert (snapshot / "model.safetensors").is_symlink()


def test_a_source_that_nobody_may_write_to_is_converted_elsewhere(source: Path) -> None:
    for path in (*source.iterdir(), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    made = run(source, "deep/er/converted")
    assert len(names(made)) == 3
    source.chmod(0o755)


def test_the_hash_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"", b"abc", bytes(range(256)) * 40_000):
        path.write_bytes(content)
        assert hash_file(path, Silent(), "hash") == sha256(content)
    for hash_none in (hash_file, lambda path, *how: hash_files([path], *how)):
        with pytest.raises(CheckpointError, match="none cannot be read"):
            hash_none(tmp_path / "none", Silent(), "hash")
