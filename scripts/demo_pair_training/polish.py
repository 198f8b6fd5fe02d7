"""Stage ``polish``: train the target on its 4-bit values and unlearn its loops.

Rounds of: let the rounded target talk on training prompts; then train, straight through the
rounding, on corpus rows (cross entropy) mixed with those talks (unlikelihood, -log(1 - p), of
tokens that complete a 4-gram already seen in their own reply; Welleck et al., 2019).
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .data import Corpus, Prompts, RowFeed
from .decoding import distinct_share, repeated_fourgrams, roll_out
from .export import export_target
from .loops import GraphedStep, Schedule, faster_step, run
from .target_model import PLAIN, Blocks, TargetModel, TargetShape, forward
from .train_target import (
    compiled_losses,
    compute_dtype,
    held_out_loss,
    load_model,
    make_optimizer,
    save_model,
    token_losses,
)

LOOP_FREE = 0.8


@dataclass(frozen=True)
class PolishSettings:
    """Time, mix and aims of the finish."""

    seconds: float = 68.0
    steps: int = 10**9
    rounds: int = 4
    rows: int = 64
    rollout_rows_in_batch: int = 16
    width: int = 512
    talks: int = 2048
    turns: int = 4
    greedy_share: float = 0.67
    peak: float = 4e-4
    floor: float = 0.05
    weight_decay: float = 0.2
    unlikelihood: float = 1.0
    penalized_below: float = 0.92  # replies with a distinct share below this are penalized
    loop_free_aim: float = 0.8
    loss_margin: float = 0.005  # held-out nats that fewer loops may cost
    compile_mode: str = "auto"
    seed: int = 2


@dataclass
class Buffers:
    """One static batch: tokens ``[B, T + 1]``, masks over its labels ``[B, T]``, the UL weight."""

    rows: Tensor
    learn: Tensor
    unlearn: Tensor
    replies: Tensor  # number of reply tokens in the talks of the batch
    weight: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> "Buffers":
        mask = torch.ones(rows, width, device=device)
        one = torch.ones((), device=device)
        tokens = torch.zeros(rows, width + 1, device=device, dtype=torch.int64)
        return cls(tokens, mask, torch.zeros_like(mask), one, one.clone())


@dataclass
class Talks:
    """Talks of the current target, with the tokens to unlearn."""

    tokens: Tensor
    unlearn: Tensor
    replying: Tensor
    shares: Tensor  # distinct share of the first reply
    greedy: int  # the first so many rows are greedy

    def loop_free(self) -> dict[str, float]:
        """Share of first replies without loops."""
        free = self.shares.nan_to_num(1.0) >= LOOP_FREE
        parts = {"greedy": free[: self.greedy], "sampled": free[self.greedy :]}
        return {k: v.float().mean().item() for k, v in parts.items() if len(v)}


@torch.no_grad()
def hold_talks(
    model: TargetModel, prompts: Prompts, s: PolishSettings, generator: torch.Generator
) -> Talks:
    """Greedy and T 0.7 conversations of the rounded target on training prompts."""
    device = prompts.tokens.device
    greedy = round(s.talks * s.greedy_share)
    temperature = torch.full((s.talks,), 0.7, device=device)
    temperature[:greedy] = 0
    w = model.working(compute_dtype(device), quantize=True)
    out = roll_out(w, prompts.talks(s.talks, s.turns, generator), temperature, s.width + 1)
    whole, again = repeated_fourgrams(out.tokens, out.turn)
    loopy = torch.zeros_like(whole)
    for number in range(1, s.turns + 1):
        bad = distinct_share(out, number).nan_to_num(1.0) < s.penalized_below
        loopy |= bad[:, None] & (out.turn == number)
    return Talks(out.tokens, (again & loopy).float(), out.turn > 0, distinct_share(out), greedy)


def make_loss(
    model: TargetModel, buffers: Buffers, dtype: torch.dtype
) -> Callable[[bool], Callable[[], Tensor]]:
    """Builder of the losses [total, cross entropy, unlikelihood] over the static buffers."""

    def build(compiled: bool) -> Callable[[], Tensor]:
        blocks, losses = (
            (Blocks.compiled(), compiled_losses()) if compiled else (PLAIN, token_losses)
        )

        def loss() -> Tensor:
            w = model.working(dtype, quantize=True)
            hidden, _ = forward(w, buffers.rows[:, :-1], blocks=blocks)
            nats = losses(w.head, hidden, buffers.rows[:, 1:].contiguous())
            cross = (nats * buffers.learn).sum() / buffers.learn.sum()
            against = -torch.log(-torch.expm1(-nats.clamp_min(1e-5)))  # -log(1 - p)
            unlikely = (against * buffers.unlearn).sum() / buffers.replies
            return torch.stack([cross + buffers.weight * unlikely, cross, unlikely])

        return loss

    return build


def _loader(
    feed: RowFeed, talks: Talks, b: Buffers, s: PolishSettings, generator: torch.Generator
) -> Callable[[], None]:
    """Fills the buffers: corpus rows first, then rows of talks."""
    split = s.rows - s.rollout_rows_in_batch

    def load() -> None:
        pick = torch.randint(
            len(talks.tokens), (s.rollout_rows_in_batch,), generator=generator, device=b.rows.device
        )
        b.rows[:split] = feed.batch(split)
        b.rows[split:] = talks.tokens[pick]
        b.learn[split:] = 0
        b.unlearn[split:] = talks.unlearn[pick][:, 1:]
        b.replies.copy_(talks.replying[pick].sum().clamp_min(1))

    return load


@dataclass
class Best:
    """The best state so far: loops weigh, and so does held-out loss beyond the margin."""

    reference: float
    margin: float
    score: float = -1e9
    state: dict[str, Tensor] = field(default_factory=dict)

    def offer(self, model: TargetModel, loss: float, loop_free: float) -> bool:
        score = loop_free - 10 * max(0.0, loss - self.reference - self.margin)
        if score <= self.score:
            return False
        self.score = score
        self.state = {k: v.detach().clone() for k, v in model.state_dict().items()}
        return True


def polish(
    corpus: Corpus,
    work: Path,
    folder: Path,
    shape: TargetShape,
    s: PolishSettings,
    device: torch.device,
) -> None:
    """Finish ``target_float.safetensors`` of ``work`` and export it into ``folder``."""
    torch.manual_seed(s.seed)
    generator = torch.Generator(device).manual_seed(s.seed)
    dtype = compute_dtype(device)
    model = load_model(work / "target_float.safetensors", shape, device)
    prompts, (ids, labels) = corpus.prompts("train", device), corpus.held_rows("choose", device)
    feed = RowFeed(corpus.chats, s.width, corpus.newline, device, s.seed)
    buffers = Buffers.empty(s.rows, s.width, device)
    buffers.rows.copy_(feed.batch(s.rows))
    optimizer = make_optimizer(model, s.weight_decay)
    step, notes = faster_step(make_loss(model, buffers, dtype), optimizer, s.compile_mode)
    print("step", notes, flush=True)
    weight, entries = s.unlikelihood, []
    talks = hold_talks(model, prompts, s, generator)
    loss = held_out_loss(model.working(dtype, quantize=True), ids, labels)
    best = Best(loss, s.loss_margin)
    for number in range(s.rounds + 1):
        entry = {"round": number, "held_out_loss": loss, "weight": weight, **talks.loop_free()}
        entry["best"] = best.offer(model, loss, entry["greedy"])
        entries.append(entry)
        print("polish", json.dumps(entry), flush=True)
        if number == s.rounds:
            break
        if entry["greedy"] >= s.loop_free_aim or loss > best.reference + s.loss_margin:
            weight /= 2
        elif number > 1:
            weight *= 1.5
        buffers.weight.fill_(weight)
        _train_round(step, _loader(feed, talks, buffers, s, generator), s, number)
        talks = hold_talks(model, prompts, s, generator)
        loss = held_out_loss(model.working(dtype, quantize=True), ids, labels)
    model.load_state_dict(best.state)
    save_model(model, work / "target_polished.safetensors")
    export_target(model, corpus.folder / "tokenizer", folder)
    report = {"settings": asdict(s), "step": notes, "rounds": entries}
    (work / "polish_report.json").write_text(json.dumps(report, indent=1))


def _train_round(
    step: GraphedStep, load: Callable[[], None], s: PolishSettings, number: int
) -> None:
    """One round; the rate falls from round to round along one line."""
    high = s.peak * max(s.floor, 1 - number / s.rounds)
    low = s.peak * max(s.floor, 1 - (number + 1) / s.rounds)
    schedule = Schedule(
        s.seconds / s.rounds, high, s.steps, warm_up=0.03 if number == 0 else 0.0, floor=low / high
    )
    run(f"round {number + 1}", step, load, schedule, report_every=100)
