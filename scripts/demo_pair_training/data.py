"""The tokenized corpus: chats, rows for training, rows for the held-out loss."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .decoding import Conversations

IGNORE = -100
HELD_OUT_CUT = 256


@dataclass
class Chats:
    """Chats one after another in ``tokens``; chat i has ``lengths[i]`` of them."""

    tokens: np.ndarray
    lengths: np.ndarray

    @classmethod
    def read(cls, path: Path) -> "Chats":
        with np.load(path) as file:
            return cls(file["cat"], file["len"].astype(np.int64))

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    def chat(self, index: int) -> np.ndarray:
        start = self.starts[index]
        return self.tokens[start : start + self.lengths[index]]

    def padded(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """One chat per row, cut at ``width``: ids ``[n, width]`` and next-token labels."""
        keep = np.minimum(self.lengths, width)
        column = np.arange(width)
        inside = column < keep[:, None]
        source = np.minimum(self.starts[:, None] + column, len(self.tokens) - 1)
        ids = np.where(inside, self.tokens[source].astype(np.int64), 0)
        labels = np.full_like(ids, IGNORE)
        labels[:, :-1] = np.where(inside[:, 1:], ids[:, 1:], IGNORE)
        return ids, labels


def pack_rows(chats: Chats, width: int, newline: int, rng: np.random.Generator) -> np.ndarray:
    """Rows ``[n, width + 1]`` of shuffled chats joined by a newline, as turns of one conversation.

    Every row begins with a fresh chat, as in use; the last chat of a row is cut at its end, so
    nothing is padded. The extra column is the label of the last position.
    """
    order = rng.permutation(len(chats.lengths))
    lengths = chats.lengths[order] + 1
    begins = np.concatenate([[0], np.cumsum(lengths)])
    shift = np.repeat(chats.starts[order] - begins[:-1], lengths)
    position = np.arange(begins[-1])
    stream = chats.tokens[np.minimum(position + shift, len(chats.tokens) - 1)].astype(np.uint16)
    stream[begins[1:] - 1] = newline
    rows, chat = [], 0
    while begins[chat] + width + 1 <= begins[-1]:
        rows.append(begins[chat])
        chat = int(np.searchsorted(begins, begins[chat] + width))
    return stream[np.array(rows)[:, None] + np.arange(width + 1)]


class RowFeed:
    """Endless batches of packed rows on the device; the next epoch is packed on a thread."""

    def __init__(self, chats: Chats, width: int, newline: int, device: torch.device, seed: int):
        self.device, self.epochs = device, 0
        self._pool = ThreadPoolExecutor(1)
        self._pack = lambda epoch: pack_rows(
            chats, width, newline, np.random.default_rng((seed, epoch))
        )
        self._next = self._pool.submit(self._pack, 0)
        self._rows, self._at = self._take(), 0

    def _take(self) -> Tensor:
        rows = self._next.result()
        self.epochs += 1
        self._next = self._pool.submit(self._pack, self.epochs)
        return torch.from_numpy(rows.astype(np.int16)).to(self.device)

    def batch(self, size: int) -> Tensor:
        """``[size, width + 1]`` token ids (int64)."""
        if self._at + size > len(self._rows):
            self._rows, self._at = self._take(), 0
        rows = self._rows[self._at : self._at + size]
        self._at += size
        return rows.long()


@dataclass
class Prompts:
    """Prompt rows ``[n, P]`` padded with 0, and their lengths ``[n]``."""

    tokens: Tensor
    lengths: Tensor
    newline: list[int]

    def talks(self, rows: int, turns: int, generator: torch.Generator) -> Conversations:
        """Conversations of randomly chosen prompts."""
        choice = torch.randint(
            len(self.lengths), (rows, turns), generator=generator, device=self.tokens.device
        )
        return self.chosen(choice)

    def chosen(self, choice: Tensor) -> Conversations:
        return Conversations.draw(self.tokens, self.lengths, choice, self.newline)


@dataclass
class Corpus:
    """Everything the text stages hand over, read from one folder."""

    folder: Path
    tokenizer: Tokenizer
    chats: Chats
    held: Chats
    newline: int

    @classmethod
    def read(cls, folder: Path) -> "Corpus":
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        (newline,) = tokenizer.encode("\n").ids
        return cls(
            folder,
            tokenizer,
            Chats.read(folder / "corpus.npz"),
            Chats.read(folder / "held.npz"),
            newline,
        )

    def prompts(self, split: str, device: torch.device) -> Prompts:
        """The ``train`` or ``held`` prompts on the device."""
        with np.load(self.folder / "prompts.npz") as file:
            tokens = torch.from_numpy(file[split].astype(np.int64)).to(device)
            lengths = torch.from_numpy(file[f"{split}_len"].astype(np.int64)).to(device)
        return Prompts(tokens, lengths, [self.newline])

    def held_prompts(self) -> list[dict]:
        """Text, keyword and kind of each held-out prompt, in the order of the token rows."""
        return json.loads((self.folder / "held_prompts.json").read_text())

    def held_rows(self, part: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids and labels of held-out chats: ``choose`` (every fourth) or ``report`` (the rest)."""
        ids, labels = self.held.padded(HELD_OUT_CUT)
        choose = np.arange(len(ids)) % 4 == 0
        pick = choose if part == "choose" else ~choose
        return torch.from_numpy(ids[pick]).to(device), torch.from_numpy(labels[pick]).to(device)


def batches(*tensors: Tensor, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Slices of ``size`` rows of tensors of the same length."""
    for start in range(0, len(tensors[0]), size):
        yield tuple(x[start : start + size] for x in tensors)
