"""The gate reads little, runs nothing, and has one sentence for whatever it meets."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.gate.gate import PairRefused, check_pair, inspect_pair
from lse_mlx.loading import load
from tests.checkpoints.gate.sparse_checkpoints import (
    QWEN,
    bytes_read,
    failed,
    read_entries,
    read_json,
    refusal_of,
    save_drafter,
    write_json,
    write_sparse,
)

# Only what may be read is read, and nothing is run


def test_no_tensor_is_read(tmp_path: Path, qwen: Path) -> None:
    drafter = save_drafter(tmp_path / "drafter", QWEN)
    tokenizer = (qwen / "tokenizer.json").stat().st_size
    before = bytes_read()
    assert check_pair(qwen, drafter)
    assert bytes_read() - before < tokenizer + 300_000, "of 18 GB of weights"


def test_a_refusal_comes_before_anything_is_loaded(tmp_path: Path) -> None:
    """Of neither of the two: the target is whole, and its weights alone are megabytes."""
    drafter = tmp_path / "drafter"
    shutil.copytree(demo_pair.DRAFTER, drafter)
    values = read_json(drafter / "config.json")
    write_json(drafter / "config.json", values | {"rms_norm_eps": 1e-5})
    weights = (demo_pair.TARGET / "model.safetensors").stat().st_size
    load(demo_pair.TARGET, None).close()  # whatever Python still has to import is read now
    active, before = mx.get_active_memory(), bytes_read()
    mx.reset_peak_memory()
    with pytest.raises(PairRefused, match="rms_norm_eps = 1e-05"):
        load(demo_pair.TARGET, drafter)
    assert mx.get_peak_memory() <= active
    assert bytes_read() - before < weights / 4
    assert sorted(path.name for path in drafter.iterdir()) == ["config.json", "model.safetensors"]


def test_nothing_in_a_checkpoint_is_run(demo: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = demo
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\n"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, (code,)

    for folder in demo:
        (folder / "modeling_custom.py").write_text(code)
        (folder / "sitecustomize.py").write_text(code)
        for name in ("pytorch_model.bin", "model.pkl", "training_args.bin"):
            (folder / name).write_bytes(pickle.dumps(Payload()))
        about = {"auto_map": {"AutoTokenizer": ["modeling_custom.Tokenizer", None]}}
        path = folder / "tokenizer_config.json"
        write_json(path, (read_json(path) if path.exists() else {}) | about)
    for folder in demo:
        values = read_json(folder / "config.json")
        values |= {"auto_map": {"AutoModel": "modeling_custom.Model"}}
        values |= {"model_file": "modeling_custom.py"}
        write_json(folder / "config.json", values)
    report = inspect_pair(target, drafter)
    assert failed(report).keys() == {"auto_map.AutoModel", "model_file"}
    assert [note.split(" that ")[0] for note in report.notes] == ["The auto_map", "The model_file"]
    assert not ran.exists()
    exec(code)
    assert ran.exists(), "it would have been seen"


# What is no DFlash2 drafter at all


def save_other(folder: Path, kind: str) -> Path:
    folder.mkdir()
    if kind == "dflash1":
        values = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16,
                  "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1]}}  # fmt: skip
        write_json(folder / "config.json", values)
        write_sparse(folder / "model.safetensors", {"fc.weight": ("BF16", [4, 4])})
    if kind == "mtp config":
        values = {"architectures": ["Qwen3_5MTP"], "model_type": "qwen3_5_mtp"}
        write_json(folder / "config.json", values)
    if kind == "mtp weights":
        names = ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight")
        write_sparse(folder / "mtp.safetensors", dict.fromkeys(names, ("BF16", [4, 4])))
    if kind == "qwen":
        values = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        write_json(folder / "config.json", values)
    if kind == "files":
        (folder / "README.md").write_text("hello")
    if kind == "other":
        write_json(folder / "config.json", {"model_type": "bert"})
    return folder


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dflash1", "a DFlash drafter of another generation ('qwen3'), with architectures = "
                    "['DFlashDraftModel']"),
        ("mtp config", "an MTP head ('qwen3_5_mtp'), with architectures = ['Qwen3_5MTP']"),
        ("mtp weights", "an MTP head without a config.json (mtp.safetensors)"),
        ("qwen", "a language model of its own ('qwen3'), with architectures = ['Qwen3ForCausalLM']"),
        ("empty", "an empty folder"),
        ("files", "a folder without a config.json (README.md)"),
        ("other", "a model of another kind ('bert'), with architectures = None"),
    ],
)  # fmt: skip
def test_what_was_found_instead_of_a_drafter_is_said(tmp_path: Path, kind: str, words: str) -> None:
    folder = save_other(tmp_path / "found", kind)
    message = refusal_of(demo_pair.TARGET, folder)
    assert message.startswith(f"{folder} is no DFlash2 drafter but {words}: pass the ")


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    assert "but no folder: " in refusal_of(demo_pair.TARGET, tmp_path / "none")
    assert "is a DFlash2 drafter" in refusal_of(demo_pair.DRAFTER, demo_pair.DRAFTER)
    assert "has no config.json" in refusal_of(tmp_path, demo_pair.DRAFTER)


def test_a_drafter_without_whole_weights_is_one_sentence(demo: tuple[Path, Path]) -> None:
    target, drafter = demo
    weights = drafter / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    assert "is damaged" in refusal_of(target, drafter)
    weights.unlink()
    assert "model.safetensors cannot be read" in refusal_of(target, drafter)
    write_json(drafter / "config.json", [1])
    assert "holds a list" in refusal_of(target, drafter)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{" + b'"a":{' * 900 + b"}" * 901, "nests its values more than 100 deep"),
        (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", "nests its values more than 100 deep"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"architectures": ["' + b"A" * 100_000 + b'"]}', "with architectures = ['AAAA"),
    ],
    ids=["objects", "lists", "endless", "digits", "long"],
)
def test_a_config_made_to_break_readers_is_one_sentence(
    demo: tuple[Path, Path], text: bytes, words: str
) -> None:
    (demo[1] / "config.json").write_bytes(text)
    message = refusal_of(*demo)
    assert words in message
    assert len(message) < 1000


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(
    "name",
    [
        *(f"drafter/{name}" for name in ("config.json", "model.safetensors", "hf-origin.json",
          "source-repository.json", "pair.json", "tokenizer.json", "tokenizer_config.json")),
        *(f"target/{name}" for name in ("config.json", "model.safetensors", "hf-origin.json",
          "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json")),
    ],
)  # fmt: skip
def test_a_pipe_in_the_place_of_a_file_holds_nothing_up(
    demo: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    needed = (tmp_path / name).exists() or "index" in name
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    if needed and not name.endswith("tokenizer_config.json"):
        assert name.rsplit("/")[-1] in refusal_of(*demo)
    else:
        inspect_pair(*demo)


def test_weights_that_no_loader_takes_are_said_to_be_there(demo: tuple[Path, Path]) -> None:
    target, drafter = demo
    tensors = read_entries(target / "model.safetensors")
    (target / "model.safetensors").rename(target / "weights-1.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "weights-1.safetensors")}
    write_json(target / "model.safetensors.index.json", index)
    message = refusal_of(target, drafter)
    assert "weights-1.safetensors, but only files called model*.safetensors are loaded" in message
    (target / "weights-1.safetensors").unlink()
    assert "has no weights-1.safetensors" in refusal_of(target, drafter)


def test_files_of_the_drafter_that_disagree_are_not_held_against_the_target(
    demo: tuple[Path, Path],
) -> None:
    """Neither a damaged drafter nor an edited config.json is made for another target."""
    target, drafter = demo
    tensors, values = (read_entries(drafter / "model.safetensors"),
                       read_json(drafter / "config.json"))  # fmt: skip
    write_json(drafter / "config.json", values | {"intermediate_size": 512})
    message = refusal_of(target, drafter)
    assert message.startswith(f"The files of the drafter {drafter} do not belong together (")
    assert message.endswith("): download or convert it again.")
    assert message.count(", but ") == 5
    assert "intermediate_size = 512, but the record of demo has 1024" in message
    write_json(drafter / "config.json", values | {"head_dim": "64"})
    message = refusal_of(target, drafter)
    assert message.startswith(f"The config.json of the drafter {drafter} is none that lse-mlx runs")
    write_json(drafter / "config.json", values)
    del tensors["fc.weight"]
    write_sparse(drafter / "model.safetensors", tensors)
    message = refusal_of(target, drafter)
    assert "(no tensor fc.weight, but its config.json asks for BF16 [" in message
    assert "do not belong together" in message
    assert "made for it" not in message


def test_names_that_a_terminal_would_obey_are_spelled_out(demo: tuple[Path, Path]) -> None:
    target, drafter = demo
    odd = "a\n\x1b[31m\ud800"
    write_json(drafter / "config.json", read_json(drafter / "config.json") | {odd: odd})
    entries = read_entries(drafter / "model.safetensors")
    write_sparse(drafter / "model.safetensors", entries | {odd: ("BF16", [1])})
    message = refusal_of(target, drafter)
    assert message.isprintable()
    assert message.count(r"a\n\x1b[31m\ud800") == 3


@pytest.mark.parametrize(
    "block",
    [{"bits": 0}, {"bits": "4"}, {"bits": 64}, {"bits": 4.0}, {"group_size": 0}, {"group_size": 10**30},
     {"mode": "mxfp4"}, [1], "q4"],
)  # fmt: skip
def test_a_quantization_block_that_explains_nothing_is_refused(
    demo: tuple[Path, Path], block: Any
) -> None:
    target, drafter = demo
    config = read_json(target / "config.json")
    config["quantization"] = config["quantization"] | block if isinstance(block, dict) else block
    write_json(target / "config.json", config)
    assert failed(inspect_pair(target, drafter)).keys() == {"embedding", "output head"}


def test_the_report_is_json(demo: tuple[Path, Path]) -> None:
    values = read_json(demo[1] / "config.json")
    del values["rms_norm_eps"]
    values["extra"] = None
    values["rope_parameters"]["rope_theta"] = float("inf")
    values["is_causal"] = True
    write_json(demo[1] / "config.json", values)
    said = json.loads(json.dumps(inspect_pair(*demo).as_dict(), allow_nan=False))
    assert said["accepted"] is False
    mismatches = {one["field"]: one for one in said["mismatches"]}
    assert "drafter" not in mismatches["rms_norm_eps"], "a missing field is left out"
    needs = {one["field"]: one for one in said["checks"] if one["says"] == "lse-mlx needs"}
    assert needs["is_causal"]["target"] is False, "a value and no words"
    assert needs["rope_parameters.rope_theta"] == {
        "field": "rope_parameters.rope_theta",
        "kind": "contract",
        "holds": False,
        "says": "lse-mlx needs",
        "drafter_text": "inf",
        "target_text": "a finite positive number",
    }
    assert mismatches["extra"] == {
        "field": "extra",
        "kind": "contract",
        "holds": False,
        "says": "the record of demo has",
        "drafter": None,
    }
