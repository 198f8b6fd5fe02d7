"""Text of tokens as they come: what is given never changes, and all of it is the decode of all ids.

A decoder looks at more than one token at a time: the bytes of a character may lie in several tokens,
a first space may be dropped, a space before a comma may go. Text is settled, and then given, once no
later token can change it. `read_plan` says where that is for the decoders that tokenizer files are
known to have. Of any other decoder nothing is assumed: its text settles at the end.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"

# What `PreTrainedTokenizerBase.clean_up_tokenization` of Transformers replaces, in its order.
CLEANINGS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


@dataclass(frozen=True)
class Plan:
    """How the text of a tokenizer settles.

    backend:     the tokenizer of the library `tokenizers`, whose decoder is known
    joins_bytes: a character's bytes may lie in several tokens, as of the decoder ByteLevel
    byte_runs:   a run of byte tokens is judged as a whole, as by the decoder ByteFallback; the
                 replacements made in each token before that. None without that decoder
    strips:      characters at the start of the whole text are dropped
    context:     a token to decode others after, so that they are not the first; empty where the
                 first one is decoded like any other
    skipped:     the length of the context's text
    cleans:      Transformers removes spaces in the end, by CLEANINGS
    """

    backend: Backend
    joins_bytes: bool
    byte_runs: tuple[tuple[str, str], ...] | None
    strips: bool
    cleans: bool
    context: tuple[int, ...] = ()
    skipped: int = 0

    def decode(self, ids: list[int], at_start: bool) -> str:
        """The text of `ids` at the start of a sequence or after other tokens, not cleaned up."""
        if at_start:
            return self.backend.decode(ids, skip_special_tokens=False)
        return self.backend.decode([*self.context, *ids], skip_special_tokens=False)[self.skipped :]

    def may_be_byte(self, piece: str) -> bool:
        """Whether ByteFallback may take a token that is spelt `piece` for a byte."""
        if self.byte_runs is None:
            return False
        for old, new in self.byte_runs:
            piece = piece.replace(old, new)
        return piece.startswith("<0x") and piece.endswith(">")


class TextStream:
    """The text of one sequence of tokens, given as it settles."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, plan: Plan | None) -> None:
        """plan: what `read_plan` says of this tokenizer."""
        self._tokenizer = tokenizer
        self._plan = plan
        # The window is the ids since the last settled boundary and `_text` is its text, of which
        # `_given` characters were given. At the start of the sequence there is no context yet.
        self._window: list[int] = []
        self._text, self._given = "", 0
        self._at_start = plan is not None and bool(plan.context)
        self._in_bytes = False
        self._cleaning = [Replacing(*pair) for pair in CLEANINGS] if plan and plan.cleans else []
        self._finished = False

    def add(self, token: int) -> str:
        """Take in one token; the text that settles by it, often the token's own, sometimes none."""
        if self._finished:
            raise ValueError("this text is finished: take a new stream for another")
        if self._plan is None:
            self._window.append(token)
            return ""
        return self._cleaned(self._settle(token, self._plan))

    def finish(self) -> str:
        """The rest of the text, because no token follows. Nothing is left to give afterwards."""
        if self._finished:
            return ""
        self._finished = True
        if self._plan is None:
            return str(self._tokenizer.decode(self._window))
        rest = self._plan.decode(self._window, self._at_start)[self._given :]
        return self._cleaned(rest, last=True)

    def _settle(self, token: int, plan: Plan) -> str:
        piece = plan.backend.id_to_token(token)
        if piece is None:
            return ""  # of a padded vocabulary; no decoder sees it
        after_bytes, self._in_bytes = self._in_bytes, plan.may_be_byte(piece)
        self._window.append(token)
        if self._in_bytes:
            return ""
        before, self._text = self._text, plan.decode(self._window, self._at_start)
        if plan.joins_bytes and self._text.endswith(REPLACEMENT):
            return self._settle_all_but_the_last(token, before, plan)
        settled = self._text[self._given :]
        if self._text or not (self._at_start and plan.strips):
            self._restart([], "")
        elif not after_bytes and not plan.decode([token], at_start=False):
            self._window.pop()  # no text in any place: many of these would only cost time
        return settled

    def _settle_all_but_the_last(self, token: int, before: str, plan: Plan) -> str:
        """What settles where the text ends in U+FFFD, which may be the begin of a character.

        Those before the last are of bytes that are wrong whatever follows. `before` is the text
        without `token`.
        """
        own = plan.decode([token], at_start=False)
        if not own:
            self._window.pop()  # no text in any place, as above
            return ""
        settled = self._text[self._given : -1]
        self._given += len(settled)
        if before and len(before) + len(own) == len(self._text):
            # Bytes that go on with a character make fewer U+FFFD than alone. These here do not.
            self._restart([token], own)
        return settled

    def _restart(self, window: list[int], text: str) -> None:
        """Begin the window anew, all but the last character of its text given already."""
        self._window, self._text, self._given = window, text, max(0, len(text) - 1)
        self._at_start = False

    def _cleaned(self, text: str, last: bool = False) -> str:
        for replacing in self._cleaning:
            text = replacing.take(text, last)
        return text


class Replacing:
    """`str.replace` over a text that comes in pieces."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._held = ""

    def take(self, piece: str, last: bool = False) -> str:
        """The text that is replaced for good by now; all of it with the `last` piece."""
        *done, rest = (self._held + piece).split(self._old)
        held = 0 if last else _overlap(rest, self._old)
        self._held = rest[len(rest) - held :]
        return self._new.join([*done, rest[: len(rest) - held]])


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of `text` are the begin of `word`, but not all of it."""
    sizes = range(min(len(word) - 1, len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(word[:n])), 0)


def read_plan(tokenizer: PreTrainedTokenizerBase) -> Plan | None:
    """How the text of `tokenizer` settles; None where that is not known.

    Known are decoders that treat each token by itself (Replace, Strip, Metaspace, WordPiece, or no
    decoder at all), with one ByteFallback after nothing but Replace, then ByteLevel or Fuse, then
    Strip of the start; each may be absent. Where more than one thing depends on a token being the
    first, nothing is known.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not _decodes_as_the_library(tokenizer):
        return None
    steps = _steps(tokenizer)
    at = next((i for i, s in enumerate(steps) if s["type"] in ("Fuse", "ByteLevel")), len(steps))
    own, joined = steps[:at], steps[at:]
    kinds = [step["type"] for step in own]
    joins_bytes = bool(joined) and joined[0]["type"] == "ByteLevel"
    first_differs = not steps or "Metaspace" in kinds or "WordPiece" in kinds
    strips = any(step.get("start") for step in joined[1:])
    byte_runs = _byte_runs(own)
    known = (
        set(kinds) <= {"Replace", "Strip", "Metaspace", "WordPiece", "ByteFallback"}
        and all(s["type"] == "Fuse" or (s["type"] == "Strip" and not s["stop"]) for s in joined[1:])
        and kinds.count("ByteFallback") == (byte_runs is not None)
        and not (joins_bytes and byte_runs is not None)
        and not (first_differs and (strips or joins_bytes))
    )
    if not known:
        return None
    plan = Plan(tokenizer.backend_tokenizer, joins_bytes, byte_runs, strips, _cleans(tokenizer))
    return _with_context(plan) if first_differs or strips else plan


def _decodes_as_the_library(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether its class changes nothing in how Transformers decodes, and CLEANINGS still hold."""
    changed = any(
        getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name)
        for name in ("decode", "_decode", "clean_up_tokenization")
    )
    sample = "".join(f"a{old}b{old} '{old}" for old, new in CLEANINGS)
    cleaned = sample
    for old, new in CLEANINGS:
        cleaned = cleaned.replace(old, new)
    return not changed and tokenizer.clean_up_tokenization(sample) == cleaned


def _cleans(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether Transformers cleans up after decoding: of BPE only where it is told to spoil text."""
    forced = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return bool(tokenizer.clean_up_tokenization_spaces and (forced or not is_bpe))


def _steps(tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """The decoder's steps in order, as tokenizer.json spells them; none without a decoder."""

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        inner = step["decoders"] if step["type"] == "Sequence" else None
        return [step] if inner is None else [leaf for part in inner for leaf in flat(part)]

    decoder = tokenizer.backend_tokenizer.decoder
    return [] if decoder is None else flat(json.loads(decoder.__getstate__()))


def _byte_runs(own: list[dict[str, Any]]) -> tuple[tuple[str, str], ...] | None:
    """The replacements before ByteFallback, if it is there and nothing else comes before it."""
    replaced: list[tuple[str, str]] = []
    for step in own:
        if step["type"] == "ByteFallback":
            return tuple(replaced)
        if step["type"] != "Replace" or "String" not in step["pattern"]:
            return None
        replaced.append((step["pattern"]["String"], step["content"]))
    return None


def _with_context(plan: Plan) -> Plan | None:
    """`plan` with the first token of the vocabulary whose text is whole by itself, if any is."""
    for token in range(plan.backend.get_vocab_size()):
        piece = plan.backend.id_to_token(token)
        if piece is None or plan.may_be_byte(piece):
            continue
        text = plan.decode([token], at_start=True)
        if text and REPLACEMENT not in text:
            return replace(plan, context=(token,), skipped=len(text))
    return None
