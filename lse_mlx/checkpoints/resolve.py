"""From what a user names to folders on disk."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from lse_mlx import demo_pair
from lse_mlx.errors import CheckpointError, reason

DEMO = "demo"
AUTO = "auto"


@dataclass(frozen=True)
class Pair:
    """Folders of a target and, if there is one, its drafter."""

    target: Path
    drafter: Path | None


def resolve_pair(model: str | Path, drafter: str | Path | None = AUTO) -> Pair:
    """Find the checkpoints of a pair.

    model: "demo" for the pair in the package, a folder, or a Hugging Face repository (org/name),
    which is downloaded to the Hugging Face cache if it is not there.
    drafter: the same for the drafter; "auto" is the demo pair's own with "demo" and none otherwise;
    None is no drafter. Raises CheckpointError when something cannot be found.
    """
    if drafter == AUTO:
        drafter = DEMO if model == DEMO else None
    return Pair(
        target=demo_pair.TARGET if model == DEMO else _folder(model, "model"),
        drafter=(
            None
            if drafter is None
            else demo_pair.DRAFTER
            if drafter == DEMO
            else _folder(drafter, "drafter")
        ),
    )


def _folder(name: str | Path, role: str) -> Path:
    if not isinstance(name, str | Path) or not str(name).strip():
        raise CheckpointError(
            f"The {role} is {name!r}: give a folder, a repository (org/name), or {DEMO!r}."
        )
    try:
        path = Path(name).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"The {role} {str(name)!r} is no name of a folder ({reason(error)}): give a folder, "
            f"a repository (org/name), or {DEMO!r}."
        ) from error
    if is_folder:
        return path
    if exists:
        raise CheckpointError(
            f"The {role} {str(name)!r} is a file: name the folder that holds config.json."
        )
    if isinstance(name, Path) or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"The {role} {str(name)!r} does not exist: "
            f"give a folder, a Hugging Face repository (org/name), or {DEMO!r}."
        )
    try:
        return Path(snapshot_download(name))
    except (HFValidationError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"The {role} {name!r} is neither a folder here nor a repository that can be read: "
            f"check the name, or give a folder or {DEMO!r}."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise CheckpointError(
            f"The {role} {name!r} is not a folder here and could not be downloaded: "
            f"check the name and the network, or give a folder or {DEMO!r}."
        ) from error
