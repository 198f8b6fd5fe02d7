"""From teacher replies to token rows: cleaned chats, the tokenizer, and the arrays to train on.

python -m scripts.demo_pair_training.corpus WORK SAMPLES
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .cleaning import (
    Drop,
    Rejected,
    clean_follow_up,
    clean_reply,
    distinct_share,
    mentions,
    quantiles,
)
from .prompts import HELD_FILE, KIND_SHARES, ONE_SENTENCE, Prompt, read_prompts
from .shards import ReplyBatch, read_shards
from .teacher_files import END_TOKEN, TOKENIZER
from .tokenizer import chat_pieces, opening, save_tokenizer, train_tokenizer

CORPUS = "corpus"
"""Folder in the work folder that takes the results."""
TOKENIZER_CHATS = 40_000
HELD_SINGLE, HELD_TWO_TURN = 896, 128
ROLLOUT_PROMPTS = 57_344


@dataclass
class Chat:
    """A training prompt with its accepted replies: one, or two with the follow-up between."""

    prompt: Prompt
    replies: list[str]

    @property
    def turns(self) -> list[tuple[str, str]]:
        return list(zip((self.prompt.prompt, self.prompt.follow_up), self.replies, strict=False))


@dataclass
class Gathered:
    """Accepted chats by prompt id, and what became of the replies of each turn."""

    chats: dict[int, Chat] = field(default_factory=dict)
    outcomes: dict[int, Counter[str]] = field(default_factory=lambda: {1: Counter(), 2: Counter()})


def gather_chats(
    prompts: Sequence[Prompt], batches: Iterable[ReplyBatch], teacher: Tokenizer
) -> Gathered:
    """Clean all replies; `batches` must bring first turns before second turns."""
    gathered = Gathered()
    seen: set[str] = set()
    for batch in batches:
        texts = teacher.decode_batch([reply.tolist() for reply in batch.replies])
        for prompt_id, reply, text in zip(batch.prompt_ids, batch.replies, texts, strict=True):
            outcome = "kept"
            try:
                add = _add_first if batch.turn == 1 else _add_second
                add(gathered.chats, int(prompt_id), prompts, text, reply[-1] == END_TOKEN, seen)
            except Rejected as rejected:
                outcome = str(rejected)
            gathered.outcomes[batch.turn][outcome] += 1
    return gathered


def _add_first(
    chats: dict[int, Chat],
    prompt_id: int,
    prompts: Sequence[Prompt],
    text: str,
    ended: bool,
    seen: set[str],
) -> None:
    prompt = prompts[prompt_id]
    reply = clean_reply(text, ended, prompt.keyword)
    if reply in seen:
        raise Rejected(Drop.DUPLICATE)
    seen.add(reply)
    chats[prompt_id] = Chat(prompt, [reply])


def _add_second(
    chats: dict[int, Chat],
    prompt_id: int,
    prompts: Sequence[Prompt],
    text: str,
    ended: bool,
    seen: set[str],
) -> None:
    del prompts  # The chat that is there already knows its prompt.
    chat = chats.get(prompt_id)
    if chat is None:
        raise Rejected(Drop.NO_FIRST)
    one_sentence = chat.prompt.follow_up == ONE_SENTENCE
    reply = clean_follow_up(text, ended, chat.replies[0], one_sentence)
    if reply in seen:
        raise Rejected(Drop.DUPLICATE)
    seen.add(reply)
    chat.replies.append(reply)


def split_chats(chats: list[Chat], seed: int) -> tuple[list[Chat], list[Chat]]:
    """Shuffled training chats, and held-out ones: single-turn chats first, then two-turn ones."""
    shuffled = chats.copy()
    random.Random(seed).shuffle(shuffled)
    wanted = {1: HELD_SINGLE, 2: HELD_TWO_TURN}
    held: dict[int, list[Chat]] = {1: [], 2: []}
    train = []
    for chat in shuffled:
        group = held[len(chat.replies)]
        # Small corpora (tests, dry runs) keep at least nine tenths for training.
        room = min(wanted[len(chat.replies)], len(chats) // 20)
        (group if len(group) < room else train).append(chat)
    return train, held[1] + held[2]


@dataclass(frozen=True)
class TokenRows:
    """Token rows of chats, end to end, and where the assistant speaks.

    Reply i is tokens [span_start[i], span_end[i]) of chat span_chat[i], its <|im_end|> included.
    """

    cat: NDArray[np.uint16]
    len: NDArray[np.int32]
    span_start: NDArray[np.int32]
    span_end: NDArray[np.int32]
    span_chat: NDArray[np.int32]

    def save(self, path: Path) -> None:
        """Write the five arrays under their names."""
        np.savez_compressed(
            path,
            cat=self.cat,
            len=self.len,
            span_start=self.span_start,
            span_end=self.span_end,
            span_chat=self.span_chat,
        )


def encode_chats(chats: Sequence[Chat], tokenizer: Tokenizer) -> TokenRows:
    """Token rows and assistant spans of chats."""
    pieces = [piece for chat in chats for pair in chat_pieces(chat.turns) for piece in pair]
    # A reply follows a line break and never starts with white space, so encoding the pieces one
    # by one gives the tokens of the whole chat.
    rows = [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch_fast(pieces)]
    sizes = np.array([len(row) for row in rows], np.int64).reshape(-1, 2)
    span_chat = np.repeat(np.arange(len(chats)), [len(chat.replies) for chat in chats])
    lengths = np.bincount(span_chat, sizes.sum(1), minlength=len(chats)).astype(np.int32)
    chat_start = np.cumsum(lengths) - lengths
    span_end = np.cumsum(sizes.sum(1)) - chat_start[span_chat]
    return TokenRows(
        cat=np.concatenate(rows),
        len=lengths,
        span_start=(span_end - sizes[:, 1]).astype(np.int32),
        span_end=span_end.astype(np.int32),
        span_chat=span_chat.astype(np.int32),
    )


def pad_rows(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[NDArray[Any], NDArray[Any]]:
    """Token rows of texts as uint16 [texts, longest], zeros behind, and their int32 lengths."""
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
    lengths = np.array([len(row) for row in rows], np.int32)
    matrix = np.zeros((len(rows), lengths.max()), np.uint16)
    for line, row in zip(matrix, rows, strict=True):
        line[: len(row)] = row
    return matrix, lengths


def write_rollout_prompts(
    out: Path, prompts: Sequence[Prompt], held: list[dict[str, str]], tokenizer: Tokenizer
) -> None:
    """Write prompts.npz: distinct prompts in chat form, for the target's own replies later.

    Few distinct prompts are no stories, so all of those come in; `train_kind` uint8 gives each
    prompt's kind (0 story, 1 explain, 2 tips, 3 describe), for a caller who wants another mix.
    """
    distinct = list({prompt.prompt: prompt for prompt in prompts}.values())
    rng = random.Random(5)
    rng.shuffle(distinct)
    distinct.sort(key=lambda prompt: prompt.kind == "story")  # Stable: the order stays random.
    chosen = distinct[:ROLLOUT_PROMPTS]
    rng.shuffle(chosen)
    kinds = list(KIND_SHARES)
    train, train_len = pad_rows([opening(prompt.prompt) for prompt in chosen], tokenizer)
    held_rows, held_len = pad_rows([opening(entry["prompt"]) for entry in held], tokenizer)
    np.savez_compressed(
        out / "prompts.npz",
        train=train,
        train_len=train_len,
        train_kind=np.array([kinds.index(prompt.kind) for prompt in chosen], np.uint8),
        held=held_rows,
        held_len=held_len,
    )
    (out / HELD_FILE).write_text(json.dumps(held, indent=1) + "\n")


def report(
    gathered: Gathered, train: list[Chat], held: list[Chat], rows: TokenRows
) -> dict[str, Any]:
    """Figures about the corpus, ready for JSON."""
    replies = [reply for chat in train for reply in chat.replies]
    spans = rows.span_end - rows.span_start
    per_kind = Counter(chat.prompt.kind for chat in train)
    return {
        "replies": {f"turn {turn}": dict(o) for turn, o in gathered.outcomes.items()},
        "chats": {"train": len(train), "held": len(held)},
        "chats of two turns": sum(len(chat.replies) == 2 for chat in train),
        "chats per kind": dict(per_kind),
        "distinct prompts": len({chat.prompt.prompt for chat in train}),
        "tokens": int(rows.len.sum()),
        "reply tokens": int(spans.sum()),
        "mean tokens": {
            "chat": round(float(rows.len.mean()), 1),
            "reply": round(float(spans.mean()), 1),
        },
        "chat length quantiles 0.5, 0.9, 0.99, 1": quantiles(
            rows.len.tolist(), (0.5, 0.9, 0.99, 1.0)
        ),
        # The closing token of each reply stands for no text.
        "characters per token": round(sum(map(len, replies)) / int(spans.sum() - len(spans)), 3),
        "distinct 4-gram share quantiles 0.02, 0.1, 0.5, 0.9": quantiles(
            map(distinct_share, replies), (0.02, 0.1, 0.5, 0.9)
        ),
        "replies (first turn) that name the keyword": round(
            sum(mentions(c.replies[0], c.prompt.keyword) for c in train) / len(train), 4
        ),
    }


def build_corpus(work: Path, samples: Path, *, seed: int = 0) -> dict[str, Any]:
    """Build everything under `work`/corpus from the shards in `samples`; returns the report."""
    out = work / CORPUS
    out.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(work)
    teacher = Tokenizer.from_file(str(work / TOKENIZER))
    gathered = gather_chats(prompts, read_shards(samples), teacher)
    train, held = split_chats(list(gathered.chats.values()), seed)
    texts = (
        text
        for chat in train[:TOKENIZER_CHATS]
        for question, reply in chat.turns
        for text in (f"user\n{question}", f"assistant\n{reply}")
    )
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, out / "tokenizer")
    rows = encode_chats(train, tokenizer)
    rows.save(out / "corpus.npz")
    encode_chats(held, tokenizer).save(out / "held.npz")
    write_rollout_prompts(out, prompts, json.loads((work / HELD_FILE).read_text()), tokenizer)
    figures = report(gathered, train, held, rows)
    text = json.dumps(figures, indent=1)
    (out / "corpus_report.json").write_text(text + "\n")
    print(text)
    return figures


def main() -> None:
    """Build the corpus from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="folder with the prompts and teacher files")
    parser.add_argument("samples", type=Path, help="folder with the shards of replies")
    args = parser.parse_args()
    build_corpus(args.work, args.samples)


if __name__ == "__main__":
    main()
