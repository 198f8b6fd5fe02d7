"""Text of tokens as they come: what is given never changes, and all of it is the decode of all ids.

The bytes of a character may lie in several tokens, and a first space may be dropped. Text is
settled, and then given, once no later token can change it. `read_plan` says how for the two
decoders that tokenizer files of language models have: ByteLevel (Qwen), and ByteFallback with what
stands around it (Llama, Gemma). Of any other nothing is assumed: its text settles at the end.

mlx-lm's streaming detokenizers give other text than the decode of all ids: of ByteLevel without a
first space and with "!" for an id of a padded vocabulary, of ByteFallback with characters where a
run of bytes is wrong as a whole; and the one for all others decodes a line again for each token.
"""

import codecs
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = sorted({*range(256)} - {*PRINTABLE})
# Byte-level vocabularies spell a byte as a character that can be seen (Radford et al. 2019).
BYTES = {chr(b): b for b in PRINTABLE} | {chr(256 + n): b for n, b in enumerate(OTHERS)}
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class ByteLevel:
    """Tokens that spell bytes: the text is their UTF-8, each broken part of a character U+FFFD."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: str) -> str:
        """The text that settles by the next token, which the vocabulary spells `piece`."""
        # What no byte is spelt by is in tokens only that were added to the vocabulary as they are.
        spelt = BYTES.keys() >= set(piece)
        return self._utf8.decode(bytes(BYTES[c] for c in piece) if spelt else piece.encode())

    def finish(self) -> str:
        """The rest of the text."""
        return self._utf8.decode(b"", final=True)


class ByteFallback:
    """Tokens that spell text or a byte; a run of bytes that is no UTF-8 is U+FFFD for each byte.

    old, new: what is replaced in each token
    dropped:  what the text loses where it begins with that
    """

    def __init__(self, old: str, new: str, dropped: str) -> None:
        self._replaced = old, new
        self._dropped = dropped
        self._run = bytearray()

    def add(self, piece: str) -> str:
        """The text that settles by the next token, which the vocabulary spells `piece`."""
        piece = piece.replace(*self._replaced)
        byte = BYTE_TOKEN.fullmatch(piece)
        if byte is None:
            return self._settle(piece)
        self._run.append(int(byte[1], 16))
        return ""

    def finish(self) -> str:
        """The rest of the text."""
        return self._settle("")

    def _settle(self, piece: str) -> str:
        try:
            text = self._run.decode() + piece
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run) + piece
        self._run.clear()
        if text:
            text, self._dropped = text.removeprefix(self._dropped), ""
        return text


Plan = Callable[[], ByteLevel | ByteFallback]


class TextStream:
    """The text of one sequence of tokens, given as it settles."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, plan: Plan | None) -> None:
        """plan: what `read_plan` says of this tokenizer."""
        self._tokenizer = tokenizer
        self._decoder = None if plan is None else plan()
        self._ids: list[int] = []  # where there is no plan
        self._finished = False

    def add(self, token: int) -> str:
        """Take in one token; the text that settles by it, often the token's own, sometimes none."""
        if self._finished:
            raise ValueError("this text is finished: take a new stream for another")
        if self._decoder is None:
            self._ids.append(token)
            return ""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        # There is none for an id of a padded vocabulary: no decoder sees it.
        return self._decoder.add(piece) if isinstance(piece, str) else ""

    def finish(self) -> str:
        """The rest of the text, because no token follows. Nothing is left to give afterwards."""
        if self._finished:
            return ""
        self._finished = True
        if self._decoder is None:
            return str(self._tokenizer.decode(self._ids))
        return self._decoder.finish()


def read_plan(tokenizer: PreTrainedTokenizerBase) -> Plan | None:
    """How the text of `tokenizer` settles: what makes its decoder; None where that is not known."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or _decodes_otherwise(tokenizer):
        return None
    match _steps(tokenizer):
        case [{"type": "ByteLevel"}]:
            return ByteLevel
        case [
            {"type": "Replace", "pattern": {"String": old}, "content": new},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]:
            return partial(ByteFallback, old, new, "")
        case [
            {"type": "Replace", "pattern": {"String": old}, "content": new},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": dropped, "start": 1, "stop": 0},
        ]:
            return partial(ByteFallback, old, new, dropped)
    return None


def _decodes_otherwise(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether more is done to the text than by its decoder: by its class, or spaces removed.

    Transformers removes them from the text of a BPE only where it is told to spoil that text.
    """
    own, library = type(tokenizer), PreTrainedTokenizerFast
    changed = own.decode is not library.decode or own._decode is not library._decode
    forced = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return changed or bool(tokenizer.clean_up_tokenization_spaces and (forced or not is_bpe))


def _steps(tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """The decoder's steps in order, as tokenizer.json spells them; none without a decoder."""
    decoder = tokenizer.backend_tokenizer.decoder
    stored = {"decoders": []} if decoder is None else json.loads(decoder.__getstate__())
    return stored.get("decoders", [stored])
