"""Engine: a loaded pair that answers prompts."""

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx

from lse_mlx.checkpoints.conversion.places import CacheSettings
from lse_mlx.checkpoints.hub.hub import Hub
from lse_mlx.checkpoints.prepare import Consent, prepare_pair
from lse_mlx.checkpoints.progress import Lines, Progress, Silent
from lse_mlx.checkpoints.resolve import AUTO, DEMO, Pair
from lse_mlx.checkpoints.target_config import read_stop_tokens
from lse_mlx.decode.loop import Request, Step, decode
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.decode.stopping import FinishReason, Limits, StopReason, finish_reason
from lse_mlx.decode.timings import Timings
from lse_mlx.drafters.base import Drafter
from lse_mlx.drafters.dflash2.drafter import load_dflash2
from lse_mlx.errors import RequestError
from lse_mlx.kernels.operations import with_kernels  # noqa: F401 -- the commands take it from here
from lse_mlx.kernels.options import KernelOptions, check_bool, required_by
from lse_mlx.kernels.registry import Registry
from lse_mlx.target.loading import load_target
from lse_mlx.target.model import Target
from lse_mlx.target.tokenizer import Prompt, Tokenizer, load_tokenizer
from lse_mlx.warmup import WarmupReport, warm_up

MAX_TOKENS = 256
"""The most tokens of a reply where the caller does not say."""


@dataclass(frozen=True)
class Result:
    """A finished reply.

    token_ids: the emitted tokens, without the stop token; text: their text
    prompt_tokens: how many tokens the prompt has
    seed: what reproduces a sampled reply; None for a greedy one
    finish_reason: "stop" after a stop token, "length" otherwise; stop_reason says which limit
    timings: see `Timings.as_dict`; times in milliseconds
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    seed: int | None
    finish_reason: FinishReason
    stop_reason: StopReason
    timings: dict[str, Any]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Piece:
    """What one pass added to a reply.

    text: whole characters, possibly none yet; token_ids: the tokens emitted by the pass
    result: the finished reply, on the last piece only
    """

    text: str
    token_ids: list[int]
    result: Result | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class EngineStats:
    """What kernels did since the engine was loaded, its warm-up included.

    jit_compiles_total:   variants of kernels and traces of compiled functions; 0 on a CPU
    jit_compile_ms_total: milliseconds that they took
    device_kernel_calls:  served by a kernel of this project
    reference_calls:      served by plain MLX or NumPy in its place
    kernels: for each kernel that was asked for, how many calls which form served: "metal", "cuda",
             or "reference" under the operation's name, as "topk" for topk_chunk and topk_merge
    refused: operations whose kernels this device does not run after all, and why; plain MLX serves
    forms:   for each operation and shape that stock MLX could serve too, which form does
    Operations that stock MLX serves by choice are in no count.
    """

    jit_compiles_total: int
    jit_compile_ms_total: float
    device_kernel_calls: int
    reference_calls: int
    kernels: dict[str, dict[str, int]]
    refused: dict[str, str]
    forms: dict[str, str]


@dataclass
class Engine:
    """A target, its tokenizer and possibly a drafter. Use it in the thread that loaded it.

    target, tokenizer, drafter: what answers; drafter is None where the target decodes alone
    warmed: what the warm-up did and found, see `WarmupReport`; None after `load(warm_up=False)`
    """

    target: Target
    tokenizer: Tokenizer = field(repr=False)
    drafter: Drafter | None = None
    warmed: WarmupReport | None = field(default=None, repr=False)
    _closed: bool = field(default=False, init=False, repr=False)

    def session(self) -> Session:
        """A session that saves work: give it to `generate` together with a whole conversation.

        What the conversation has in common with the session's tokens is not computed again. A
        session adds nothing to a prompt: pass all earlier turns as messages each time.
        """
        self._check_open()
        return Session(self.target, self.drafter)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = MAX_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        speculate: bool = True,
        raw: bool = False,
        session: Session | None = None,
    ) -> Result:
        """Answer `prompt` and return the whole reply; everything else is said at `stream`."""
        *_, last = self.stream(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            speculate=speculate,
            raw=raw,
            session=session,
        )
        assert last.result is not None  # the last piece always has it
        return last.result

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = MAX_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        speculate: bool = True,
        raw: bool = False,
        session: Session | None = None,
    ) -> Iterator[Piece]:
        """Answer `prompt` piece by piece; the last piece carries the result.

        prompt: text (a user message, or plain text with `raw`), chat messages, or token ids
        max_tokens: at least 1; None for as many as the context holds
        temperature: 0 is greedy; top_k, top_p, min_p: as in `Sampling`
        seed: fixes a sampled reply; None takes a fresh one, which the result names
        speculate: False decodes with the target alone; the distribution of replies is the same
        session: from `session()`, whose work is reused where the prompt begins alike; None for none

        The request is checked here and now, before the first piece is asked for. Raises
        RequestError for a request that cannot be served, TargetError and DraftError for models that
        produce what no token can be chosen from.
        """
        self._check_open()
        tokens = self.tokenizer.encode(prompt, raw)
        room = self.target.context_length - len(tokens)
        if room < 1:
            raise RequestError(
                f"The prompt has {len(tokens)} tokens and the context holds "
                f"{self.target.context_length} with the reply: shorten the prompt."
            )
        if session is None:
            session = self.session()
        if not isinstance(session, Session) or session.target is not self.target:
            raise RequestError("The session belongs to another engine: take one from this one.")
        request = Request(
            prompt=tokens,
            sampling=Sampling(temperature, top_k, top_p, min_p),
            limits=Limits(self.tokenizer.stop_tokens, max_tokens, room),
            seed=secrets.randbits(32) if seed is None else seed,
            speculate=speculate,
        )
        return self._pieces(session, request)

    def stats(self) -> EngineStats:
        """What kernels did since the engine was loaded: compilations, calls, and who served them.

        The numbers are of this moment and do not change afterwards. Raises RequestError once the
        engine is closed.
        """
        self._check_open()
        registry = self.target.registry
        counts = registry.counts()
        return EngineStats(
            jit_compiles_total=counts.jit_compiles,
            jit_compile_ms_total=counts.jit_compile_ms,
            device_kernel_calls=counts.device_kernel_calls,
            reference_calls=counts.reference_calls,
            kernels=registry.forms(),
            refused=dict(registry.refused),
            forms=dict(registry.choices.chosen),
        )

    def close(self) -> None:
        """Free the weights, as soon as no session that holds them is left.

        The engine cannot be used afterwards; closing twice is harmless.
        """
        self._closed = True
        self.__dict__.update(target=None, tokenizer=None, drafter=None)
        mx.clear_cache()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("This engine is closed: load it again.")

    def _pieces(self, session: Session, request: Request) -> Iterator[Piece]:
        self._check_open()  # the first piece may be asked for long after the request was made
        drafter = session.drafter if request.speculate else None
        timings = Timings() if drafter is None else Timings(drafter.name, drafter.depth)
        text = self.tokenizer.streaming()
        emitted: list[int] = []
        for step in _counting(decode(session, request, timings), self.target.registry, timings):
            self._check_open()
            emitted += step.tokens
            for token in step.tokens:
                text.add_token(token)
            if step.reason is None:
                yield Piece(text.last_segment, step.tokens)
                continue
            text.finalize()
            result = Result(
                text=text.text,
                token_ids=emitted,
                prompt_tokens=len(request.prompt),
                seed=request.seed if request.sampling.temperature > 0 else None,
                finish_reason=finish_reason(step.reason),
                stop_reason=step.reason,
                timings=timings.as_dict(),
            )
            yield Piece(text.last_segment, step.tokens, result)


def _counting(steps: Iterator[Step], registry: Registry, timings: Timings) -> Iterator[Step]:
    """The steps, with what kernels do for each counted; other replies may run in between."""
    while True:
        before = registry.counts()
        step = next(steps, None)
        timings.count_kernels(before, registry.counts())
        if step is None:
            return
        yield step


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
    warm_up: run every shape of a request once now, so that the first one compiles nothing; on a
    CPU, where nothing is compiled, only decode one reply to see whether the drafter is of use.
    What was found is `engine.warmed`
    progress: told how far downloads, conversions and the warm-up are; lines on standard error if
    None

    Raises CheckpointError when a checkpoint is missing or broken, or the two do not belong together;
    then nothing has been loaded. Raises RequestError for options that mean nothing, and KernelError
    where device kernels are required and cannot run, both before anything is downloaded.
    """
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
    return load_pair(pair, context_length, registry=registry, warm=warm_up, progress=shown)


def load_pair(
    pair: Pair,
    context_length: int | None = None,
    *,
    registry: Registry | None = None,
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
        return Engine(target, tokenizer, drafter)
    report = warm_up(
        target,
        drafter,
        _some_prompt(tokenizer),
        names=(str(pair.target), str(pair.drafter)),
        races=CacheSettings.from_environment(os.environ).user_cache / "kernels",
        progress=progress or Silent(),
    )
    return Engine(target, tokenizer, drafter, report)


def _some_prompt(tokenizer: Tokenizer) -> list[int]:
    """Token ids of a request that any chat model answers at length."""
    for raw in (False, True):
        with suppress(RequestError):  # a template may refuse it, and a vocabulary may lack a token
            return tokenizer.encode("Tell me a story about a brave sailor.", raw)
    return [0]
