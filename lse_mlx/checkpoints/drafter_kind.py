"""The config.json of a DFlash2 drafter, or a sentence that says what was found instead of one."""

from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.checks import Words, shown
from lse_mlx.checkpoints.json_object import read_json_object
from lse_mlx.checkpoints.names import ARCHITECTURE, CONFIG, is_dflash2
from lse_mlx.checkpoints.safetensors_header import read_header
from lse_mlx.errors import CheckpointError

FIRST_GENERATION = "DFlashDraftModel"


def read_drafter_values(folder: Path) -> dict[str, Any]:
    """`folder`/config.json as a dict, its fields not checked yet.

    Raises CheckpointError if it is missing, no JSON object, or of anything but a DFlash2 drafter;
    the message says what is there.
    """
    path = folder / CONFIG
    if not path.exists():
        raise CheckpointError(
            f"{folder} is no DFlash2 drafter but {_without_config(folder)}: "
            "pass the folder of a DFlash2 checkpoint with its config.json."
        )
    values = read_json_object(path)
    named = values.get("architectures")
    if not is_dflash2(named):
        raise CheckpointError(
            f"{folder} is no DFlash2 drafter but {_other_kind(folder, values)}, with architectures "
            f"= {shown(named)}: pass the {ARCHITECTURE} that was made for this target."
        )
    return values


def _without_config(folder: Path) -> str:
    if not folder.is_dir():
        return "no folder"
    names = [shown(Words(name)) for name in sorted(path.name for path in folder.iterdir())]
    if not names:
        return "an empty folder"
    if _is_mtp_head(folder):
        return f"an MTP head without a config.json ({names[0]})"
    more = ", ..." if len(names) > 3 else ""
    return f"a folder without a config.json ({', '.join(names[:3])}{more})"


def _other_kind(folder: Path, values: dict[str, Any]) -> str:
    """What a checkpoint with another architecture is, in words."""
    kind, named = values.get("model_type"), str(values.get("architectures"))
    if FIRST_GENERATION in named or isinstance(values.get("dflash_config"), dict):
        return f"a DFlash drafter of another generation ({shown(kind)})"
    if "mtp" in f"{kind} {named}".lower() or _is_mtp_head(folder):
        return f"an MTP head ({shown(kind)})"
    if "ForCausalLM" in named or "ForConditionalGeneration" in named:
        return f"a language model of its own ({shown(kind)})"
    return f"a model of another kind ({shown(kind)})"


def _is_mtp_head(folder: Path) -> bool:
    """Whether the weights there are those of a native multi-token-prediction layer alone."""
    names: list[str] = []
    for path in folder.glob("*.safetensors"):
        try:
            names += read_header(path).tensors
        except CheckpointError:
            continue  # a damaged file says nothing of its kind
    return bool(names) and all("mtp" in name.split(".") for name in names)
