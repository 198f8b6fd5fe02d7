"""Tokens per verify pass of a drafter with its target, the prefix recomputed in every pass.

``greedy_passes`` walks along the target's own greedy replies, which is exact and cheap;
``draft_and_verify`` is the real loop, greedy or with rejection sampling.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import drafter_model
from .data import batches
from .decoding import END, Conversations
from .drafter_model import DrafterWorking, select
from .target_model import Working
from .target_model import forward as target_forward

CHUNK = 64


@dataclass
class Passes:
    """Counts over verify passes: reached and accepted by proposal position ``[7]``."""

    passes: int
    tokens: int
    reached: np.ndarray
    accepted: np.ndarray
    unfinished: int = 0

    def summary(self) -> dict:
        passes = max(self.passes, 1)
        return {
            "tokens_per_pass": round(self.tokens / passes, 3),
            "passes": self.passes,
            "accepted_when_reached": (self.accepted / np.maximum(self.reached, 1))
            .round(3)
            .tolist(),
            "reached": (self.reached / passes).round(3).tolist(),
            "unfinished_replies": self.unfinished,
        }


@torch.no_grad()
def agreeing_proposals(
    target: Working,
    drafter: DrafterWorking,
    tokens: Tensor,
    inside: Tensor,
    *,
    use_selector: bool = True,
    size: int = 32,
) -> np.ndarray:
    """How many leading proposals equal the text, for every position as anchor: ``[rows, T]``.

    ``inside [rows, T]`` marks the reply; proposals past its end never agree.
    """
    s, length = drafter.shape, tokens.shape[1]
    padded = F.pad(torch.where(inside, tokens, -1), (0, s.proposals), value=-1)
    ahead = torch.arange(1, s.block, device=tokens.device)
    counts = []
    for part, text in batches(tokens, padded, size=size):
        _, taps = target_forward(target, part, s.taps)
        taps, first = torch.cat(taps, -1), torch.zeros(len(part), device=part.device).long()
        row_counts = []
        for start in range(0, length, CHUNK):
            at = torch.arange(start, start + CHUNK, device=part.device).expand(len(part), -1)
            rows = drafter_model.forward(
                drafter, taps, first, at, part.gather(1, at), target.embedding
            ).flatten(0, 1)
            anchors = part.gather(1, at).flatten()
            draft = select(drafter, rows, target.logits(rows), anchors, use_selector=use_selector)
            wanted = text[:, start + ahead[None] + torch.arange(CHUNK, device=part.device)[:, None]]
            same = draft.path.view(wanted.shape) == wanted
            row_counts.append(same.long().cumprod(-1).sum(-1))
        counts.append(torch.cat(row_counts, 1))
    return torch.cat(counts).cpu().numpy()


def greedy_passes(agreeing: np.ndarray, start: np.ndarray, end: np.ndarray) -> Passes:
    """Walk the replies ``[start, end)``; only passes with all 7 proposals inside count."""
    block = 8
    result = Passes(0, 0, np.zeros(block - 1, int), np.zeros(block - 1, int))
    for counts, first, stop in zip(agreeing, start, end, strict=True):
        at = int(first)
        while at + block <= stop:
            n = int(counts[at])
            result.passes += 1
            result.tokens += n + 1
            result.reached[: min(n + 1, block - 1)] += 1
            result.accepted[:n] += 1
            at += n + 1
    return result


def _verify(
    logits: Tensor, draft: drafter_model.Draft, temperature: float
) -> tuple[Tensor, Tensor]:
    """Number accepted ``[R]`` and the target's own next token, from logits ``[R, 8, V]``."""
    row = torch.arange(len(logits), device=logits.device)
    if temperature == 0:
        answers = logits.argmax(-1)
        accepted = (draft.path == answers[:, :-1]).long().cumprod(1).sum(1)
        return accepted, answers[row, accepted]
    p = (logits.double() / temperature).softmax(-1)
    q = torch.zeros_like(p).scatter_(  # row 7 stays 0: there the bonus token comes from p alone
        2, F.pad(draft.candidates, (0, 0, 0, 1)), F.pad(draft.probabilities, (0, 0, 0, 1))
    )
    proposed = draft.path[..., None]
    ratio = (p[:, :-1].gather(2, proposed) / q[:, :-1].gather(2, proposed))[..., 0]
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum(1)
    target = p[row, accepted]
    residual = (target - q[row, accepted]).clamp_min(0)
    residual = torch.where(residual.sum(1, keepdim=True) > 1e-12, residual, target)
    return accepted, torch.multinomial(residual, 1)[:, 0]


@torch.no_grad()
def draft_and_verify(
    target: Working,
    drafter: DrafterWorking,
    talks: Conversations,
    temperature: float,
    total: int,
    max_passes: int,
) -> tuple[Passes, Tensor]:
    """Hold one-turn talks speculatively; counts passes that neither end nor overrun a reply.

    Returns the counts and the texts ``[rows, T]``.
    """
    s, device = drafter.shape, target.head.device
    prompts, at = talks.tokens[:, 0], talks.lengths[:, 0].clone()  # position of the anchor
    width = -(-(total + s.block) // CHUNK) * CHUNK
    text = F.pad(prompts, (0, width - prompts.shape[1]))
    row, column = torch.arange(len(text), device=device), torch.arange(width, device=device)
    text = torch.where(column < at[:, None], text, 0)
    ahead = torch.arange(s.block, device=device)
    hidden, taps = target_forward(target, text, s.taps)
    text[row, at] = _first_token(target.logits(hidden[row, at - 1]), temperature)
    live, zero = torch.ones_like(at, dtype=torch.bool), torch.zeros_like(at)
    result = Passes(0, 0, np.zeros(s.proposals, int), np.zeros(s.proposals, int))
    for _ in range(max_passes):
        anchors = text[row, at]
        rows = drafter_model.forward(
            drafter, torch.cat(taps, -1), zero, at[:, None], anchors[:, None], target.embedding
        )[:, 0]
        draft = select(drafter, rows, target.logits(rows), anchors, temperature)
        text[row[:, None], at[:, None] + ahead[1:]] = draft.path
        hidden, taps = target_forward(target, text, s.taps)
        logits = target.logits(hidden[row[:, None], at[:, None] + ahead])
        accepted, token = _verify(logits, draft, temperature)
        taken = ahead[1:] <= accepted[:, None]
        ended = (taken & (draft.path == END)).any(1) | (token == END)
        counted = live & ~ended & (at + s.block < total)
        _count(result, counted, accepted)
        live = live & ~ended & (at + accepted + s.block + 1 < total)
        at = torch.where(live, at + accepted + 1, at)
        text[row, at] = torch.where(live, token, text[row, at])
        text = torch.where(column <= at[:, None], text, 0)
        if not live.any():
            break
    result.unfinished = int(live.sum())
    return result, text


def _first_token(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]


def _count(result: Passes, counted: Tensor, accepted: Tensor) -> None:
    """Add the counted passes of one iteration."""
    numbers = accepted[counted].cpu().numpy()
    position = np.arange(len(result.reached))
    result.passes += len(numbers)
    result.tokens += int((numbers + 1).sum())
    result.reached += (position <= numbers[:, None]).sum(0)
    result.accepted += (position < numbers[:, None]).sum(0)
