"""A small tokenizer of every kind whose text has rules of its own, made in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from lse_mlx import demo_pair
from lse_mlx.target.text_stream import TextStream, read_plan

CLEANING = 19  # characters, one less than each replaced text has, together
PADDING = 3  # ids at the end of the vocabulary that no tokenizer knows


@dataclass(frozen=True)
class Kind:
    """A tokenizer, how many ids a sequence may hold, and what is known of its text.

    held: how many characters at most of the text so far are not given; None: it depends
    """

    tokenizer: PreTrainedTokenizerFast
    size: int
    held: int | None = None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`: what the stream is held to."""
        text = self.tokenizer.decode(list(ids))
        assert isinstance(text, str)
        return text

    def stream(self) -> TextStream:
        return TextStream(self.tokenizer, read_plan(self.tokenizer))

    def ids(self, *pieces: str) -> list[int]:
        """The tokens that the vocabulary spells so."""
        tokens = []
        for piece in pieces:
            token = self.tokenizer.backend_tokenizer.token_to_id(piece)
            assert token is not None, piece
            tokens.append(token)
        return tokens


def _wrapped(raw: RawTokenizer, held: int | None = None, cleans: bool = False) -> Kind:
    raw.add_special_tokens(["<end>", AddedToken("<a\u2581b>"), AddedToken("<｜é>")])
    raw.add_tokens([AddedToken("two words", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=cleans)
    return Kind(tokenizer, raw.get_vocab_size() + PADDING, held)


def _words(pieces: list[str]) -> RawTokenizer:
    return RawTokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token=pieces[0]))


def _level(text: bytes) -> str:
    """`text` as a token of a byte-level vocabulary."""
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in alphabet]
    return "".join(chr(b) if b in alphabet else chr(256 + others.index(b)) for b in text)


def fused(words: Sequence[str]) -> Kind:
    """These words and no others, joined without anything between them."""
    raw = _words(list(words))
    raw.decoder = decoders.Fuse()
    return Kind(PreTrainedTokenizerFast(tokenizer_object=raw), len(words))


def byte_level(strip: int = 0) -> Kind:
    """Every byte, some whole characters, and pieces that end inside a character or are wrong."""
    whole = [" .", ".", " the", "é", "\U0001f600", "\ufffd", "a", " ", "\n", "\U0001f469", "\u200d"]
    parts = [b" x\xf0\x9f", b"\x98\x80", b"\x98", b"\xe2\x82", b"\xacz", b"\x80\x80", b"\xff", b""]
    some = [
        b"\xf0",
        b"\x9f",
        b"\xe2",
        b"\x82",
        b"\xac",
        b"\xef",
        b"\xbf",
        b"\xbd",
        b"\xc3",
        b"\xa9",
    ]
    pieces = some + [w.encode() for w in whole] + parts
    raw = RawTokenizer(models.BPE({_level(p): i for i, p in enumerate(pieces)}, []))
    raw.decoder = decoders.ByteLevel()
    if strip:
        raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", strip, 0)])
    return _wrapped(raw)


def all_bytes() -> Kind:
    """A vocabulary of the 256 bytes, with which any text can be written."""
    vocab = {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}
    raw = RawTokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.Sequence([decoders.ByteLevel()])
    return _wrapped(raw)


BYTES = [0x41, 0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0x20, 0xFF, 0xF0, 0x9F]
SENTENCE = [f"<0x{b:02X}>" for b in BYTES] + ["\u2581", "\u2581the", "a", "\u2581\u2581x", "\n", ""]
SENTENCE += ["\ufffd", "<0xZZ>", "<0x4>"]


def sentence_piece(strip: int = 1) -> Kind:
    """Byte tokens and, with `strip`, dropped first spaces, as of Llama 2; without, as of Gemma."""
    raw = _words(SENTENCE)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", strip, 0)] if strip else []))
    return _wrapped(raw)


def metaspace(byte_runs: bool = False) -> Kind:
    raw = _words(SENTENCE)
    first = [decoders.ByteFallback()] if byte_runs else []
    raw.decoder = decoders.Sequence([*first, decoders.Metaspace()])
    return _wrapped(raw, None if byte_runs else 0)


PUNCTUATION = [
    "[UNK]",
    "a",
    "##b",
    "##",
    ".",
    ",",
    "'",
    "n't",
    "'s",
    "don",
    "?",
    "##?",
    " ",
    "",
    "m",
    "ve",
]


def word_piece(cleans: bool) -> Kind:
    raw = _words(PUNCTUATION)
    raw.decoder = decoders.WordPiece(cleanup=cleans)
    return _wrapped(raw, CLEANING if cleans else 0, cleans)


def no_decoder(cleans: bool) -> Kind:
    return _wrapped(_words(PUNCTUATION), CLEANING if cleans else 0, cleans)


def cleaned_pieces() -> Kind:
    """Spaces and punctuation in any order, cleaned up."""
    raw = _words(
        [" ", ".", "'", "n", "n't", "  ", " ' ", "s", "re", "?", "a", " '", "t", " v", "e"]
    )
    raw.decoder = decoders.Fuse()
    return _wrapped(raw, CLEANING, cleans=True)


def cleaned_bytes(forced: bool) -> Kind:
    """A byte-level BPE that is told to clean up, which Transformers does for BPE only if forced."""
    kind = _wrapped(byte_level().tokenizer.backend_tokenizer, cleans=True)
    force = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    setattr(kind.tokenizer, force, forced)
    return kind


def hidden_bytes() -> Kind:
    """Tokens that become byte tokens by what is replaced in them."""
    raw = _words(["a", "<0!x41>", "<0!xC3>", "<!0xA9>", "<0xA9>", "!", "é"])
    raw.decoder = decoders.Sequence([decoders.Replace("!", ""), decoders.ByteFallback()])
    return _wrapped(raw)


def patterns() -> Kind:
    """Each token changed by rules of its own."""
    raw = _words(["aab", "a", "xx b", "bx ", "  c", "x"])
    steps = [
        decoders.Replace(Regex("a+"), "é"),
        decoders.Strip(" ", 1, 0),
        decoders.Replace("x", ""),
    ]
    raw.decoder = decoders.Sequence(steps)
    return _wrapped(raw, 0)


def unknown(name: str) -> Kind:
    """Decoders whose text may change at any later token, or of which nothing is assumed."""
    raw = _words(["<pad>", "|", "a</w>", "b", " ", "a", "</w>", "<0x41>", "\u2581", "x "])
    raw.decoder = {
        "suffix": decoders.BPEDecoder(),
        "ctc": decoders.CTC(),
        "over tokens": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "")]),
        "bytes after spaces": decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]),
        "both": decoders.Sequence(
            [decoders.Metaspace(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        "spaces in bytes": decoders.Sequence([decoders.Metaspace(), decoders.ByteLevel()]),
        "bytes twice": decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()]),
    }[name]
    return _wrapped(raw)


def demo() -> Kind:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_pair.TARGET)
    return Kind(tokenizer, len(tokenizer) + PADDING)


UNKNOWN = [
    "suffix",
    "ctc",
    "over tokens",
    "bytes after spaces",
    "both",
    "spaces in bytes",
    "bytes twice",
]


def every_kind() -> dict[str, Kind]:
    kinds = {
        "byte level": byte_level(),
        "byte level, stripped": byte_level(strip=2),
        "all bytes": all_bytes(),
        "sentence piece": sentence_piece(),
        "three spaces": sentence_piece(strip=3),
        "no strip": sentence_piece(strip=0),
        "metaspace": metaspace(),
        "metaspace and bytes": metaspace(byte_runs=True),
        "word piece": word_piece(cleans=False),
        "word piece cleaned": word_piece(cleans=True),
        "no decoder": no_decoder(cleans=False),
        "no decoder cleaned": no_decoder(cleans=True),
        "cleaned pieces": cleaned_pieces(),
        "cleaned bytes": cleaned_bytes(forced=False),
        "cleaned bytes, forced": cleaned_bytes(forced=True),
        "hidden bytes": hidden_bytes(),
        "patterns": patterns(),
        "demo": demo(),
    }
    return kinds
