"""From what a user names to folders on disk."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lse_mlx import demo_pair
from lse_mlx.checkpoints.complete import check_complete
from lse_mlx.checkpoints.drafter_config import DFlash2Config
from lse_mlx.checkpoints.gate.tokenizer_identity import has_tokenizer, read_tokenizer
from lse_mlx.checkpoints.hub.cache import Wanted
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.names import CONFIG
from lse_mlx.checkpoints.origin import find_origin
from lse_mlx.checkpoints.pairing import (
    DrafterRecord,
    PairRecord,
    TargetRecord,
    by_drafter,
    by_name,
    by_target_name,
    registered,
)
from lse_mlx.checkpoints.progress import Lines, Progress
from lse_mlx.checkpoints.target_config import DIMENSIONS, check_supported, read_config
from lse_mlx.errors import CheckpointError, reason

DEMO = "demo"
AUTO = "auto"

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# It becomes part of a path in the cache, which ".." would lead out of and where a part has 255 bytes
# at most; Git has no such names either.
_REVISION = re.compile(r"(?!.*\.\.)(?=.{1,200}$)[A-Za-z0-9][\w.-]*(/\w[\w.-]*)*", re.ASCII)


@dataclass(frozen=True)
class Pair:
    """Folders of a target and, if there is one, its drafter."""

    target: Path
    drafter: Path | None


@dataclass(frozen=True)
class _Dimensions:
    """Of a target, by its config.json."""

    hidden_size: int
    vocab_size: int
    layer_count: int


def resolve_pair(
    model: str | Path,
    drafter: str | Path | None = AUTO,
    hub: Hub | None = None,
    progress: Progress | None = None,
) -> Pair:
    """Find the checkpoints of a pair, downloading what is on the hub and not in the cache.

    model: "demo" for the pair in the package, the name of another registered pair, a folder, or a
    Hugging Face repository (org/name, or org/name@revision)
    drafter: the same for the drafter; "auto" is the one registered for that target, and none where
    there is none; None is no drafter
    progress: told of downloads and of a drafter that was chosen; lines on standard error if None

    Raises CheckpointError when something cannot be found or is not whole, and before any weights
    are downloaded when the drafter's config.json does not fit the target's.
    """
    hub = hub or Hub()
    progress = progress or Lines()
    target = _find(model, "model")
    chosen = _registered_drafter(model, target, progress) if drafter == AUTO else drafter
    proposer = None if chosen is None else _find(chosen, "drafter")
    # Both together, so that there is room for both before the first byte comes.
    wanted = [one for one in (target, proposer) if isinstance(one, Wanted)]

    def folders(fetched: Sequence[Path]) -> tuple[Path, Path | None]:
        found = dict(zip(wanted, fetched, strict=True))
        return (
            found[target] if isinstance(target, Wanted) else target,
            found[proposer] if isinstance(proposer, Wanted) else proposer,
        )

    folder, beside = folders(
        hub.fetch_all(
            wanted, progress, before_weights=lambda fetched: _check_configs(*folders(fetched))
        )
    )
    return Pair(folder, beside)


def wanted_target(record: PairRecord) -> Wanted:
    """The published target of a pair. Raises CheckpointError where none is known."""
    return _wanted(record, record.target, "build of its target", "model")


def wanted_drafter(record: PairRecord) -> Wanted:
    """The published drafter of a pair, with room for its conversion; raises as `wanted_target`."""
    return _wanted(record, record.drafter, "drafter", "drafter")


def parse_repository(name: str) -> Wanted | None:
    """`name` as org/name or org/name@revision; None if it is neither.

    A registered repository without a revision gets the registered one.
    """
    repository, _, revision = name.partition("@")
    if not _REPOSITORY.fullmatch(repository) or ("@" in name and not _REVISION.fullmatch(revision)):
        return None
    known = _published(repository)
    if known is None:
        return Wanted(repository, revision or None)
    if revision in ("", known.revision):
        return known
    return replace(known, revision=revision, pull_name=None)


def _published(repository: str) -> Wanted | None:
    """The registered target or drafter in `repository`, whatever its case, or None."""
    if found := by_drafter(repository):
        return wanted_drafter(found)
    for record in registered():
        if (record.target.repository or "").lower() == repository.lower():
            return wanted_target(record)
    return None


def _wanted(record: PairRecord, part: TargetRecord | DrafterRecord, kind: str, role: str) -> Wanted:
    if part.repository is None:
        raise CheckpointError(
            f"The pair {record.name!r} names no {kind} that could be downloaded: "
            f"give the {role} as a folder or a repository (org/name)."
        )
    return Wanted(
        part.repository,
        part.revision,
        tokenizer=role == "model",
        room=(part.q8_bytes or 0) if isinstance(part, DrafterRecord) else 0,
        # Only a pair with both parts on the hub can be pulled by its name.
        pull_name=record.name if record.target.repository else None,
    )


def _check_configs(target: Path, drafter: Path | None) -> None:
    """Raise CheckpointError for a pair that its two config.json already tell apart.

    The gate compares everything once all is there; this spares a download that it would refuse.
    """
    if drafter is not None:
        text = check_supported(read_config(target), target)
        DFlash2Config.read(drafter).check_target(
            _Dimensions(text["hidden_size"], text["vocab_size"], text["num_hidden_layers"])
        )


def _registered_drafter(model: str | Path, target: Path | Wanted, progress: Progress) -> str | None:
    """The name of the drafter that is registered for a target, or None. Says which was chosen."""
    if model == DEMO:
        return DEMO
    named = by_name(model) if isinstance(model, str) else None
    if named is not None:
        return named.name
    if isinstance(target, Path) and _is_demo(target):
        progress.note(f"Drafter for {target}: that of the demo pair, as it is the demo's target.")
        return DEMO
    name = target.repository if isinstance(target, Wanted) else find_origin(target).repository
    record = by_target_name(name)
    if record is None or record.name == DEMO:  # a folder that happens to be called so
        return None
    if isinstance(target, Path) and (other := _other_geometry(target, record.target)):
        progress.note(f"No drafter: {name} is called like {record.name} but has {other}.")
        return None
    progress.note(f"Drafter for {name}: {wanted_drafter(record)}, registered for it.")
    return record.name


def _is_demo(folder: Path) -> bool:
    """Whether a target is the demo's or has its tokenizer and dimensions, as a copy has."""
    if folder.resolve() == demo_pair.TARGET.resolve():
        return True
    demo = by_name(DEMO)
    if demo is None or _other_geometry(folder, demo.target) or not has_tokenizer(folder):
        return False
    return read_tokenizer(folder).sha256 == demo.target.tokenizer_sha256


def _other_geometry(folder: Path, record: TargetRecord) -> str | None:
    """The first dimension in which a target is not the recorded one, or None."""
    config = read_config(folder)
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    for field in DIMENSIONS:
        if text.get(field) != getattr(record, field):
            return f"{field} {text.get(field)!r}, not {getattr(record, field)}"
    return None


def _find(name: str | Path, role: str) -> Path | Wanted:
    """A folder on disk, or what to fetch from the hub."""
    if not isinstance(name, str | Path) or not str(name).strip():
        raise CheckpointError(
            f"The {role} is {name!r}: give a folder, a repository (org/name), or {_names()}."
        )
    if name == DEMO:
        return demo_pair.TARGET if role == "model" else demo_pair.DRAFTER
    if isinstance(name, str) and (record := by_name(name)):
        return wanted_target(record) if role == "model" else wanted_drafter(record)
    try:
        path = Path(name).expanduser()
        is_folder, exists = path.is_dir(), path.exists() or path.is_symlink()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"The {role} {str(name)!r} is no name of a folder ({reason(error)}): give a folder, "
            f"a repository (org/name), or {_names()}."
        ) from error
    if is_folder:
        return _checked_folder(path, role)
    if exists:
        raise CheckpointError(f"The {role} {str(name)!r} is {_kind_of_file(path)}.")
    wanted = parse_repository(name) if isinstance(name, str) else None
    if wanted is None:
        raise CheckpointError(
            f"The {role} {str(name)!r} does not exist: "
            f"give a folder, a Hugging Face repository (org/name), or {_names()}."
        )
    return replace(wanted, tokenizer=role == "model")


def _checked_folder(path: Path, role: str) -> Path:
    snapshots = path / "snapshots"
    if os.path.isdir(snapshots) and not os.path.exists(path / CONFIG):
        repository = path.name.removeprefix("models--").replace("--", "/")
        raise CheckpointError(
            f"The {role} {str(path)!r} is a repository's folder in the Hugging Face cache: "
            f"give {repository}, or one of the folders in {snapshots}."
        )
    check_complete(path, tokenizer=role == "model")
    return path


def _kind_of_file(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return "a link to nothing: name the folder that holds config.json"
    if path.resolve().parent.name == "blobs":
        return (
            "one file of the Hugging Face cache: name the snapshot folder, which holds config.json "
            "too, or the repository (org/name)"
        )
    return "a file: name the folder that holds config.json"


def _names() -> str:
    return " or ".join(repr(record.name) for record in registered() if _complete(record))


def _complete(record: PairRecord) -> bool:
    return record.name == DEMO or record.target.repository is not None
