"""A whole load of a pair that brings code along in every way there is: none of it is run."""

import os
import pickle
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import lse_mlx
from lse_mlx import demo_pair
from lse_mlx.checkpoints.gate.pair_record import write_pair_record
from lse_mlx.errors import CheckpointError
from tests.checkpoints.gate.sparse_checkpoints import read_json, write_json

MODULE = "modeling_planted"
CONFIG_MAP = {
    "AutoConfig": f"{MODULE}.Config",
    "AutoModel": f"{MODULE}.Model",
    "AutoModelForCausalLM": f"{MODULE}.Model",
}
TOKENIZER_MAP = {"AutoTokenizer": [f"{MODULE}.Tokenizer", f"{MODULE}.Tokenizer"]}


def plant(folder: Path, ran: Path) -> None:
    """Put modules and pickles into `folder` that leave the file `ran` once one of them is run."""
    code = f"open({str(ran)!r}, 'w').close()\n"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, (code,)

    for name in (MODULE, "model", "sitecustomize", "conftest", "__init__", "tokenizers"):
        (folder / f"{name}.py").write_text(code)
    for name in ("pytorch_model.bin", "model.pkl", "training_args.bin", "model.pt", "model.npz"):
        (folder / name).write_bytes(pickle.dumps(Payload()))


def write_tokenizer_config(folder: Path, **fields: Any) -> None:
    path = folder / "tokenizer_config.json"
    write_json(path, (read_json(path) if path.exists() else {}) | fields)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The demo pair with planted code, whose every file names it; the record allows for that."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    shutil.copytree(demo_pair.TARGET, target)
    shutil.copytree(demo_pair.DRAFTER, drafter)
    for folder in (target, drafter):
        plant(folder, tmp_path / "ran")
        write_json(
            folder / "config.json", read_json(folder / "config.json") | {"auto_map": CONFIG_MAP}
        )
        write_tokenizer_config(folder, auto_map=TOKENIZER_MAP)
    config = read_json(drafter / "config.json") | {"model_file": f"{MODULE}.py"}
    write_json(drafter / "config.json", config)
    write_pair_record(drafter / "pair.json", "planted", target, drafter)
    return target, drafter


def test_what_is_planted_would_be_seen(tmp_path: Path) -> None:
    plant(tmp_path, tmp_path / "ran")
    exec((tmp_path / f"{MODULE}.py").read_text())
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    pickle.loads((tmp_path / "model.pkl").read_bytes())
    assert (tmp_path / "ran").exists()


def test_a_load_runs_nothing_that_a_checkpoint_brings(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = pair
    modules, path = set(sys.modules), list(sys.path)
    with lse_mlx.load(target, drafter) as engine:
        reply = engine.generate("Write a story about a shy fox.", max_tokens=24)
    with lse_mlx.load() as shipped:
        assert (
            reply.token_ids
            == shipped.generate("Write a story about a shy fox.", max_tokens=24).token_ids
        )
    assert reply.timings["spec_accepted"] > 0, "the drafter of the pair was at work"
    assert (drafter / "lse-q8g64").is_dir(), "and was converted"
    assert not (tmp_path / "ran").exists()
    assert sys.path == path
    brought = {
        name: getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - modules
    }
    assert not [f for f in brought.values() if f and Path(f).is_relative_to(tmp_path)]


def test_a_target_that_asks_for_a_model_file_is_refused(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = pair
    for name in (f"{MODULE}.py", os.path.relpath(drafter / f"{MODULE}.py", target)):
        write_json(target / "config.json", read_json(target / "config.json") | {"model_file": name})
        for proposer in (None, drafter):
            with pytest.raises(CheckpointError, match=r"do not load as qwen3_5 .* custom module"):
                lse_mlx.load(target, proposer)
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["planted", "PlantedTokenizer", "../target/model"])
def test_a_class_that_a_tokenizer_names_is_not_sought_in_the_folder(
    pair: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    target, _ = pair
    write_tokenizer_config(
        target, tokenizer_class=name, tool_parser_type=name, chat_template_type=name
    )
    with suppress(CheckpointError):  # a class that is not known may well be refused
        lse_mlx.load(target, None).close()
    assert not (tmp_path / "ran").exists()
