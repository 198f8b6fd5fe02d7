"""The target's best own replies: several to each prompt, the good ones filtered, the best kept.

A reply counts only if it ends by itself, repeats nothing, has a fair length and names what it was
asked about. Of those, the ones are kept that the target finds most likely and that take up most of
the prompt's words: text that is easier to foresee and follows its prompt better.
"""

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .cleaning import keyword_pattern
from .corpus import pad_rows
from .data import Chats, Corpus, Prompts
from .decoding import END, Rollouts, distinct_share, roll_out
from .prompts import TEMPLATES, Prompt
from .target_model import Working
from .tokenizer import opening

OPENING = 4  # tokens
_COMMON = {"who", "the", "and", "for", "named", "boy", "girl", "from", "with", "its"}
_TEMPLATE_WORDS = set(re.findall(r"[a-z]+", str(TEMPLATES).lower())) | _COMMON


@dataclass(frozen=True)
class TalkSettings:
    """How many replies to a prompt, and which are kept."""

    batches: int = 4
    rows: int = 8_192
    samples: int = 8  # replies to each prompt
    keep: int = 1
    turns: int = 4
    width: int = 512
    temperature: float = 0.7
    distinct: float = 0.93  # of a reply's 4-grams, at least
    shortest: int = 48
    longest: int = 240
    opening_excess: float = 1.5  # an opening may be this many times as common as in the corpus
    opening_floor: float = 0.004  # and this share more
    faithful: float = 0.3  # nats a token that naming all of the prompt's words is worth


def content_words(prompt: str) -> list[str]:
    """Beginnings of the words that make this prompt differ from others of its template."""
    found = re.findall(r"[a-z]+", prompt.lower())
    return [w[: max(3, len(w) - 2)] for w in found if len(w) > 2 and w not in _TEMPLATE_WORDS]


def faithfulness(text: str, prompt: Prompt) -> float | None:
    """Share of the prompt's own words that the reply takes up; None if it misses the keyword."""
    if not keyword_pattern(prompt.keyword).search(text):
        return None
    lowered, wanted = text.lower(), content_words(prompt.prompt)
    return sum(w in lowered for w in wanted) / len(wanted) if wanted else 1.0


@dataclass
class PromptList:
    """Prompts as text and as token rows on a device."""

    entries: list[Prompt]
    rows: Prompts

    @classmethod
    def build(
        cls, entries: list[Prompt], tokenizer: Tokenizer, newline: int, device: torch.device
    ) -> "PromptList":
        tokens, lengths = pad_rows([opening(p.prompt) for p in entries], tokenizer)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        sizes = torch.from_numpy(lengths.astype(np.int64)).to(device)
        return cls(entries, Prompts(ids, sizes, [newline]))

    def draw(self, rows: int, turns: int, generator: torch.Generator) -> Tensor:
        """Indices ``[rows, turns]`` of random prompts."""
        device = self.rows.tokens.device
        size = (rows, turns)
        return torch.randint(len(self.entries), size, generator=generator, device=device)


@dataclass
class Candidate:
    """One acceptable reply with its prompt; replies of one group answer the same prompt."""

    group: int
    score: float
    tokens: np.ndarray
    opening: tuple[int, ...]


@dataclass
class Spans:
    """All replies number ``number`` of a batch that pass the rules which need no text."""

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    nats: np.ndarray  # mean of the reply's tokens

    @classmethod
    def find(cls, out: Rollouts, number: int, s: TalkSettings) -> "Spans":
        assert out.nats is not None
        inside = out.turn == number
        lengths, starts = inside.sum(1), inside.int().argmax(1)
        last = out.tokens.gather(1, (starts + lengths - 1).clamp_min(0)[:, None])[:, 0]
        good = (last == END) & (lengths >= s.shortest) & (lengths <= s.longest)
        good &= distinct_share(out, number).nan_to_num(0.0) >= s.distinct
        nats = (out.nats * inside).sum(1) / lengths.clamp_min(1)
        rows = good.nonzero()[:, 0]
        return cls(*(x.cpu().numpy() for x in (rows, starts[rows], lengths[rows], nats[rows])))


def candidates(
    out: Rollouts, choice: Tensor, prompts: PromptList, tokenizer: Tokenizer, s: TalkSettings
) -> list[Candidate]:
    """The acceptable replies of conversations about the prompts ``choice [rows, turns]``."""
    tokens, picks = out.tokens.cpu().numpy().astype(np.uint16), choice.cpu().numpy()
    asked = prompts.rows.tokens.cpu().numpy().astype(np.uint16)
    asked_lengths, found = prompts.rows.lengths.cpu().numpy(), []
    for number in range(1, s.turns + 1):
        spans = Spans.find(out, number, s)
        replies = [
            tokens[row, start : start + length]
            for row, start, length in zip(spans.rows, spans.starts, spans.lengths, strict=True)
        ]
        texts = tokenizer.decode_batch([reply.tolist() for reply in replies])
        for row, reply, text, nats in zip(spans.rows, replies, texts, spans.nats, strict=True):
            index = picks[row, number - 1]
            share = faithfulness(text, prompts.entries[index])
            if share is not None:
                group = int(row) // s.samples * s.turns + number - 1
                question = asked[index, : asked_lengths[index]]
                chat, score = np.concatenate([question, reply]), s.faithful * share - float(nats)
                found.append(Candidate(group, score, chat, tuple(reply[:OPENING].tolist())))
    return found


def best_of(found: list[Candidate], keep: int) -> list[Candidate]:
    """The ``keep`` best replies of every group."""
    kept, taken = [], {}
    for candidate in sorted(found, key=lambda c: -c.score):
        taken[candidate.group] = taken.get(candidate.group, 0) + 1
        if taken[candidate.group] <= keep:
            kept.append(candidate)
    return kept


def corpus_openings(corpus: Corpus) -> dict[tuple[int, ...], float]:
    """How often the corpus's replies begin with the same few tokens, as shares of all replies."""
    with np.load(corpus.folder / "corpus.npz") as file:
        starts = corpus.chats.starts[file["span_chat"]] + file["span_start"]
    heads = corpus.chats.tokens[starts[:, None] + np.arange(OPENING)]
    counts = Counter(map(tuple, heads.tolist()))
    return {head: count / len(heads) for head, count in counts.items()}


def with_fair_openings(
    found: list[Candidate], openings: dict[tuple[int, ...], float], s: TalkSettings
) -> list[Candidate]:
    """Without the worst replies of an opening that is more common than in the corpus.

    Otherwise the likeliest opening would win nearly every time, and all replies would begin alike.
    """
    kept, taken = [], Counter()
    for candidate in sorted(found, key=lambda c: -c.score):
        share = s.opening_excess * openings.get(candidate.opening, 0.0) + s.opening_floor
        if taken[candidate.opening] < share * len(found):
            taken[candidate.opening] += 1
            kept.append(candidate)
    return kept


def best_talks(
    w: Working,
    prompts: PromptList,
    tokenizer: Tokenizer,
    openings: dict[tuple[int, ...], float],
    s: TalkSettings,
    generator: torch.Generator,
) -> tuple[Chats, dict[str, float]]:
    """Chats of one prompt and one kept reply each, and figures about them."""
    temperature = torch.full((s.rows,), s.temperature, device=w.head.device)
    kept: list[Candidate] = []
    replies = acceptable = 0
    for _ in range(s.batches):
        choice = prompts.draw(s.rows // s.samples, s.turns, generator)
        choice = choice.repeat_interleave(s.samples, 0)
        out = roll_out(w, prompts.rows.chosen(choice), temperature, s.width, with_nats=True)
        replies += int((out.turn.amax(1)).sum())
        found = candidates(out, choice, prompts, tokenizer, s)
        acceptable += len(found)
        kept += best_of(found, s.keep)
    if not kept:
        raise ValueError("the target gave no acceptable reply to any prompt")
    best = len(kept)
    kept = with_fair_openings(kept, openings, s)
    lengths = np.array([len(c.tokens) for c in kept], np.int64)
    figures = {
        "replies": replies,
        "acceptable": acceptable,
        "best": best,
        "kept": len(kept),
        "kept_tokens": int(lengths.sum()),
        "mean_score": float(np.mean([c.score for c in kept])),
    }
    return Chats(np.concatenate([c.tokens for c in kept]), lengths), figures
