"""From the names of a target and a drafter to an `Engine`."""

import os
from contextlib import suppress
from pathlib import Path

from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.prepare import Consent, prepare_pair
from lse_mlx.checkpoints.progress import Lines, Progress, Silent
from lse_mlx.checkpoints.resolve import AUTO, DEMO, Pair
from lse_mlx.checkpoints.target_config import read_stop_tokens
from lse_mlx.drafters.dflash2.drafter import load_dflash2
from lse_mlx.engine import Engine
from lse_mlx.errors import RequestError
from lse_mlx.kernels.operations import with_kernels  # noqa: F401 -- the commands take it from here
from lse_mlx.kernels.options import KernelOptions, check_bool, required_by
from lse_mlx.kernels.registry import Registry
from lse_mlx.target.loading import load_target
from lse_mlx.target.tokenizer import Tokenizer, load_tokenizer
from lse_mlx.warmup import warm_up


def load(
    model: str | Path = DEMO,
    drafter: str | Path | None = AUTO,
    *,
    context_length: int | None = None,
    offline: bool = False,
    allow_revision_mismatch: bool = False,
    quantize_target: Consent = False,
    kernels: str = "auto",
    exact: bool = False,
    require_device_kernels: bool = False,
    strict_draft: bool = False,
    warm_up: bool = True,
    progress: Progress | None = None,
) -> Engine:
    """Load a target and its drafter, downloading and converting what is not there yet.

    model: "demo" for the pair that ships with the package, the name of another registered pair, a
    folder, or a Hugging Face repository (org/name, org/name@revision)
    drafter: the same for the drafter; "auto" is the one registered for this target, and none where
    there is none; None decodes with the target alone
    context_length: the most tokens of prompt and reply; the checkpoint's own limit if None
    offline: use what is on this machine and never connect
    allow_revision_mismatch: accept a drafter of another revision than the recorded one
    quantize_target: convert a target in bf16 to 4 bits, once; a function is asked with the question.
    Otherwise such a target is used as it is stored
    kernels: "own" or "stock" device kernels for operations that MLX has too, or "auto" for the
    faster of both on this device, found by a race once
    exact: on a device, only kernels whose rows do not depend on how many are in a pass, so that
    replies are the same bytes with and without the drafter; on a CPU they are in any case
    require_device_kernels: refuse to compute with plain MLX or NumPy what a device kernel should;
    LSE_REQUIRE_DEVICE_KERNELS=1 in the environment asks for the same
    strict_draft: a failure of the drafter fails the request with DraftError; otherwise the target
    goes on alone, and the reply's timings and `engine.stats()` say so
    warm_up: run every shape of a request once now, so that the first one compiles nothing; on a
    CPU, where nothing is compiled, only decode one reply to see whether the drafter is of use.
    What was found is `engine.warmed`
    progress: told how far downloads, conversions and the warm-up are; lines on standard error if
    None

    Raises CheckpointError when a checkpoint is missing or broken, or the two do not belong together;
    then nothing has been loaded. Raises RequestError for options that mean nothing, and KernelError
    where device kernels are required and cannot run, both before anything is downloaded. With
    `strict_draft` raises DraftError when the drafter fails in the warm-up.
    """
    check_bool("strict_draft", strict_draft)
    check_bool("warm_up", warm_up)
    check_bool("require_device_kernels", require_device_kernels)
    required = require_device_kernels or required_by(os.environ)
    registry = KernelOptions(kernels, exact, required).registry()
    shown = progress or Lines()
    pair = prepare_pair(
        model,
        drafter,
        hub=Hub(offline=offline),
        settings=CacheSettings.from_environment(os.environ),
        progress=shown,
        allow_revision_mismatch=allow_revision_mismatch,
        quantize_target=quantize_target,
    )
    return load_pair(
        pair,
        context_length,
        registry=registry,
        strict_draft=strict_draft,
        warm=warm_up,
        progress=shown,
    )


def load_pair(
    pair: Pair,
    context_length: int | None = None,
    *,
    registry: Registry | None = None,
    strict_draft: bool = False,
    warm: bool = True,
    progress: Progress | None = None,
) -> Engine:
    """Load the prepared folders of a pair, and warm up; raises what `load` raises.

    registry: of the device kernels, from `KernelOptions`; that of MLX's default device if None
    """
    registry = registry or KernelOptions().registry()
    target = load_target(pair.target, context_length, registry=registry)
    tokenizer = load_tokenizer(pair.target, read_stop_tokens(pair.target), target.vocab_size)
    drafter = load_dflash2(pair.drafter, target, registry) if pair.drafter else None
    if not warm:
        return Engine(target, tokenizer, drafter, strict_draft=strict_draft)
    report = warm_up(
        target,
        drafter,
        _some_prompt(tokenizer),
        names=(str(pair.target), str(pair.drafter)),
        races=CacheSettings.from_environment(os.environ).user_cache / "kernels",
        strict_draft=strict_draft,
        progress=progress or Silent(),
    )
    return Engine(target, tokenizer, drafter, report, strict_draft)


def _some_prompt(tokenizer: Tokenizer) -> list[int]:
    """Token ids of a request that any chat model answers at length."""
    for raw in (False, True):
        with suppress(RequestError):  # a template may refuse it, and a vocabulary may lack a token
            return tokenizer.encode("Tell me a story about a brave sailor.", raw)
    return [0]
