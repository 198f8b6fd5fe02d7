"""A bf16 target becomes a 4-bit one as mlx-lm makes it, once, and without running anything of it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.convert import convert as mlx_lm_convert

from lse_mlx import demo_pair
from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.conversion.target import (
    convert_target,
    is_unquantized_target,
    prepare_target,
    verify_target,
)
from lse_mlx.checkpoints.origin import find_origin
from lse_mlx.errors import CheckpointError
from tests.checkpoints.conversion.dflash2_sources import (
    Said,
    overwrite_keeping_stat,
    unfinished,
    write_origin,
    write_source,
)
from tests.checkpoints.conversion.target_sources import prepare, target
from tests.tiny_models import load_tiny, on_cpu, save_checkpoint, save_tokenizer


def weights(folder: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for path in folder.glob("model*.safetensors"):
        held = mx.load(str(path))
        assert isinstance(held, dict)
        found |= held
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return target(tmp_path / "source")


def test_what_is_an_unquantized_target(tmp_path):
    for kind in ("bf16", "tied", "vision", "qwen3", "moe", "moe-vision"):
        assert is_unquantized_target(save_checkpoint(tmp_path / kind, kind))
    for kind in ("q4", "mixed", "moe-q4"):
        assert not is_unquantized_target(save_checkpoint(tmp_path / kind, kind))
    assert not is_unquantized_target(write_source(tmp_path / "drafter"))
    assert not is_unquantized_target(demo_pair.TARGET)
    assert not is_unquantized_target(tmp_path / "none")
    assert not is_unquantized_target(target(tmp_path / "other", model_type="llama"))
    assert not is_unquantized_target(target(tmp_path / "experts", num_experts=8))
    block = {"quant_method": "fp8"}
    assert not is_unquantized_target(target(tmp_path / "fp8", quantization_config=block))
    (target(tmp_path / "no weights") / "model.safetensors").unlink()
    assert not is_unquantized_target(tmp_path / "no weights")
    (target(tmp_path / "modelopt") / "hf_quant_config.json").write_text("{}")
    assert not is_unquantized_target(tmp_path / "modelopt")


@pytest.mark.parametrize("kind", ["bf16", "tied", "vision", "qwen3", "moe", "moe-vision"])
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_it_is_what_mlx_lm_makes_of_it(tmp_path, settings, capfd, kind, dtype):
    source = target(tmp_path / "source", kind, **({"torch_dtype": dtype} if dtype else {}))
    place, said = prepare(source, settings)
    assert capfd.readouterr() == ("", "")  # neither ours nor what mlx-lm prints
    assert place == source / "lse-q4g64"
    assert said.phases == ["hash-target", "quantize-target", "write", "hash-output"]
    ends = {phase: (done, total) for phase, done, total in said.steps}
    assert all(done == total > 0 for done, total in ends.values())

    config = json.loads((source / "config.json").read_text("utf-8"))
    by_name = shutil.copytree(source, tmp_path / "named", ignore=lambda *_: ["lse-q4g64"])
    named = config | {"model_type": config["model_type"].removesuffix("_text")}
    (by_name / "config.json").write_text(json.dumps(named), "utf-8")
    with on_cpu():
        mlx_lm_convert(str(by_name), str(tmp_path / "stock"), quantize=True, q_bits=4)
    ours, stock = weights(place), weights(tmp_path / "stock")
    assert sorted(ours) == sorted(stock)
    for name, array in ours.items():
        assert array.dtype == stock[name].dtype, name
        assert bool(mx.array_equal(array, stock[name], equal_nan=True)), name

    said_of_it = json.loads((place / "config.json").read_text("utf-8"))
    routers = {
        f"language_model.model.layers.{layer}.mlp.{router}": {"group_size": 64, "bits": 8}
        for layer in range(5 if kind.startswith("moe") else 0)
        for router in ("gate", "shared_expert_gate")
    }
    settings_of_all = {"group_size": 64, "bits": 4, "mode": "affine"}
    assert said_of_it["quantization"] == settings_of_all | routers
    # Everything else is as it was, but for the part that was dropped.
    config.pop("vision_config", None)
    kept = {k: v for k, v in said_of_it.items() if not k.startswith("quantization")}
    assert kept == config
    assert load_tiny(place).vocab_size == 97


def test_tokenizer_and_settings_travel_along_and_code_does_not(source, settings):
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "modeling.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    place, _ = prepare(source, settings)
    travelled = (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    )
    for name in travelled:
        assert (place / name).read_bytes() == (source / name).read_bytes()
    assert sorted(os.listdir(place)) == sorted(
        [
            *travelled,
            "config.json",
            "model.safetensors",
            "model.safetensors.index.json",
            "source-repository.json",
        ]
    )


def test_links_are_copied_as_what_they_lead_to(tmp_path, settings):
    made = target(tmp_path / "made")
    folder = tmp_path / "models--org--name" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    for name in os.listdir(made):
        (folder / name).symlink_to(made / name)
    place, said = prepare(folder, settings)
    assert place == folder / "lse-q4g64"
    assert not any((place / name).is_symlink() for name in os.listdir(place))
    assert said.mentions("converting", "org/name@0123")
    origin = find_origin(place)
    assert (origin.repository, origin.revision, origin.known) == ("org/name", "0123", True)


@pytest.mark.parametrize(
    "named", [{"model_file": "evil.py"}, {"auto_map": {"AutoModel": "evil.M"}}]
)
def test_no_code_of_a_checkpoint_is_run(source, settings, tmp_path, named):
    (source / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass M: pass\n")
    config = json.loads((source / "config.json").read_text("utf-8")) | named
    (source / "config.json").write_text(json.dumps(config), "utf-8")
    if "model_file" in named:
        with pytest.raises(CheckpointError, match="custom module"):
            prepare(source, settings)
        assert unfinished(source) == []
        assert not (source / "lse-q4g64").exists()
    else:
        prepare(source, settings)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_unquantized_target_is_used_as_it_is(tmp_path, settings):
    for folder in (
        target(tmp_path / "q4", "q4"),
        write_source(tmp_path / "drafter"),
        tmp_path / "none",
    ):
        assert prepare(folder, settings) == (folder, Said())
    with pytest.raises(CheckpointError, match="no unquantized target"):
        convert_target(tmp_path / "q4", tmp_path / "new", Said())
    assert not (tmp_path / "new").exists()


def test_it_is_made_once_and_found_without_reading_the_weights(source, settings):
    place, _ = prepare(source, settings)
    overwrite_keeping_stat(source / "model.safetensors")
    assert prepare(source, settings) == (place, Said([f"using the conversion in {place}"]))
    assert prepare(place, settings) == (place, Said())


def test_the_names_of_blobs_spare_the_hashing(source, settings):
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    (source / "model.safetensors").rename(source.parent / digest)
    (source / "model.safetensors").symlink_to(source.parent / digest)
    _, said = prepare(source, settings)
    assert said.phases == ["quantize-target", "write", "hash-output"]
    (source / "lse-q4g64.source-stat").unlink()
    assert prepare(source, settings)[1].phases == []


NAMED = {"no name": ("",), "parent": ("..",), "zero byte": ("a\0b",), "surrogate": ("\ud800",)}
"""Files of a manifest that cannot be any."""


def spoil(source: Path, how: str) -> None:
    place = source / "lse-q4g64"
    if how == "source weights":
        save_checkpoint(source, seed=5)
    elif how == "source config":
        config = json.loads((source / "config.json").read_text()) | {"rms_norm_eps": 1e-5}
        (source / "config.json").write_text(json.dumps(config))
    elif how == "source tokenizer":
        save_tokenizer(source, template=False)
    elif how == "new source file":
        (source / "chat_template.jinja").write_text("{{ messages }}")
    elif how == "second shard":
        mx.save_safetensors(str(source / "model-2.safetensors"), {"mtp.x": mx.zeros((2,))})
    elif how == "truncated":
        os.truncate(place / "model.safetensors", 1000)
    elif how == "no tokenizer":
        (place / "tokenizer.json").unlink()
    elif how == "no manifest":
        (place / "source-repository.json").unlink()
    elif how == "drafter's manifest":
        (place / "source-repository.json").write_text('{"files": [1], "bytes": 7}')
    elif how == "manifest with paths":
        manifest = json.loads((place / "source-repository.json").read_text())
        manifest["files"] |= {"../config.json": {"bytes": 1, "sha256": ""}}
        (place / "source-repository.json").write_text(json.dumps(manifest))
    elif how in NAMED or how == "empty manifest":
        manifest = json.loads((place / "source-repository.json").read_text())
        odd = {name: {"bytes": 1, "sha256": ""} for name in NAMED.get(how, ())}
        manifest["files"] = odd | manifest["files"] if odd else {}
        (place / "source-repository.json").write_text(json.dumps(manifest))
    elif how == "conversion's config":
        said = (place / "config.json").read_text()
        (place / "config.json").write_text(said.replace('"bits": 4', '"bits": 8'))
    elif how == "damaged header":
        overwrite_keeping_stat(place / "model.safetensors")
    elif how == "other bits":
        shutil.rmtree(place)
        convert_target(source, place, Said(), bits=8)


SPOILED = {
    "source weights": "weights changed",
    "source config": "config or tokenizer changed",
    "source tokenizer": "config or tokenizer changed",
    "new source file": "config or tokenizer changed",
    "second shard": "weights changed",
    "truncated": "incomplete",
    "no tokenizer": "incomplete",
    "no manifest": "no readable manifest",
    "drafter's manifest": "no readable manifest",
    "manifest with paths": "no readable manifest",
    "empty manifest": "no readable manifest",
    "no name": "no readable manifest",
    "parent": "no readable manifest",
    "zero byte": "incomplete",
    "surrogate": "incomplete",
    "conversion's config": "config.json is not the one that was written",
    "damaged header": "model.safetensors is damaged",
    "other bits": "MLX affine Q8 group64",
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_is_no_longer_right_is_made_again(source, settings, how):
    place, _ = prepare(source, settings)
    spoil(source, how)
    again, said = prepare(source, settings)
    assert again == place
    assert said.mentions("discarding", SPOILED[how])
    assert "quantize-target" in said.phases
    assert verify_target(source, settings, Said()) == place
    assert prepare(source, settings)[1].phases == []
    assert unfinished(source) == []


def test_a_person_s_file_in_its_folder_keeps_it(source, settings):
    place, _ = prepare(source, settings)
    thesis = place / "thesis.txt"
    thesis.write_text("mine")
    assert prepare(source, settings)[0] == place
    spoil(source, "truncated")
    again, said = prepare(source, settings)
    assert again.parent == settings.user_cache
    assert said.mentions("in the way", "'thesis.txt'", str(again))
    assert thesis.read_text() == "mine"
    thesis.unlink()
    assert prepare(source, settings)[0] == again
    assert (place / "tokenizer.json").exists()


@pytest.mark.parametrize("which", ["source", "conversion", "manifest"])
def test_verification_reads_everything(source, settings, which):
    with pytest.raises(CheckpointError, match="no conversion"):
        verify_target(source, settings, Said())
    place, _ = prepare(source, settings)
    assert verify_target(source, settings, Said()) == place
    if which == "manifest":
        (place / "source-repository.json").write_text("{}")
    else:
        overwrite_keeping_stat((source if which == "source" else place) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"convert (the checkpoint )?again"):
        verify_target(source, settings, Said())


def test_a_folder_that_cannot_be_written_sends_it_to_the_user_cache(source, settings):
    write_origin(source)
    (source / "lse-q4g64").write_text("in the way")
    place, said = prepare(source, settings)
    assert place == settings.user_cache / "test-fixture@0123abcd-q4g64"
    assert said.mentions("in the way", str(place))
    assert prepare(source, settings)[0] == place
    mine = settings.user_cache / "mine"
    assert prepare(source, CacheSettings(directory=mine))[0] == mine / place.name


@pytest.mark.parametrize("name", ["ch[e]ckpoint", "two words ü", "*"])
def test_any_name_of_a_folder_will_do(tmp_path, settings, name):
    place, _ = prepare(target(tmp_path / name), settings)
    assert load_tiny(place).vocab_size == 97


def test_by_hand_into_a_folder_of_choice(source, tmp_path):
    with on_cpu():
        convert_target(source, tmp_path / "new", Said(), bits=8)
    config = json.loads((tmp_path / "new" / "config.json").read_text("utf-8"))
    assert config["quantization"]["bits"] == 8
    assert load_tiny(tmp_path / "new").vocab_size == 97
    assert not list(source.glob("lse-*"))
    said = Said()
    with pytest.raises(CheckpointError, match="exists already"):
        convert_target(source, tmp_path / "new", said)
    with pytest.raises(CheckpointError, match="No folder can be made"):
        convert_target(source, source / "config.json" / "new", said)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="exists already"):
        convert_target(source, tmp_path / "link", said)
    assert said.steps == []  # nothing was read for it


def test_missing_and_cut_weights_are_refused_before_anything_is_written(source, settings):
    weights_file = source / "model.safetensors"
    os.truncate(weights_file, weights_file.stat().st_size - 1)
    before = sorted(os.listdir(source))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        prepare(source, settings)
    assert sorted(os.listdir(source)) == before
    shards = target(source.parent / "shards")
    (shards / "model.safetensors").rename(shards / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        prepare(shards, settings)
    assert not list(shards.glob("lse-*"))
    full = target(source.parent / "other")
    mx.save_safetensors(str(full / "model.safetensors"), {"a": mx.zeros((2, 2))})
    with pytest.raises(CheckpointError, match="cannot be converted"):
        prepare(full, settings)
    assert not list(full.glob("lse-*"))


LIMITED = """
import resource, sys
from pathlib import Path
from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.progress import Silent
from lse_mlx.checkpoints.conversion.target import prepare_target
from lse_mlx.errors import LseError
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    prepare_target(Path(sys.argv[1]), CacheSettings(), Silent())
except LseError as error:
    sys.exit(f"error: {error}")
"""


def test_a_file_that_may_not_grow_is_one_sentence(source):
    before = sorted(os.listdir(source))
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(source)], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in ran.stderr
    assert sorted(os.listdir(source)) == before


def test_too_small_a_disk_is_told_before_anything_is_written(disk, settings):
    source = target(disk / "source")
    (disk / "filler").write_bytes(b"x" * (26 << 20))
    said = Said()
    with pytest.raises(CheckpointError, match=r"needs .* MB in .* are free: make room"):
        prepare_target(source, settings, said)
    assert said.phases == []
    assert not list(source.glob("lse-*"))
