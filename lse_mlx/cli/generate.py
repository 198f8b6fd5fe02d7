"""`lse-mlx generate`: answer one prompt, and show the reply as it comes."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from lse_mlx.checkpoints.resolve import AUTO
from lse_mlx.checkpoints.target_config import read_vocab_size
from lse_mlx.cli import reply_options as reply
from lse_mlx.cli.common import choose_model, notes, one_sentence_errors, read_prompt
from lse_mlx.cli.kernels import Exact, Kernels, RequireDeviceKernels, kernel_registry
from lse_mlx.cli.options import (
    AsJson,
    Drafter,
    MaxTokens,
    ModelOrApple,
    NoDrafter,
    Prompt,
    Raw,
    StrictDraft,
    Yes,
    check_drafter,
)
from lse_mlx.cli.pair import AllowRevisionMismatch, Offline, open_pair
from lse_mlx.cli.progress import progress
from lse_mlx.decode.rules import WINDOW
from lse_mlx.engine import MAX_TOKENS
from lse_mlx.errors import RequestError, counted
from lse_mlx.loading import load_pair
from lse_mlx.replies import Piece, Result


def generate(
    prompt: Prompt,
    raw: Raw = False,
    as_json: AsJson = False,
    model: ModelOrApple = None,
    drafter: Drafter = AUTO,
    no_drafter: NoDrafter = False,
    strict_draft: StrictDraft = False,
    offline: Offline = False,
    allow_revision_mismatch: AllowRevisionMismatch = False,
    yes: Yes = False,
    temperature: reply.Temperature = 0.0,
    top_k: reply.TopK = 0,
    top_p: reply.TopP = 1.0,
    min_p: reply.MinP = 0.0,
    seed: reply.Seed = None,
    logit_bias: reply.LogitBias = None,
    top_logprobs: reply.TopLogprobs = None,
    repetition_penalty: reply.Repetition = 1.0,
    repetition_window: reply.RepetitionWindow = WINDOW,
    presence_penalty: reply.Presence = 0.0,
    presence_window: reply.PresenceWindow = WINDOW,
    frequency_penalty: reply.Frequency = 0.0,
    frequency_window: reply.FrequencyWindow = WINDOW,
    max_tokens: MaxTokens = MAX_TOKENS,
    min_tokens: reply.MinTokens = 0,
    stop: reply.Stop = None,
    stop_token_id: reply.StopTokenId = None,
    end_tokens: reply.EndTokens = "allowed",
    kernels: Kernels = "auto",
    exact: Exact = False,
    require_device_kernels: RequireDeviceKernels = False,
) -> None:
    """Answer PROMPT."""
    with one_sentence_errors():
        options = reply.checked(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
            repetition_window=repetition_window,
            presence_penalty=presence_penalty,
            presence_window=presence_window,
            frequency_penalty=frequency_penalty,
            frequency_window=frequency_window,
            logit_bias=reply.bias_of(logit_bias or []),
            stop=stop or [],
            stop_token_ids=stop_token_id or [],
            min_tokens=min_tokens,
            end_tokens=end_tokens,
            top_logprobs=top_logprobs,
        )
        if top_logprobs is not None and not as_json:
            raise RequestError("--top-logprobs is shown in --json only: give both.")
        check_drafter(drafter, no_drafter)
        registry = kernel_registry(kernels, exact, require_device_kernels)
        text = read_prompt(prompt, raw)
        chosen = choose_model(model)
        proposer = None if no_drafter else drafter
        pair = open_pair(chosen, proposer, offline, allow_revision_mismatch, yes)
        reply.check_vocabulary(options, read_vocab_size(pair.target))
        with progress() as told:
            engine = load_pair(pair, registry=registry, strict_draft=strict_draft, progress=told)
        with engine:
            show_reply(engine.stream(text, raw=raw, **options), as_json)


def show_reply(pieces: Iterator[Piece], as_json: bool) -> None:
    """Print the text as it arrives and a line of figures on stderr, or one JSON object."""
    result: Result | None = None
    for piece in pieces:
        if not as_json:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        result = piece.result
    assert result is not None  # the last piece always has it
    print(json.dumps(asdict(result), ensure_ascii=False) if as_json else "")
    if why := result.timings.get("spec_failure"):
        notes.print(f"The drafter failed ({why}), so the target went on alone.", markup=False)
    if not as_json:
        notes.print(_figures(result), style="dim", markup=False)


def _figures(result: Result) -> str:
    t = result.timings
    reply = f"reply {counted(t['generated_n'], 'token')}"
    if t["decode_n"]:  # the first token came with the prompt and has no rate
        reply += f" at {t['decode_per_second']:.1f} tokens/s"
    parts = [f"prompt {counted(t['prompt_n'], 'token')} in {t['prompt_ms'] / 1000:.2f} s", reply]
    if "tokens_per_pass" in t:
        parts.append(f"{t['tokens_per_pass']:.2f} tokens per verify pass")
    ended = f"ended by {result.stop_reason}"
    parts.append(ended if result.stop_string is None else f"{ended} {result.stop_string!r}")
    return "; ".join(parts)
