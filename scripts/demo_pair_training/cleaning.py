"""Rules that decide which teacher replies are good enough to learn from. Text in, text out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from functools import cache

MIN_CHARS = 40
"""Shorter replies teach little."""
MIN_DISTINCT = 0.85
"""Replies that repeat more than this teach the small model to loop."""

_ASCII = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": " - ",
        "\u2026": "...",
        "\u00a0": " ",
    }
)
_SENTENCE_END = re.compile(r"[.!?][\"')*]*(?=\s|$)")
_NOT_AN_END = re.compile(r"(?:^|\s)(?:\d+|[A-Z]|Mr|Mrs|Ms|Dr|St|vs|etc|e\.g|i\.e)\.$")
_IRREGULAR = {
    "leaves": "leaf",
    "wolf": "wolves",
    "wolves": "wolf",
    "teeth": "tooth",
    "mouse": "mice",
    "goose": "geese",
    "elf": "elves",
    "dwarf": "dwarves",
    "fisherman": "fishermen",
    "snowman": "snowmen",
}


class Drop(StrEnum):
    """Why a reply was not used."""

    SHORT = "too short"
    NON_ASCII = "not ASCII"
    NO_SENTENCE = "no full sentence before the cut"
    REPEATS = "repeats itself"
    OFF_TOPIC = "keyword not mentioned"
    ECHO = "repeats the turn before"
    DUPLICATE = "seen before"
    NO_FIRST = "its first reply was dropped"


class Rejected(Exception):
    """A reply that breaks a rule; `reason` says which one."""

    def __init__(self, reason: Drop) -> None:
        super().__init__(reason.value)
        self.reason = reason


def to_ascii(text: str) -> str:
    """Typographic quotes, dashes and ellipses as ASCII; spaces at line ends removed."""
    return re.sub(r"[ \t]+(?=\n|$)", "", text.translate(_ASCII)).strip()


def distinct_share(text: str, n: int = 4) -> float:
    """Distinct word n-grams over all word n-grams, 1.0 for texts under 2 n words.

    The numbers of a list are left out, or a list of equal items would count as distinct.
    """
    words = [word for word in text.split() if not re.fullmatch(r"\d+[.)]", word)]
    if len(words) < 2 * n:
        return 1.0
    grams = list(zip(*(words[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams)


def cut_after_sentence(text: str) -> str:
    """`text` up to its last full sentence with no quote or bold mark left open; may be empty."""
    for match in reversed(list(_SENTENCE_END.finditer(text))):
        head = text[: match.end()]
        is_marker = _NOT_AN_END.search(head)
        if not is_marker and head.count('"') % 2 == 0 and head.count("**") % 2 == 0:
            return head
    return ""


@cache
def keyword_pattern(keyword: str) -> re.Pattern[str]:
    """What counts as a mention: the keyword, its other number, or another form of its stem.

    A name (with a capital) counts only as it stands.
    """
    if keyword != keyword.lower():
        return re.compile(rf"\b{re.escape(keyword)}\b")
    *front, last = keyword.lower().split()
    forms = [_stem_pattern(last)]
    if last in _IRREGULAR:
        forms.append(_IRREGULAR[last])
    words = [re.escape(word) for word in front] + [f"(?:{'|'.join(forms)})"]
    return re.compile(r"\b" + r"\s+".join(words) + r"\b", re.IGNORECASE)


def _stem_pattern(word: str) -> str:
    """A pattern for one word; short stems take a plural only ("ant" must not match "anthem")."""
    if len(word) > 5 and word.endswith("ing"):
        stem = word.removesuffix("ing")
        return (stem[:-1] if stem[-1] == stem[-2] else stem) + r"\w{0,4}"
    if len(word) > 4 and word.endswith("ies"):
        return word.removesuffix("ies") + r"\w{0,4}"
    singular = word
    if re.search(r"(?:[sxz]|ch|sh)es$", word):
        singular = word.removesuffix("es")
    elif word.endswith("s") and not word.endswith("ss"):
        singular = word.removesuffix("s")
    if len(singular) <= 3:
        return singular + r"(?:s|es)?"
    return re.sub(r"[ey]$", "", singular) + r"\w{0,4}"


def mentions(text: str, keyword: str) -> bool:
    """Whether `text` names the keyword in some form."""
    return keyword_pattern(keyword).search(text) is not None


def echo_share(reply: str, earlier: str, n: int = 4) -> float:
    """The share of the reply's word n-grams that an earlier reply holds already."""
    words, before = reply.split(), earlier.split()
    grams = list(zip(*(words[i:] for i in range(n)), strict=False))
    seen = set(zip(*(before[i:] for i in range(n)), strict=False))
    return sum(gram in seen for gram in grams) / max(len(grams), 1)


def clean_reply(raw: str, ended: bool, keyword: str = "", min_chars: int = MIN_CHARS) -> str:
    """The reply as it goes into the corpus.

    `ended` says that the teacher closed the reply itself; otherwise it is cut after its last full
    sentence. An empty `keyword` skips that rule. Raises Rejected when a rule is broken.
    """
    text = to_ascii(raw)
    if not text.isascii():
        raise Rejected(Drop.NON_ASCII)
    if not ended:
        text = cut_after_sentence(text)
        if not text:
            raise Rejected(Drop.NO_SENTENCE)
    if len(text) < min_chars:
        raise Rejected(Drop.SHORT)
    if distinct_share(text) < MIN_DISTINCT:
        raise Rejected(Drop.REPEATS)
    if keyword and not mentions(text, keyword):
        raise Rejected(Drop.OFF_TOPIC)
    return text


def clean_follow_up(raw: str, ended: bool, first_reply: str, one_sentence: bool) -> str:
    """As clean_reply for a second turn, which must add something to the first reply.

    With `one_sentence` the reply is cut after its first sentence, since that is what was asked.
    """
    if one_sentence:
        raw, ended = first_sentence(to_ascii(raw)), True
    text = clean_reply(raw, ended, min_chars=20)
    if not one_sentence and echo_share(text, first_reply) > 0.3:
        raise Rejected(Drop.ECHO)
    return text


def first_sentence(text: str) -> str:
    """The text up to its first sentence end, empty if it has none."""
    for match in _SENTENCE_END.finditer(text):
        head = text[: match.end()]
        if not _NOT_AN_END.search(head) and head.count('"') % 2 == 0:
            return head
    return ""


def quantiles(values: Iterable[float], at: tuple[float, ...] = (0.1, 0.5, 0.9)) -> list[float]:
    """Quantiles by sorting, rounded to four places."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return [round(ordered[round(q * last)], 4) for q in at] if ordered else []
