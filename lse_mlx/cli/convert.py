"""`lse-mlx convert`: a conversion by hand, into the cache of the first use or anywhere."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lse_mlx import demo_pair
from lse_mlx.checkpoints.complete import safetensors_names
from lse_mlx.checkpoints.conversion.convert import convert as convert_drafter
from lse_mlx.checkpoints.conversion.first_use import (
    Kind,
    detect,
    prepare_drafter,
    verify_conversion,
)
from lse_mlx.checkpoints.conversion.manifest import format_name, stated_format
from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.conversion.target import (
    convert_target,
    find_target,
    is_unquantized_target,
    prepare_target,
    verify_target,
)
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.origin import find_origin
from lse_mlx.checkpoints.pairing import by_name
from lse_mlx.checkpoints.progress import Progress
from lse_mlx.checkpoints.resolve import DEMO, resolve_pair, wanted_drafter
from lse_mlx.checkpoints.target_config import check_supported, read_config
from lse_mlx.cli.common import one_sentence_errors
from lse_mlx.cli.pair import ask, can_ask
from lse_mlx.cli.progress import progress
from lse_mlx.errors import CheckpointError, LseError, RequestError

DRAFTER_BITS, TARGET_BITS = 8, 4


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A bf16 DFlash2 drafter or a bf16 target: a folder, a Hugging Face repository, or "
            "a pair of `lse-mlx models`, whose drafter is meant.",
            metavar="SOURCE",
        ),
    ],
    destination: Annotated[
        Path | None,
        typer.Argument(
            help="The new folder; without it the place where the first use looks.",
            metavar="DEST",
        ),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            help="Bits a weight, 8 or 4; if not given, 8 for a drafter and 4 for a target, "
            "and with --verify those of the conversion."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Convert nothing: hash source and conversion again and compare."
        ),
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use what is on this machine, never the network.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Convert a target without asking.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the folder.")
    ] = False,
) -> None:
    """Convert a bf16 drafter (to 8 bits) or target (to 4 bits), or verify such a conversion."""
    with one_sentence_errors(), progress() as shown:
        if bits not in (None, 4, 8):
            raise RequestError(f"--bits {bits} is not possible: give 8 or 4.")
        settings = CacheSettings.from_environment(os.environ)
        folder = _find(source, offline, shown)
        is_target = _is_target(folder, bits or DRAFTER_BITS)
        if destination is None and folder.resolve() == demo_pair.DRAFTER.resolve():
            raise RequestError(
                f"{folder} is used as it is stored: give DEST to convert it to another place."
            )
        usual = TARGET_BITS if is_target else DRAFTER_BITS
        if verify:
            check = verify_target if is_target else verify_conversion
            place = check(folder, settings, shown, bits, destination)
        elif is_target:
            place = _target(folder, destination, settings, shown, bits or usual, yes)
        else:
            place = _drafter(folder, destination, settings, shown, bits or usual)
        said = stated_format(place)
        bits = next((n for n in (4, 8) if said == format_name(n)), bits or usual)
        _print(folder, place, is_target, bits, verify, as_json)


def _find(source: str, offline: bool, shown: Progress) -> Path:
    hub = Hub(offline=offline)
    if source.lower() == DEMO:
        return demo_pair.DRAFTER
    if record := by_name(source):
        return hub.fetch_all([wanted_drafter(record)], shown)[0]
    folder = os.path.expanduser(source)
    return Path(folder) if os.path.isdir(folder) else resolve_pair(source, None, hub, shown).target


def _is_target(folder: Path, bits: int) -> bool:
    """Whether `folder` is a bf16 target rather than a bf16 drafter; raises for anything else."""
    found = detect(folder, bits)
    if found.kind is Kind.SOURCE:
        return False
    if found.kind is Kind.UNSUPPORTED:
        raise CheckpointError(found.reason)
    if found.kind is Kind.QUANTIZED:
        raise CheckpointError(
            f"{folder} is a quantized DFlash2 drafter: use it as it is, or name its bf16 source."
        )
    if not is_unquantized_target(folder):
        config = read_config(folder)
        check_supported(config, folder)
        if not safetensors_names(folder):
            raise CheckpointError(
                f"{folder} has no model*.safetensors: download the weights of this checkpoint."
            )
        raise CheckpointError(
            f"{folder} is a quantized {config['model_type']} target: "
            "use it as it is, or name its bf16 source."
        )
    return True


def _ask(folder: Path, bits: int, yes: bool) -> None:
    if yes:
        return
    if not can_ask():
        raise RequestError(f"{folder} is a target, whose conversion is large: give --yes with it.")
    if not ask(f"Convert {folder} to {bits} bits?"):
        raise LseError("Nothing was converted, as you said no.")


def _target(
    folder: Path,
    destination: Path | None,
    settings: CacheSettings,
    shown: Progress,
    bits: int,
    yes: bool,
) -> Path:
    if destination is None and (found := find_target(folder, settings, shown, bits)):
        return found
    _ask(folder, bits, yes)
    if destination is None:
        return prepare_target(folder, settings, shown, bits)
    convert_target(folder, destination, shown, bits)
    return destination


def _drafter(
    folder: Path, destination: Path | None, settings: CacheSettings, shown: Progress, bits: int
) -> Path:
    if destination is None:
        # Asked for by hand, it is made whatever LSE_DFLASH2_AUTOCONVERT says.
        return prepare_drafter(folder, settings.as_enabled(), shown, bits)
    origin = find_origin(folder)
    convert_drafter(
        folder, destination, origin.repository, origin.revision, bits=bits, progress=shown
    )
    return destination


def _print(
    folder: Path, place: Path, is_target: bool, bits: int, verified: bool, as_json: bool
) -> None:
    if not as_json:
        print(place)
        return
    report: dict[str, Any] = {
        "kind": "target" if is_target else "drafter",
        "source": str(folder),
        "destination": str(place),
        "bits": bits,
        "verified": verified,
        "origin": str(find_origin(folder)),
    }
    print(json.dumps(report, ensure_ascii=False))
