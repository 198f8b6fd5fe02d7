"""`lse-mlx pull`: bring a pair, or one repository, whole into the cache."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lse_mlx.checkpoints.disk import human
from lse_mlx.checkpoints.hub.hub import Hub, Wanted
from lse_mlx.checkpoints.pairing import PairRecord, by_name, registered
from lse_mlx.checkpoints.resolve import DEMO, parse_repository, wanted_drafter, wanted_target
from lse_mlx.cli.common import notes, one_sentence_errors
from lse_mlx.cli.progress import progress
from lse_mlx.errors import RequestError


def pull(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A pair (`lse-mlx models` lists them), or a Hugging Face repository (org/name or "
            "org/name@revision). Without it the first pair of that list.",
            metavar="NAME",
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="Commit, branch or tag of a repository.", metavar="REVISION"),
    ] = None,
    drafter_only: Annotated[
        bool, typer.Option("--drafter-only", help="Of a pair, only its drafter.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Only say whether the cache has all of it.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Download a pair or a repository; what is there stays, what broke off goes on."""
    with one_sentence_errors():
        if name is not None and name.lower() == DEMO:
            notes.print("The demo pair is in the package: there is nothing to download.")
            return
        wanted = choose(name, revision, drafter_only)
        hub = Hub(offline=offline)
        if name is None and not offline and not yes and not _agreed(hub, wanted):
            notes.print("Nothing was downloaded.")
            return
        with progress() as shown:
            folders = hub.fetch_all(wanted, shown, refresh=not offline)
        for folder in folders:
            print(folder)


def choose(name: str | None, revision: str | None, drafter_only: bool) -> list[Wanted]:
    """What to fetch for a NAME. Raises RequestError for what is no name of something on the hub."""
    record = registered()[0] if name is None else by_name(name)
    if record is not None:
        return _of_pair(record, revision, drafter_only)
    if drafter_only:
        raise RequestError(
            f"--drafter-only is for a pair, and {name!r} is none: see `lse-mlx models`."
        )
    wanted = parse_repository(name or "")
    if wanted is None:
        kind = "a folder here" if name and Path(name).is_dir() else "no pair and no repository"
        raise RequestError(
            f"{name!r} is {kind}: give a pair of `lse-mlx models`, or org/name on the hub."
        )
    if revision is None:
        return [wanted]
    if "@" in (name or ""):
        raise RequestError(f"{name} and --revision {revision} both give a revision: give one.")
    return [Wanted(wanted.repository, revision, wanted.tokenizer, wanted.room)]


def _of_pair(record: PairRecord, revision: str | None, drafter_only: bool) -> list[Wanted]:
    if revision is not None:
        raise RequestError(
            f"The revisions of the pair {record.name!r} are fixed: "
            "give --revision with a repository (org/name)."
        )
    return (
        [wanted_drafter(record)]
        if drafter_only
        else [wanted_target(record), wanted_drafter(record)]
    )


def _agreed(hub: Hub, wanted: Sequence[Wanted]) -> bool:
    """Say how much a download is and ask; nothing to download needs no answer."""
    size = hub.missing_bytes(wanted)
    if not size:
        return True
    names = " and ".join(str(one) for one in wanted)
    notes.print(
        f"{names}: {human(size)} to download to {hub.cache}, "
        f"which has {human(hub.free(hub.cache))} free."
    )
    if not sys.stdin.isatty():
        raise RequestError("Nobody can be asked here: give --yes, or name what to download.")
    return typer.confirm("Download?", default=True, err=True)
