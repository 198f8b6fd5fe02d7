"""What an engine gives: a reply in pieces, the finished reply, and what kernels and drafter did."""

from dataclasses import dataclass
from typing import Any

from lse_mlx.decode.sampling import TokenLogprob
from lse_mlx.decode.stopping import FinishReason, StopReason


@dataclass(frozen=True)
class Result:
    """A finished reply.

    text: what was said: it ends before a stop string, and is whole characters
    token_ids: the emitted tokens, all of which count as usage: without the stop token, but with
    those whose text a stop string cut away
    prompt_tokens: how many tokens the prompt has
    seed: what reproduces a sampled reply; None for a greedy one
    finish_reason: "stop" after a stop token or a stop string, "cancelled" where the caller ended
    it, "length" otherwise; stop_reason says which of them, or which limit
    stop_string: the stop string that ended the reply; None if none did
    logprobs: for each of token_ids its log-probability, if they were asked for; else None
    timings: see `Timings.as_dict`; times in milliseconds
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    seed: int | None
    finish_reason: FinishReason
    stop_reason: StopReason
    stop_string: str | None
    logprobs: list[TokenLogprob] | None
    timings: dict[str, Any]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Piece:
    """What one pass added to a reply.

    text: whole characters, possibly none yet; what may still become a stop string waits
    token_ids: the tokens emitted by the pass; their text may come with a later piece
    logprobs: for each of token_ids its log-probability, if they were asked for; else None
    result: the finished reply, on the last piece only
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    result: Result | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class EngineStats:
    """What kernels and the drafter did since the engine was loaded.

    jit_compiles_total:   variants of kernels and traces of compiled functions; 0 on a CPU
    jit_compile_ms_total: milliseconds that they took
    device_kernel_calls:  served by a kernel of this project
    reference_calls:      served by plain MLX or NumPy in its place
    kernels: for each kernel that was asked for, how many calls which form served: "metal", "cuda",
             or "reference" under the operation's name, as "topk" for topk_chunk and topk_merge
    refused: operations whose kernels this device does not run after all, and why; plain MLX serves
    forms:   for each operation and shape that stock MLX could serve too, which form does
    draft_failures: replies in which the drafter failed
    Operations that stock MLX serves by choice are in no count. The warm-up is counted in what
    kernels did.
    """

    jit_compiles_total: int
    jit_compile_ms_total: float
    device_kernel_calls: int
    reference_calls: int
    kernels: dict[str, dict[str, int]]
    refused: dict[str, str]
    forms: dict[str, str]
    draft_failures: int
