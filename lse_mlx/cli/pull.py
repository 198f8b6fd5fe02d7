"""`lse-mlx pull`: bring a pair, or one repository, whole into the cache."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from lse_mlx.checkpoints.disk import human
from lse_mlx.checkpoints.hub.cache import Wanted
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.pairing import by_name, registered
from lse_mlx.checkpoints.resolve import DEMO, parse_repository, wanted_drafter, wanted_target
from lse_mlx.cli.common import notes, one_sentence_errors
from lse_mlx.cli.pair import ask
from lse_mlx.cli.progress import progress
from lse_mlx.errors import CheckpointError, RequestError


def pull(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A pair (`lse-mlx models` lists them), or a Hugging Face repository (org/name or "
            "org/name@revision). Without it the first pair of that list.",
            metavar="NAME",
        ),
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
        wanted = choose(name, drafter_only)
        hub = Hub(offline=offline)
        if name is None and not offline and not yes and not _agreed(hub, wanted):
            notes.print("Nothing was downloaded.")
            return
        with progress() as shown:
            folders = hub.fetch_all(wanted, shown, refresh=not offline)
        for folder in folders:
            print(folder)


def choose(name: str | None, drafter_only: bool) -> list[Wanted]:
    """What to fetch for a NAME.

    Raises CheckpointError for what is no name of something on the hub, and RequestError where
    --drafter-only is not for it.
    """
    record = registered()[0] if name is None else by_name(name)
    if record is not None:
        drafter = wanted_drafter(record)
        if not drafter_only and record.target.repository is None:
            raise CheckpointError(
                f"The pair {record.name!r} names no build of its target that could be downloaded: "
                "give --drafter-only for its drafter, or pull a build of the target as org/name."
            )
        return [drafter] if drafter_only else [wanted_target(record), drafter]
    if drafter_only:
        raise RequestError(
            f"--drafter-only is for a pair, and {name!r} is none: see `lse-mlx models`."
        )
    wanted = parse_repository(name or "")
    if wanted is None:
        kind = "a folder here" if name and os.path.isdir(name) else "no pair and no repository"
        raise CheckpointError(
            f"{name!r} is {kind}: give a pair of `lse-mlx models`, or org/name on the hub."
        )
    return [wanted]


def _agreed(hub: Hub, wanted: Sequence[Wanted]) -> bool:
    """Say how much a download is and ask; nothing to download needs no answer."""
    size = hub.missing_bytes(wanted)
    if not size:
        return True
    names = " and ".join(str(one) for one in wanted)
    place = hub.cache.folder
    notes.print(
        f"{names}: {human(size)} to download to {place}, which has {human(hub.free(place))} free."
    )
    if not sys.stdin.isatty():
        raise RequestError("Nobody can be asked here: give --yes, or name what to download.")
    return ask("Download?")
