"""Stage ``rollouts``: talks of the frozen, rounded target, the drafter's training data."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from .data import Corpus
from .decoding import Rollouts, roll_out
from .export import load_target
from .fresh import read_fresh
from .self_talk import PromptList
from .train_target import compute_dtype


@dataclass(frozen=True)
class RolloutSettings:
    """``batches`` of ``rows`` conversations of up to ``turns`` turns and ``width`` tokens."""

    batches: int = 7
    rows: int = 8192
    turns: int = 4
    width: int = 512
    greedy_share: float = 0.6
    temperature: float = 0.7  # of the other rows
    seconds: float = 110.0  # no further batch is begun when the next one would pass this
    seed: int = 3


def save_rollouts(rollouts: Rollouts, path: Path) -> None:
    np.savez(
        path,
        tokens=rollouts.tokens.cpu().numpy().astype(np.uint16),
        turn=rollouts.turn.cpu().numpy(),
    )


def load_rollouts(path: Path, device: torch.device) -> Rollouts:
    with np.load(path) as file:
        tokens = torch.from_numpy(file["tokens"].astype(np.int64)).to(device)
        return Rollouts(tokens, torch.from_numpy(file["turn"]).to(device))


def make_rollouts(
    corpus: Corpus,
    fresh: Path,
    work: Path,
    folder: Path,
    s: RolloutSettings,
    device: torch.device,
) -> None:
    """Write ``rollouts.npz`` into ``work``; ``folder`` is the exported target."""
    torch.manual_seed(s.seed)
    generator = torch.Generator(device).manual_seed(s.seed)
    w = load_target(folder, device).working(compute_dtype(device))
    prompts = PromptList.build(read_fresh(fresh), corpus.tokenizer, corpus.newline, device).rows
    temperature = torch.full((s.rows,), s.temperature, device=device)
    temperature[: round(s.rows * s.greedy_share)] = 0
    parts, start = [], time.perf_counter()
    for number in range(s.batches):
        spent = time.perf_counter() - start
        if number and spent * (number + 1) / number > s.seconds:
            break
        parts.append(roll_out(w, prompts.talks(s.rows, s.turns, generator), temperature, s.width))
        replies = int((parts[-1].turn > 0).sum())
        print(f"rollouts {number + 1} {time.perf_counter() - start:.1f}s {replies}", flush=True)
    whole = Rollouts(torch.cat([p.tokens for p in parts]), torch.cat([p.turn for p in parts]))
    save_rollouts(whole, work / "rollouts.npz")
    report = {
        "settings": asdict(s),
        "conversations": len(whole.tokens),
        "reply_tokens": int((whole.turn > 0).sum()),
        "seconds": time.perf_counter() - start,
    }
    (work / "rollouts_report.json").write_text(json.dumps(report, indent=1))
