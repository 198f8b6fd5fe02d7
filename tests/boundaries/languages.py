"""Small vocabularies whose ids are bytes, pieces of characters and words, and what text they make.

A language is told twice: as the bytes of each id, from which the tests' own definition of text
comes, and as a tokenizer file, which is what the code under test reads.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lse_mlx.target.tokenizer import Tokenizer, load_tokenizer

ENDS = ("<|end|>", "<|stop|>")
WORDS = (
    *(bytes([b]) for b in b"\xf0\x9f\x98\x8a\x91\xa9\xe2\x80\x8d\xcc\x81\xc3\xef\xbf\xbd\xff"),
    "é".encode(),
    "👩".encode(),
    "日".encode(),
    "\u200d".encode(),
    b" x\xf0\x9f",
    b"\x8aa",
    b"\xcc\x81b",
    *(b"a", b"b", b"ab", b"abc", b"ba", b" ", b" a", b"\n", b"\n\n", b"c", b"ca", b"<", b"e", b"."),
)
"""Of each id behind the two end tokens: bytes of emoji, joiners and accents, and words that overlap."""

COUNT = len(ENDS) + len(WORDS)


TAILS = [first + b"\x80" * n for first in (b"\x80", b"\xbf") for n in range(3)]
"""One of these finishes any character that is begun."""


@dataclass(frozen=True)
class Language:
    """What each id says: `words[id]` are its bytes, of a UTF-8 text that may be broken anywhere."""

    words: tuple[bytes, ...]

    def whole(self, ids: list[int]) -> str:
        """The text of `ids`, each maximal broken part of a character as one U+FFFD."""
        return self._said(ids).decode("utf-8", "replace")

    def settled(self, ids: list[int]) -> str:
        """The part of that text that no id after these can change.

        All of it, but for the U+FFFD of a character that may still be finished.
        """
        said, whole = self._said(ids), self.whole(ids)
        after = [(said + tail).decode("utf-8", "replace") for tail in TAILS]
        return whole if all(text.startswith(whole) for text in after) else whole[:-1]

    def _said(self, ids: list[int]) -> bytes:
        return b"".join(self.words[i] for i in ids)


def of_size(count: int) -> Language:
    """The language of the words above, filled up to `count` ids with short words of letters."""
    words = [*(end.encode() for end in ENDS), *WORDS]
    filled = [bytes([100 + n // 10, 110 + n % 10]) for n in range(count - len(words))]
    return Language((*words, *filled)[:count])


CROSSED = "👩\u200d🚀\u0301日本🇩🇪ß👍\U0001f3fdñЖёनि语©✓한א👻"
"""Code points of two to four bytes, joiners and marks among them, each once."""


def crossing(ids: list[int], count: int) -> Language:
    """A language of `count` ids in which `ids`, at most 20, say CROSSED code point by code point.

    Each of them ends one character and begins the next, so none is whole text by itself.
    """
    words = list(of_size(count).words)
    ends = [b"w", *(c.encode()[1:] for c in CROSSED)]
    beginnings = [c.encode()[:1] for c in CROSSED]
    for i, end, beginning in zip(ids, ends, beginnings, strict=False):
        words[i] = end + beginning
    return Language(tuple(words))


def save_language(folder: Path, language: Language) -> Path:
    """Write `language` as a byte-level tokenizer and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    spelled = bytes_to_unicode()
    vocab = {"".join(spelled[b] for b in word): i for i, word in enumerate(language.words)}
    assert len(vocab) == len(language.words)
    raw = RawTokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(ENDS))
    raw.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ENDS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), "utf-8")
    return folder


def load_language(folder: Path, language: Language) -> Tokenizer:
    """The tokenizer of `language` as the project loads it."""
    return load_tokenizer(save_language(folder, language), [0], len(language.words))
