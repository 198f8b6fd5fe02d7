"""Small unquantized targets on disk, and what their conversion says."""

import json
from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.conversion.target import prepare_target
from tests.checkpoints.conversion.dflash2_sources import Said
from tests.tiny_models import on_cpu, save_checkpoint, save_tokenizer


def target(folder: Path, kind: str = "bf16", **config: Any) -> Path:
    """A tiny checkpoint with tokenizer and generation settings; `config` replaces fields."""
    save_tokenizer(save_checkpoint(folder, kind))
    (folder / "generation_config.json").write_text('{"eos_token_id": [3]}', "utf-8")
    values = json.loads((folder / "config.json").read_text("utf-8")) | config
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    return folder


def prepare(folder: Path, settings: CacheSettings, said: Said | None = None) -> tuple[Path, Said]:
    """What `prepare_target` returns, and what it said."""
    said = said or Said()
    with on_cpu():
        return prepare_target(folder, settings, said), said
