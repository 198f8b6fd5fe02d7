"""Stage ``evaluate``: held-out loss, loops, keywords and tokens per pass of an exported pair.

Everything runs in fp32 on the exported values, on chats and prompts that were never trained on.
Two sets of prompts are measured apart: ``new_words`` ask about nouns that training never names,
``known_words`` are new combinations of words that it does name.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .cleaning import mentions
from .corpus import pad_rows
from .data import IGNORE, Chats, Corpus, Prompts, batches, pack_rows
from .decoding import Conversations, Rollouts, distinct_share, roll_out
from .delta_rule import full_precision_products
from .drafter_model import DrafterWorking
from .export import load_drafter, load_target
from .fresh import read_choose
from .polish import LOOP_FREE
from .prompts import known_prompts
from .self_talk import PromptList
from .speculative import agreeing_proposals, draft_and_verify, greedy_passes
from .target_model import Working, forward
from .tokenizer import opening
from .train_target import held_out_loss, token_losses

MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|mask|>")


@dataclass(frozen=True)
class EvaluationSettings:
    """Numbers of prompts and lengths."""

    prompts: int = 512
    width: int = 256
    long_width: int = 512
    loop_prompts: int = 256
    loop_passes: int = 80
    samples: int = 6
    sets: str = "new_words,known_words"
    seed: int = 5


def nats_per_character(w: Working, tokenizer: Tokenizer, texts: list[str], width: int) -> dict:
    """Loss over whole chats, by characters of their text without the marks.

    Chats longer than ``width`` tokens are left out by the caller, so that every tokenizer is
    measured on the same text.
    """
    ids = [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch(texts)]
    chats = Chats(np.concatenate(ids), np.array([len(x) for x in ids]))
    device = w.head.device
    rows, labels = (torch.from_numpy(x).to(device) for x in chats.padded(width))
    count = int((labels != IGNORE).sum())
    nats = held_out_loss(w, rows, labels, size=64) * count
    characters = sum(len(_plain(t)) for t in texts)
    return {
        "nats_per_character": nats / characters,
        "nats_per_token": nats / count,
        "characters_per_token": characters / count,
        "chats": len(texts),
    }


def _plain(text: str) -> str:
    for mark in MARKS:
        text = text.replace(mark, "")
    return text


def _fitting(texts: list[str], tokenizers: list[Tokenizer], width: int) -> list[str]:
    """Texts of at most ``width`` tokens under every tokenizer."""
    fits = np.ones(len(texts), bool)
    for tokenizer in tokenizers:
        fits &= np.array([len(e.ids) <= width for e in tokenizer.encode_batch(texts)])
    return [t for t, ok in zip(texts, fits, strict=True) if ok]


def compare_text_loss(
    corpus: Corpus, w: Working, other: Path | None, s: EvaluationSettings
) -> dict[str, dict]:
    """Nats per character of this target and, where given, of another one on the same chats."""
    decode = corpus.tokenizer.decode
    texts = [
        decode(corpus.held.chat(i).tolist(), skip_special_tokens=False)
        for i in range(min(len(corpus.held.lengths), 1024))
        if i % 4
    ]
    models = {"this": (w, corpus.tokenizer)}
    if other is not None:
        theirs = load_target(other, w.head.device).working(torch.float32)
        models["other"] = (theirs, Tokenizer.from_file(str(other / "tokenizer.json")))
    texts = _fitting(texts, [t for _, t in models.values()], s.long_width)
    return {name: nats_per_character(m, t, texts, s.long_width) for name, (m, t) in models.items()}


@torch.no_grad()
def loss_by_position(corpus: Corpus, w: Working, width: int) -> dict[str, float]:
    """Held-out loss in the first and second half of conversations of ``width`` tokens."""
    rows = pack_rows(corpus.held, width, corpus.newline, np.random.default_rng(0))[:256]
    ids = torch.from_numpy(rows.astype(np.int64)).to(w.head.device)
    losses = torch.cat(
        [
            token_losses(w.head, forward(w, part[:, :-1])[0], part[:, 1:])
            for (part,) in batches(ids, size=32)
        ]
    )
    half = width // 2
    return {
        f"0..{half - 1}": losses[:, :half].mean().item(),
        f"{half}..{width - 1}": losses[:, half:].mean().item(),
    }


@dataclass
class Replies:
    """Replies to held-out prompts with their loop measure; ``number`` is the turn looked at."""

    rollouts: Rollouts
    number: int

    @property
    def inside(self) -> Tensor:
        return self.rollouts.turn == self.number

    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        start = self.inside.int().argmax(1)
        return start.cpu().numpy(), (start + self.inside.sum(1)).cpu().numpy()

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        rows = self.rollouts.tokens.cpu().numpy()
        return [
            tokenizer.decode(row[a:b].tolist())
            for row, a, b in zip(rows, *self.spans(), strict=True)
        ]

    def summary(self, tokenizer: Tokenizer, prompts: list[dict]) -> dict:
        shares = distinct_share(self.rollouts, self.number).nan_to_num(1.0).cpu().numpy()
        start, end = self.spans()
        ended = end < self.rollouts.tokens.shape[1]
        texts = self.texts(tokenizer)
        named = np.array([mentions(t, p["keyword"]) for p, t in zip(prompts, texts, strict=True)])
        by_kind = {
            k: round(float(named[[p["kind"] == k for p in prompts]].mean()), 3)
            for k in sorted({p["kind"] for p in prompts})
        }
        quantiles = np.quantile(shares, [0.05, 0.25, 0.5, 0.75])
        return {
            "loop_free_share": float((shares >= LOOP_FREE).mean()),
            "distinct_4gram_quantiles_5_25_50_75": quantiles.round(3).tolist(),
            "keyword_share": float(named.mean()),
            "keyword_share_by_kind": by_kind,
            "ended_share": float(ended.mean()),
            "mean_tokens": float((end - start).mean()),
        }

    def loop_free(self) -> np.ndarray:
        shares = distinct_share(self.rollouts, self.number).nan_to_num(1.0)
        return (shares >= LOOP_FREE).cpu().numpy()


def spread(number: int, count: int) -> list[int]:
    """``count`` indices spread evenly over ``range(number)`` (the prompts are not shuffled)."""
    return [i * number // count for i in range(count)]


@dataclass
class PromptSet:
    """Prompts with their keywords, and their token rows."""

    entries: list[dict]
    rows: Prompts

    @classmethod
    def new_words(cls, corpus: Corpus, count: int, device: torch.device) -> "PromptSet":
        """Held-out prompts, spread over their list."""
        entries, rows = corpus.held_prompts(), corpus.prompts("held", device)
        index = spread(len(entries), min(count, len(entries)))
        rows = Prompts(rows.tokens[index], rows.lengths[index], rows.newline)
        return cls([entries[i] for i in index], rows)

    @classmethod
    def known_words(cls, corpus: Corpus, count: int, device: torch.device) -> "PromptSet":
        """New combinations of training's own words."""
        fresh = [asdict(p) for p in known_prompts(corpus.folder.parent, count)]
        tokens, lengths = pad_rows([opening(p["prompt"]) for p in fresh], corpus.tokenizer)
        tokens = torch.from_numpy(tokens.astype(np.int64)).to(device)
        lengths = torch.from_numpy(lengths.astype(np.int64)).to(device)
        return cls(fresh, Prompts(tokens, lengths, [corpus.newline]))

    @classmethod
    def choose_new(cls, corpus: Corpus, count: int, device: torch.device) -> "PromptSet":
        """New words for choosing between settings, apart from the reported ones."""
        return cls._choose(corpus, "new", count, device)

    @classmethod
    def choose_known(cls, corpus: Corpus, count: int, device: torch.device) -> "PromptSet":
        """New combinations for choosing between settings, apart from the reported ones."""
        return cls._choose(corpus, "known", count, device)

    @classmethod
    def _choose(cls, corpus: Corpus, which: str, count: int, device: torch.device) -> "PromptSet":
        entries = read_choose(corpus.folder.parent / "fresh")[which][:count]
        made = PromptList.build(entries, corpus.tokenizer, corpus.newline, device)
        return cls([asdict(p) for p in entries], made.rows)

    def __len__(self) -> int:
        return len(self.entries)

    def first(self, count: int) -> Conversations:
        """One-turn talks of ``count`` prompts, spread over the set."""
        index = spread(len(self), min(count, len(self)))
        return self.rows.chosen(torch.tensor(index, device=self.rows.tokens.device)[:, None])

    def hold(self, w: Working, temperature: float, turns: int, width: int) -> Replies:
        """Replies to all prompts in turn ``turns``; the turns before are other ones of the set."""
        index = torch.arange(len(self), device=w.head.device)
        choice = [(index + 7 * (turns - 1 - i)) % len(self) for i in range(turns)]
        heat = torch.full((len(self),), temperature, device=w.head.device)
        talks = self.rows.chosen(torch.stack(choice, 1))
        return Replies(roll_out(w, talks, heat, width), turns)


def pair_figures(
    target: Working, drafter: DrafterWorking, replies: Replies, *, use_selector: bool = True
) -> dict:
    """Greedy tokens per pass over all replies and over those without loops."""
    agreeing = agreeing_proposals(
        target, drafter, replies.rollouts.tokens, replies.inside, use_selector=use_selector
    )
    start, end = replies.spans()
    free = replies.loop_free()
    return {
        "all": greedy_passes(agreeing, start, end).summary(),
        "loop_free": greedy_passes(agreeing[free], start[free], end[free]).summary(),
        "loop_free_replies": int(free.sum()),
    }


def target_figures(corpus: Corpus, w: Working, other: Path | None, s: EvaluationSettings) -> dict:
    """All that concerns the target alone, and its replies to the held-out prompts."""
    device = w.head.device
    return {
        "held_out_loss": {
            part: held_out_loss(w, *corpus.held_rows(part, device), size=64)
            for part in ("report", "choose")
        },
        "text_loss": compare_text_loss(corpus, w, other, s),
        "loss_by_position": loss_by_position(corpus, w, s.long_width),
    }


def samples(
    corpus: Corpus, prompts: list[dict], greedy: Replies, sampled: Replies, count: int
) -> list[dict]:
    """A few prompts spread over the list, with both replies."""
    texts = greedy.texts(corpus.tokenizer), sampled.texts(corpus.tokenizer)
    return [
        {"prompt": prompts[i]["prompt"], "greedy": texts[0][i], "sampled_0.7": texts[1][i]}
        for i in spread(len(prompts), count)
    ]


def set_figures(
    corpus: Corpus,
    w: Working,
    drafter: DrafterWorking | None,
    prompts: PromptSet,
    s: EvaluationSettings,
) -> dict:
    """Replies to a set of prompts, and the drafter's passes over them."""
    greedy = prompts.hold(w, 0.0, 1, s.width)
    sampled = prompts.hold(w, 0.7, 1, s.width)
    second = prompts.hold(w, 0.0, 2, s.long_width)
    named = {"greedy": greedy, "sampled_0.7": sampled, "greedy_second_turn": second}
    figures = {
        "prompts": len(prompts),
        "replies": {k: r.summary(corpus.tokenizer, prompts.entries) for k, r in named.items()},
        "samples": samples(corpus, prompts.entries, greedy, sampled, s.samples),
    }
    if drafter is None:
        return figures
    talks = prompts.first(s.loop_prompts)
    figures["passes"] = {
        "greedy": pair_figures(w, drafter, greedy),
        "greedy_second_turn": pair_figures(w, drafter, second),
        "greedy_without_selector": pair_figures(w, drafter, greedy, use_selector=False),
    } | {
        f"loop_T{t}": draft_and_verify(w, drafter, talks, t, s.width, s.loop_passes)[0].summary()
        for t in (0.7, 0.0)
    }
    return figures


def evaluate(
    corpus: Corpus,
    target_folder: Path,
    drafter_folder: Path | None,
    out: Path,
    s: EvaluationSettings,
    device: torch.device,
    other: Path | None = None,
) -> dict:
    """Measure the pair (or the target alone) and write ``out``."""
    torch.manual_seed(s.seed)
    with full_precision_products():
        w = load_target(target_folder, device).working(torch.float32)
        drafter = drafter_folder and load_drafter(drafter_folder, device).working(torch.float32)
        results = target_figures(corpus, w, other, s)
        for name in s.sets.split(","):
            prompts = getattr(PromptSet, name)(corpus, s.prompts, device)
            results[name] = set_figures(corpus, w, drafter, prompts, s)
            _write(out, results)
    return results


def _write(out: Path, results: dict) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"results so far: {', '.join(results)} in {out}", flush=True)
