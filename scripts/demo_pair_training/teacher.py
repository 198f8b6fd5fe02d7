"""Teacher text: replies of a small instruct model to the training prompts, in two passes.

The first pass answers prompts. The second asks a follow-up question about good first replies and
answers it too. Run as a module on the machine with the accelerator:

    python -m scripts.demo_pair_training.teacher sample WORK OUT [--half-a FILE]
    python -m scripts.demo_pair_training.teacher pack WORK OUT
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from .cleaning import Rejected, clean_reply
from .prompts import Prompt, read_prompts
from .sampler import Settings, Teacher, sample_batch
from .shards import ReplyBatch, pack_shards, read_batch, write_batch
from .teacher_files import END_TOKEN, HALVES, INDEX, TOKENIZER, load_teacher, unpack_teacher

__all__ = ["SamplePlan", "sample_chats", "unpack_teacher"]

SYSTEM = "You are a friendly assistant. Keep your answers short and simple."
RAW = "raw"
"""Folder in the work folder that holds the batches until they are packed."""
MAX_FOLLOW_UP_PROMPT = 256
"""Longest prompt of the second pass, in teacher tokens; bounds its K/V memory."""


@dataclass(frozen=True)
class SamplePlan:
    """How much to sample. Budgets are in seconds and end a pass before its next batch."""

    batch: int = 8_192
    first_budget: float = 200.0
    second_budget: float = 70.0
    second_batch: int = 6_144
    second_count: int = 24_576
    max_batches: int = 1_000
    first_batch: int = 0  # Those before it were answered by an earlier run.
    seed: int = 0
    settings: Settings = Settings()
    # The teacher loops more easily in a second turn; a higher temperature leads it out.
    second_settings: Settings = Settings(temperature=0.8)


@dataclass(frozen=True)
class Request:
    """A prompt of the teacher: which training prompt it belongs to, and its tokens."""

    prompt_id: int
    tokens: list[int]


def sample_chats(
    work: Path,
    out: Path,
    plan: SamplePlan | None = None,
    *,
    half_a: Path | None = None,
    device: str = "cuda",
) -> None:
    """Answer the prompts in `work` in two passes, then pack the replies into shards in `out`.

    `half_a` is where the first half of the teacher lies, if not in `work`.
    """
    plan = plan or SamplePlan()
    raw = work / RAW
    tokenizer = Tokenizer.from_file(str(work / TOKENIZER))
    prompts = read_prompts(work)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    halves = (half_a or work / HALVES[0], work / HALVES[1])
    teacher = Teacher(*load_teacher(halves, work / INDEX, torch.device(device), dtype))
    first = first_requests(prompts, tokenizer)[plan.first_batch * plan.batch :]
    run_pass(teacher, first, raw, 1, plan.batch, plan.first_budget, plan)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # The second pass needs a larger K/V buffer in one piece.
    second = second_requests(prompts, tokenizer, raw, plan.second_count)
    run_pass(teacher, second, raw, 2, plan.second_batch, plan.second_budget, plan)
    print("shards:", [str(path) for path in pack_shards(raw, out)])


def run_pass(
    teacher: Teacher,
    requests: list[Request],
    raw: Path,
    turn: int,
    batch_size: int,
    budget: float,
    plan: SamplePlan,
) -> None:
    """Answer requests in full batches until they, or the budget in seconds, run out."""
    start = time.monotonic()
    batches = list(enumerate(_full_batches(requests, batch_size), plan.first_batch))
    for number, batch in batches[: plan.max_batches]:
        began = time.monotonic()
        # One seed per batch, so that a batch does not depend on those before it.
        rng = torch.Generator(teacher.embedding.device)
        rng.manual_seed(plan.seed * 1_000_000 + turn * 1_000 + number)
        tokens = [request.tokens for request in batch]
        settings = plan.settings if turn == 1 else plan.second_settings
        replies = sample_batch(teacher, tokens, settings, rng, END_TOKEN)
        ids = np.array([request.prompt_id for request in batch], np.int32)
        write_batch(raw, number, ReplyBatch(turn, ids, replies))
        seconds = time.monotonic() - began
        total = sum(map(len, replies))
        ended = sum(reply[-1] == END_TOKEN for reply in replies) / len(replies)
        print(
            f"turn {turn} batch {number}: {seconds:.1f} s, {total} tokens, "
            f"{total / seconds:.0f}/s, ended {ended:.2f}",
            flush=True,
        )
        if time.monotonic() - start + seconds > budget:
            break


def first_requests(prompts: list[Prompt], tokenizer: Tokenizer) -> list[Request]:
    """The prompts as the teacher reads them, in order."""
    texts = [f"{_turn('system', SYSTEM)}{_opening(p.prompt)}" for p in prompts]
    encoded = tokenizer.encode_batch(texts)
    return [Request(i, encoding.ids) for i, encoding in enumerate(encoded)]


def second_requests(
    prompts: list[Prompt], tokenizer: Tokenizer, raw: Path, count: int
) -> list[Request]:
    """Follow-up questions about good first replies, shortest first so that batches stay even."""
    ids, texts = [], []
    for prompt_id, reply in _good_first_replies(prompts, tokenizer, raw):
        prompt = prompts[prompt_id]
        ids.append(prompt_id)
        texts.append(
            f"{_turn('system', SYSTEM)}{_turn('user', prompt.prompt)}"
            f"{_turn('assistant', reply)}{_opening(prompt.follow_up)}"
        )
        # A few more than needed: some are too long for the second pass.
        if len(ids) >= count * 1.2:
            break
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    requests = [
        Request(i, tokens)
        for i, tokens in zip(ids, encoded, strict=True)
        if len(tokens) <= MAX_FOLLOW_UP_PROMPT
    ]
    return sorted(requests[:count], key=lambda request: len(request.tokens))


def _good_first_replies(
    prompts: list[Prompt], tokenizer: Tokenizer, raw: Path
) -> Iterator[tuple[int, str]]:
    """Prompt id and cleaned text of the first-pass replies that the corpus would keep."""
    for path in sorted(raw.glob("turn1-*.npz")):
        batch = read_batch(path, turn=1)
        texts = tokenizer.decode_batch([reply.tolist() for reply in batch.replies])
        for prompt_id, reply, text in zip(batch.prompt_ids, batch.replies, texts, strict=True):
            try:
                keyword = prompts[prompt_id].keyword
                yield int(prompt_id), clean_reply(text, reply[-1] == END_TOKEN, keyword)
            except Rejected:
                continue


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _opening(question: str) -> str:
    return f"{_turn('user', question)}<|im_start|>assistant\n"


def _full_batches(requests: list[Request], size: int) -> list[list[Request]]:
    return [requests[i : i + size] for i in range(0, len(requests) - size + 1, size)]


def main() -> None:
    """The front for the machine with the accelerator."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["unpack", "sample", "pack"])
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path, nargs="?", help="folder for the shards")
    parser.add_argument("--half-a", type=Path, help="where the teacher's first half lies")
    parser.add_argument("--device", default="cuda")
    for name in ("batch", "second_batch", "second_count", "max_batches", "first_batch", "seed"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(SamplePlan, name))
    for name in ("first_budget", "second_budget"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=float, default=getattr(SamplePlan, name))
    args = parser.parse_args()
    if args.step == "unpack":
        unpack_teacher(args.work)
    elif args.step == "pack":
        pack_shards(args.work / RAW, args.out)
    else:
        plan = SamplePlan(
            batch=args.batch,
            first_budget=args.first_budget,
            second_budget=args.second_budget,
            second_batch=args.second_batch,
            second_count=args.second_count,
            max_batches=args.max_batches,
            first_batch=args.first_batch,
            seed=args.seed,
        )
        sample_chats(args.work, args.out, plan, half_a=args.half_a, device=args.device)


if __name__ == "__main__":
    main()
