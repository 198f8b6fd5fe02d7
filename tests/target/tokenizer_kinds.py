"""A small tokenizer of every kind whose text has rules of its own, made in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lse_mlx import demo_pair
from lse_mlx.target.text_stream import TextStream, read_plan

PADDING = 3  # ids at the end of the vocabulary that no tokenizer knows
FALLBACK = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]


@dataclass(frozen=True)
class Kind:
    """A tokenizer, and how many ids a sequence may hold."""

    tokenizer: PreTrainedTokenizerFast
    size: int

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


def _wrapped(raw: RawTokenizer, cleans: bool = False) -> Kind:
    raw.add_special_tokens(["<end>", AddedToken("<a\u2581b>"), AddedToken("<｜é>")])
    raw.add_tokens([AddedToken("two words", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=cleans)
    return Kind(tokenizer, raw.get_vocab_size() + PADDING)


def _words(pieces: list[str]) -> RawTokenizer:
    return RawTokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token=pieces[0]))


def _level(text: bytes) -> str:
    """`text` as a token of a byte-level vocabulary."""
    spelt = bytes_to_unicode()
    return "".join(spelt[b] for b in text)


def fused(words: Sequence[str]) -> Kind:
    """These words and no others, joined without anything between them."""
    raw = _words(list(words))
    raw.decoder = decoders.Sequence(FALLBACK)
    return Kind(PreTrainedTokenizerFast(tokenizer_object=raw), len(words))


def byte_level(cleans: bool = False, forced: bool = False) -> Kind:
    """Some bytes and whole characters, and pieces that end inside a character or are wrong.

    cleans, forced: whether Transformers is told to remove spaces, which it does if forced
    """
    whole = [" .", ".", " the", "é", "\U0001f600", "\ufffd", "a", " ", "\n", "\U0001f469", "\u200d"]
    parts = [b" x\xf0\x9f", b"\x98\x80", b"\x98", b"\xe2\x82", b"\xacz", b"\x80\x80", b"\xff", b""]
    some = [bytes([b]) for b in b"\xf0\x9f\xe2\x82\xac\xef\xbf\xbd\xc3\xa9"]
    pieces = some + [w.encode() for w in whole] + parts
    raw = RawTokenizer(models.BPE({_level(p): i for i, p in enumerate(pieces)}, []))
    raw.decoder = decoders.ByteLevel()
    kind = _wrapped(raw, cleans)
    force = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    setattr(kind.tokenizer, force, forced)
    return kind


def all_bytes() -> Kind:
    """A vocabulary of the 256 bytes, with which any text can be written."""
    vocab = {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}
    raw = RawTokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.Sequence([decoders.ByteLevel()])
    return _wrapped(raw)


BYTES = [0x41, 0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0x20, 0xFF, 0xF0, 0x9F]
BYTE_TOKENS = [*(f"<0x{b:02X}>" for b in BYTES), "<0xc3>"]
SPELT = ["\u2581", "\u2581the", "a", "\u2581\u2581x", "\ufffd", "<0xZZ>", "<0x4>", "\n", ""]


def sentence_piece(strips: bool = True) -> Kind:
    """Byte tokens and, with `strips`, a dropped first space, as of Llama 2; without, as of Gemma."""
    raw = _words([*BYTE_TOKENS, *SPELT])
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    raw.decoder = decoders.Sequence([*FALLBACK, *strip])
    return _wrapped(raw)


def demo() -> Kind:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_pair.TARGET)
    return Kind(tokenizer, len(tokenizer) + PADDING)


def known_kinds() -> dict[str, Kind]:
    """Those whose text is given as it comes."""
    return {
        "byte level": byte_level(),
        "byte level, not cleaned": byte_level(cleans=True),
        "all bytes": all_bytes(),
        "sentence piece": sentence_piece(),
        "no strip": sentence_piece(strips=False),
        "demo": demo(),
    }


def other_kinds() -> dict[str, Kind]:
    """Those of which nothing is assumed: another decoder, another order, or spaces removed."""
    decoder = {
        "none": None,
        "metaspace": decoders.Metaspace(),
        "word piece": decoders.WordPiece(),
        "suffix": decoders.BPEDecoder(),
        "ctc": decoders.CTC(),
        "fuse": decoders.Fuse(),
        "three spaces": decoders.Sequence([*FALLBACK, decoders.Strip(" ", 3, 0)]),
        "strip of each": decoders.Sequence([*FALLBACK[:2], decoders.Strip(" ", 1, 0)]),
        "pattern": decoders.Sequence([decoders.Replace(Regex("a+"), "é"), *FALLBACK[1:]]),
        "over tokens": decoders.Sequence([*FALLBACK, decoders.Replace("ab", "")]),
        "bytes twice": decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()]),
        "bytes and strip": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    }
    words = ["<pad>", "|", "a</w>", "b", " ", "a", "</w>", "<0x41>", "\u2581", "x ", ".", "##b"]
    kinds = {"cleaned bytes": byte_level(cleans=True, forced=True)}
    for name, one in decoder.items():
        raw = _words(words)
        if one is not None:
            raw.decoder = one
        kinds[name] = _wrapped(raw)
    raw = _words(words)
    raw.decoder = decoders.Sequence(FALLBACK)
    return kinds | {"cleaned": _wrapped(raw, cleans=True)}
