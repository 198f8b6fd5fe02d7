"""Stage ``distill``: train the target on the best of its own replies.

Rounds of: let the rounded target answer many prompts several times and keep the good, likely and
faithful replies (``self_talk.py``); then train, straight through the rounding, on rows of corpus
chats, renamed chats and kept replies, and unlearn loops of its greedy talks as ``polish`` does.
The target's own text becomes easier to foresee, for the drafter too, and the corpus rows keep it
the text that it was.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .data import Chats, Corpus, RowFeed
from .decoding import distinct_share, roll_out
from .export import export_target, load_target, silence
from .fresh import read_choose, read_fresh, read_renamed
from .loops import Schedule, faster_step, run
from .polish import LOOP_FREE, Buffers, PolishSettings, Talks, hold_talks, make_loss
from .self_talk import PromptList, TalkSettings, best_talks, corpus_openings, faithfulness
from .target_model import TargetModel
from .train_target import compute_dtype, held_out_loss, make_optimizer


@dataclass(frozen=True)
class DistillSettings:
    """Time and mix; a batch has ``rows``, those not named here are corpus rows."""

    rounds: int = 4
    seconds: float = 120.0  # of training, all rounds together
    steps: int = 10**9  # in a round
    rows: int = 64
    renamed_rows: int = 10
    own_rows: int = 32
    unlearned_rows: int = 8
    width: int = 512
    judged: int = 256  # prompts of each kind, after every round
    loop_talks: int = 2_048  # greedy and sampled talks in which loops are looked for
    peak: float = 1.5e-3
    floor: float = 0.05
    weight_decay: float = 0.2
    unlikelihood: float = 0.5
    compile_mode: str = "auto"
    seed: int = 7


@dataclass
class Parts:
    """Where the rows of a batch come from."""

    corpus: RowFeed
    renamed: RowFeed
    own: RowFeed
    loops: Talks


def make_loader(
    parts: Parts, b: Buffers, s: DistillSettings, generator: torch.Generator
) -> Callable[[], None]:
    """Fills the buffers: corpus, renamed and own rows to learn, then talks to unlearn loops."""
    plain = s.rows - s.renamed_rows - s.own_rows - s.unlearned_rows
    learned = s.rows - s.unlearned_rows

    def load() -> None:
        size = (s.unlearned_rows,)
        count = len(parts.loops.tokens)
        pick = torch.randint(count, size, generator=generator, device=b.rows.device)
        b.rows[:plain] = parts.corpus.batch(plain)
        b.rows[plain : plain + s.renamed_rows] = parts.renamed.batch(s.renamed_rows)
        b.rows[learned - s.own_rows : learned] = parts.own.batch(s.own_rows)
        b.rows[learned:] = parts.loops.tokens[pick]
        b.learn[learned:] = 0
        b.unlearn[learned:] = parts.loops.unlearn[pick][:, 1:]
        b.replies.copy_(parts.loops.replying[pick].sum().clamp_min(1))

    return load


@torch.no_grad()
def judge(
    model: TargetModel, corpus: Corpus, prompts: dict[str, PromptList], held: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Held-out loss, and greedy replies to the prompts kept for choosing."""
    ids, labels = held
    w = model.working(compute_dtype(ids.device), quantize=True)
    figures = {"held_out_loss": held_out_loss(w, ids, labels)}
    for name, part in prompts.items():
        rows = torch.arange(len(part.entries), device=ids.device)[:, None]
        heat = torch.zeros(len(rows), device=ids.device)
        out = roll_out(w, part.rows.chosen(rows), heat, 256, with_nats=True)
        assert out.nats is not None
        inside = out.turn == 1
        texts = corpus.tokenizer.decode_batch(
            [row[mine].tolist() for row, mine in zip(out.tokens, inside, strict=True)]
        )
        shares = [faithfulness(t, p) for t, p in zip(texts, part.entries, strict=True)]
        free = distinct_share(out).nan_to_num(1.0) >= LOOP_FREE
        figures |= {
            f"{name}_loop_free": free.float().mean().item(),
            f"{name}_nats": (out.nats[inside].mean()).item(),
            f"{name}_on_topic": sum(x is not None for x in shares) / len(shares),
            f"{name}_faithful": sum(x or 0.0 for x in shares) / len(shares),
            f"{name}_tokens": inside.sum(1).float().mean().item(),
        }
    return figures


def distill(
    corpus: Corpus,
    fresh: Path,
    start: Path,
    folder: Path,
    report: Path,
    s: DistillSettings,
    talk: TalkSettings,
    device: torch.device,
) -> None:
    """Train the exported target ``start`` on and export it into ``folder``."""
    torch.manual_seed(s.seed)
    generator = torch.Generator(device).manual_seed(s.seed)
    model = load_target(start, device).requires_grad_(True)
    held, dtype = corpus.held_rows("choose", device), compute_dtype(device)

    def prompt_list(entries: list) -> PromptList:
        return PromptList.build(entries, corpus.tokenizer, corpus.newline, device)

    def feed(chats: Chats, seed: int) -> RowFeed:
        return RowFeed(chats, s.width, corpus.newline, device, seed)

    prompts = prompt_list(read_fresh(fresh))
    choose = {name: prompt_list(part[: s.judged]) for name, part in read_choose(fresh).items()}
    openings = corpus_openings(corpus)
    corpus_feed, renamed_feed = feed(corpus.chats, s.seed), feed(read_renamed(fresh), s.seed)
    buffers = Buffers.empty(s.rows, s.width, device)
    buffers.rows.copy_(corpus_feed.batch(s.rows))
    buffers.weight.fill_(s.unlikelihood)
    optimizer = make_optimizer(model, s.weight_decay)
    step, notes = faster_step(make_loss(model, buffers, dtype), optimizer, s.compile_mode)
    print("step", notes, flush=True)
    loops = PolishSettings(talks=s.loop_talks, turns=talk.turns, width=s.width)
    rounds: list[dict] = [judge(model, corpus, choose, held)]
    print("distill", json.dumps(rounds[-1]), flush=True)
    for number in range(s.rounds):
        with torch.no_grad():
            w = model.working(dtype, quantize=True)
        chats, figures = best_talks(w, prompts, corpus.tokenizer, openings, talk, generator)
        parts = Parts(
            corpus_feed,
            renamed_feed,
            feed(chats, s.seed + number),
            hold_talks(model, prompts.rows, loops, generator),
        )
        schedule = _round_schedule(s, number)
        loader = make_loader(parts, buffers, s, generator)
        run(f"round {number + 1}", step, loader, schedule, report_every=100)
        rounds.append(figures | judge(model, corpus, choose, held))
        print("distill", json.dumps(rounds[-1]), flush=True)
        found = {"distill": asdict(s), "talk": asdict(talk), "step": notes, "rounds": rounds}
        report.write_text(json.dumps(found, indent=1) + "\n")
    silence(model)
    export_target(model, corpus.folder / "tokenizer", folder)


def _round_schedule(s: DistillSettings, number: int) -> Schedule:
    """One round; the rate falls from round to round along one line."""
    high = s.peak * max(s.floor, 1 - number / s.rounds)
    low = s.peak * max(s.floor, 1 - (number + 1) / s.rounds)
    warm_up = 0.05 if number == 0 else 0.0
    return Schedule(s.seconds / s.rounds, high, s.steps, warm_up=warm_up, floor=low / high)
