"""Stage ``fresh``: more prompts than the teacher answered, and chats that teach copying.

The target's own talks need no teacher, so their prompts may be many: new combinations of the known
words, and prompts about rare or invented words. Held-out prompts are never among them. In the
renamed chats the thing a corpus chat is about gets another name, in prompt and reply alike.
"""

import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from . import copy_words as copies
from . import word_lists as words
from .cleaning import _IRREGULAR
from .data import Chats, Corpus
from .prompts import (
    TRAIN,
    Prompt,
    WordSplit,
    draw_prompt,
    entry_and_keyword,
    known_prompts,
    read_prompts,
    with_articles,
)

PROMPTS_FILE, CHOOSE_FILE, RENAMED_FILE = "prompts.jsonl.gz", "choose.json", "renamed.npz"
MEASURED = 1_024  # so many known prompts are kept for the measurement

CHOOSE = WordSplit(
    copies.CHOOSE_HEROES, copies.CHOOSE_TOPICS, copies.CHOOSE_ACTIVITIES, copies.CHOOSE_OBJECTS
)


@dataclass(frozen=True)
class FreshSettings:
    """Numbers of prompts and renamed chats."""

    known: int = 98_304
    copied: int = 49_152
    choose: int = 256  # of each kind: prompts for choosing between settings
    renamed: int = 40_000
    invented: int = 4_096
    seed: int = 6


def copied_split(rng: random.Random, invented: int) -> WordSplit:
    """Rare words, and about as many invented ones drawn anew for every run of this stage."""
    made = sorted({copies.invented_word(rng) for _ in range(invented)})
    rng.shuffle(made)
    third = len(made) // 3
    heroes, names, topics = made[:third], made[third : 2 * third], made[2 * third :]
    people = copies.RARE_ANIMALS + copies.RARE_PEOPLE
    children = [f"{rng.choice(('boy', 'girl'))} named {n}" for n in copies.RARE_NAMES]
    children += [
        f"{rng.choice(('boy', 'girl'))} named {n.capitalize()}" for n in names[: third // 3]
    ]
    rare_topics = copies.RARE_TOPICS * (1 + len(topics) // len(copies.RARE_TOPICS) // 2)
    return WordSplit(
        people * (1 + len(heroes) // len(people) // 2) + tuple(heroes) + tuple(children),
        rare_topics + tuple(plural(t) for t in topics),
        copies.RARE_ACTIVITIES + tuple(f"making {plural(n)}" for n in names[-60:]),
        copies.RARE_OBJECTS + tuple(f"a {n}" for n in names[-100:-60]),
    )


def plural(noun: str) -> str:
    """The usual plural."""
    if re.search(r"[^aeiou]y$", noun):
        return noun[:-1] + "ies"
    return noun + ("es" if re.search(r"(?:s|x|z|ch|sh)$", noun) else "s")


def singular(noun: str) -> str:
    """The usual singular; a word that is none stays."""
    if noun.endswith("ies"):
        return noun[:-3] + "y"
    if re.search(r"(?:sses|xes|zes|ches|shes|oes)$", noun):
        return noun[:-2]
    return noun[:-1] if noun.endswith("s") and not noun.endswith(("ss", "us")) else noun


def distinct_prompts(
    count: int, split: WordSplit, rng: random.Random, without: set[str]
) -> Iterator[Prompt]:
    """``count`` prompts not in ``without``; stories are distinct, others come at most four times."""
    seen: Counter[str] = Counter()
    while count:
        prompt = draw_prompt(rng, split)
        most = 1 if prompt.kind == "story" else 4
        if prompt.prompt not in without and seen[prompt.prompt] < most:
            seen[prompt.prompt] += 1
            count -= 1
            yield prompt


@dataclass(frozen=True)
class Renaming:
    """Replaces one noun by another, in every number and case."""

    old: str
    new: str

    def __call__(self, text: str) -> str:
        if self.old != self.old.lower():  # a name
            return re.sub(rf"\b{self.old}\b", self.new.capitalize(), text)
        one = singular(self.old)
        many = _IRREGULAR.get(one, plural(one))
        forms = {one: self.new, many: plural(self.new)}
        pattern = re.compile(rf"\b(?:({one})|{many})\b", re.IGNORECASE)

        def put(match: re.Match[str]) -> str:
            word = forms[one] if match[1] else forms[many]
            return word.capitalize() if match[0][0].isupper() else word

        named = pattern.sub(put, text)
        return re.sub(rf"\b([Aa])n? (?={self.new}\b)", rf"\1{_n(self.new)} ", named, flags=re.I)


def _n(word: str) -> str:
    return "n" if with_articles(f"a {word}").startswith("an ") else ""


def renamable() -> dict[str, str]:
    """Keywords that are the whole thing a prompt asks about, and what may take their place."""
    kinds = {}
    for entry in words.HEROES:
        text, keyword = entry_and_keyword(entry)
        if " named " in text:
            kinds[keyword] = "name"
        elif text == keyword:
            kinds[keyword] = "hero"
    for entry in words.TOPICS:
        text, keyword = entry_and_keyword(entry)
        if text.removeprefix("the ") == keyword == keyword.lower():
            kinds.setdefault(keyword, "topic")
    return kinds


def renamed_texts(
    texts: Iterator[str], keyword_of: dict[str, str], rng: random.Random
) -> Iterator[str]:
    """Chats about something else, where prompt and reply both name it."""
    kinds = renamable()
    rare = {
        "name": copies.RARE_NAMES,
        "hero": copies.RARE_ANIMALS + copies.RARE_PEOPLE,
        "topic": tuple(singular(t.removeprefix("the ")) for t in copies.RARE_TOPICS),
    }
    for text in texts:
        prompt, _, rest = text.removeprefix("<|im_start|>user\n").partition("<|im_end|>")
        keyword = keyword_of.get(prompt, "")
        if keyword not in kinds:
            continue
        invented = rng.random() < 0.5
        new = copies.invented_word(rng) if invented else rng.choice(rare[kinds[keyword]])
        rename = Renaming(keyword, new)
        question, answer = rename(prompt), rename(rest)
        if question != prompt and answer != rest:
            yield f"<|im_start|>user\n{question}<|im_end|>{answer}"


def write_renamed(corpus: Corpus, work: Path, path: Path, s: FreshSettings) -> int:
    """Write renamed copies of corpus chats, as token rows; returns how many."""
    rng = random.Random(f"rename {s.seed}")
    keyword_of = {p.prompt: p.keyword for p in read_prompts(work)}
    order = list(range(len(corpus.chats.lengths)))
    rng.shuffle(order)
    starts, ends = corpus.chats.starts, corpus.chats.starts + corpus.chats.lengths
    rows = [corpus.chats.tokens[starts[i] : ends[i]].tolist() for i in order[: 2 * s.renamed]]
    texts = corpus.tokenizer.decode_batch(rows, skip_special_tokens=False)
    renamed = list(renamed_texts(iter(texts), keyword_of, rng))[: s.renamed]
    ids = [np.array(e.ids, np.uint16) for e in corpus.tokenizer.encode_batch_fast(renamed)]
    lengths = np.array([len(row) for row in ids], np.int32)
    np.savez_compressed(path, cat=np.concatenate(ids), len=lengths)
    return len(ids)


def write_fresh(corpus: Corpus, work: Path, folder: Path, s: FreshSettings) -> None:
    """Write the prompts, those for choosing, and the renamed chats into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"fresh talks {s.seed}")
    held = {p.prompt for p in known_prompts(work, MEASURED)}
    held |= {entry["prompt"] for entry in corpus.held_prompts()}
    trained = {p.prompt for p in read_prompts(work)}
    choose = {
        "known": list(distinct_prompts(s.choose, TRAIN, rng, held | trained)),
        "new": list(distinct_prompts(s.choose, CHOOSE, rng, held)),
    }
    entries = [{**asdict(p), "words": which} for which, part in choose.items() for p in part]
    (folder / CHOOSE_FILE).write_text(json.dumps(entries, indent=1) + "\n")
    without = held | {entry["prompt"] for entry in entries}
    prompts = list(distinct_prompts(s.known, TRAIN, rng, without))
    prompts += distinct_prompts(s.copied, copied_split(rng, s.invented), rng, without)
    rng.shuffle(prompts)
    with gzip.GzipFile(folder / PROMPTS_FILE, "wb", mtime=0) as file:
        for prompt in prompts:
            file.write(json.dumps(asdict(prompt)).encode() + b"\n")
    count = write_renamed(corpus, work, folder / RENAMED_FILE, s)
    print(f"{len(prompts)} prompts, {len(entries)} to choose by, {count} renamed chats", flush=True)


def read_fresh(folder: Path) -> list[Prompt]:
    """The prompts for the target's own talks."""
    with gzip.open(folder / PROMPTS_FILE, "rt", encoding="utf-8") as file:
        return [Prompt(**json.loads(line)) for line in file]


def read_choose(folder: Path) -> dict[str, list[Prompt]]:
    """The prompts for choosing between settings, with known and with new words."""
    found: dict[str, list[Prompt]] = {"known": [], "new": []}
    for entry in json.loads((folder / CHOOSE_FILE).read_text()):
        found[entry.pop("words")].append(Prompt(**entry))
    return found


def read_renamed(folder: Path) -> Chats:
    return Chats.read(folder / RENAMED_FILE)
