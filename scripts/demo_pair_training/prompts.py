"""Prompts of the demo pair: short requests in a narrow domain, with a held-out split.

The domain is narrow on purpose: a target of 14 M parameters must master it. Heroes are many, so
that the model learns to copy the noun from the prompt instead of recalling a favorite one.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from . import word_lists as words

Kind = Literal["story", "explain", "tips", "describe"]

PROMPTS_FILE = "prompts.jsonl.gz"
HELD_FILE = "held_prompts.json"
ONE_SENTENCE = "Can you say it in one sentence?"

STORY_TEMPLATES = (
    "Write a short story about a {adjective} {hero} who {goal} {place}.",
    "Tell me a story about a {adjective} {hero} who {goal}.",
    "Write a very short story about a {hero} who {goal} {place}.",
    "Tell me a bedtime story about a {adjective} {hero} {place}.",
    "Write a story for children about a {hero} who {goal}.",
    "Please tell a short tale of a {adjective} {hero} who {goal} {place}.",
    "Tell me a story about a {hero} {place}.",
    "Tell me a story about a {hero}.",
)
TEMPLATES: dict[Kind, tuple[str, ...]] = {
    "story": STORY_TEMPLATES,
    "explain": (
        "What can you tell me about {topic}?",
        "Explain {topic} in simple words.",
        "Tell me about {topic}.",
        "Why is it good to know about {topic}?",
        "Give me three facts about {topic}.",
        "Write a short paragraph about {topic}.",
        "Explain {topic} to a child.",
        "What is interesting about {topic}?",
    ),
    "tips": (
        "Give me three tips for {topic}.",
        "How do I get better at {topic}?",
        "What should I know about {topic}?",
        "Write a short guide to {topic}.",
        "Give me some advice on {topic}.",
        "I want to start {topic}. Where do I begin?",
    ),
    "describe": (
        "Describe {topic}.",
        "Write two or three sentences about {topic}.",
        "Write a short poem about {topic}.",
        "Paint a picture of {topic} in words.",
        "What does {topic} look like?",
    ),
}
FOLLOW_UPS: dict[Kind, tuple[str, ...]] = {
    "story": ("What happened next?", "Tell me more.", "How did the story end?", ONE_SENTENCE),
    "explain": (
        "Tell me more.",
        "Give me one more fact.",
        "Can you give an example?",
        ONE_SENTENCE,
    ),
    "tips": ("Give me one more tip.", "Tell me more.", "Which tip matters most?", ONE_SENTENCE),
    "describe": ("Tell me more.", "What can you hear there?", ONE_SENTENCE),
}
KIND_SHARES: dict[Kind, float] = {"story": 0.5, "explain": 0.25, "tips": 0.16, "describe": 0.09}


@dataclass(frozen=True)
class WordSplit:
    """The nouns of one side of the train / held-out split; the rest is shared."""

    heroes: tuple[str, ...]
    topics: tuple[str, ...]
    activities: tuple[str, ...]
    objects: tuple[str, ...]


TRAIN = WordSplit(words.HEROES, words.TOPICS, words.ACTIVITIES, words.OBJECTS)
HELD = WordSplit(words.HELD_HEROES, words.HELD_TOPICS, words.HELD_ACTIVITIES, words.HELD_OBJECTS)


@dataclass(frozen=True)
class Prompt:
    """One request, the word that a faithful reply mentions, and a question to go on with."""

    prompt: str
    keyword: str
    kind: Kind
    follow_up: str


def with_articles(text: str) -> str:
    """`a` before a vowel sound becomes `an`; words that only look like one are left alone."""
    return re.sub(r"\b([Aa]) (?=[aeiou])(?!uni|eu|use|usu|one\b|once\b)", r"\1n ", text)


def entry_and_keyword(entry: str) -> tuple[str, str]:
    """A word-list entry without its mark, and its keyword (the last word unless marked)."""
    text, _, keyword = entry.partition("|")
    return text.strip(), keyword.strip() or text.split()[-1]


def draw_prompt(rng: random.Random, split: WordSplit) -> Prompt:
    """One prompt, drawn from the nouns of one side of the split."""
    (kind,) = rng.choices(tuple(KIND_SHARES), tuple(KIND_SHARES.values()))
    pool = {
        "story": split.heroes,
        "explain": split.topics,
        "tips": split.activities,
        "describe": split.objects,
    }[kind]
    noun, keyword = entry_and_keyword(rng.choice(pool))
    text = rng.choice(TEMPLATES[kind]).format(
        hero=noun,
        topic=noun,
        adjective=rng.choice(words.ADJECTIVES),
        goal=rng.choice(words.GOALS),
        place=rng.choice(words.PLACES),
    )
    return Prompt(with_articles(text), keyword, kind, rng.choice(FOLLOW_UPS[kind]))


def train_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` training prompts, repeats included: the teacher answers a repeat differently."""
    rng = random.Random(f"train {seed}")
    return [draw_prompt(rng, TRAIN) for _ in range(count)]


def held_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` distinct prompts about nouns that training never names."""
    rng = random.Random(f"held {seed}")
    found: dict[str, Prompt] = {}
    while len(found) < count:
        prompt = draw_prompt(rng, HELD)
        found.setdefault(prompt.prompt, prompt)
    return list(found.values())


def known_prompts(work: Path, count: int, seed: int = 1) -> list[Prompt]:
    """`count` distinct prompts made of training's own words, none of them a training prompt."""
    used = {prompt.prompt for prompt in read_prompts(work)}
    rng = random.Random(f"fresh {seed}")
    found: dict[str, Prompt] = {}
    while len(found) < count:
        prompt = draw_prompt(rng, TRAIN)
        if prompt.prompt not in used:
            found.setdefault(prompt.prompt, prompt)
    return list(found.values())


def write_measured_prompts(work: Path, path: Path, count: int = 128) -> None:
    """Write the prompts that the shipped pair is measured on: `count` with known words, then
    `count` with new ones, spread over the held-out prompts in `work`."""
    known = [asdict(prompt) for prompt in known_prompts(work, count)]
    held = json.loads((work / HELD_FILE).read_text())
    new = [held[i * len(held) // count] for i in range(count)]
    entries = [
        {"prompt": e["prompt"], "keyword": e["keyword"], "kind": e["kind"], "words": which}
        for which, part in (("known", known), ("new", new))
        for e in part
    ]
    path.write_text(json.dumps(entries, indent=1) + "\n")


def write_prompts(
    work: Path, seed: int = 1, *, train_count: int = 262_144, held_count: int = 1_024
) -> None:
    """Write the training prompts (JSON lines, gzip) and the held-out ones (JSON) into `work`."""
    work.mkdir(parents=True, exist_ok=True)
    # A fixed time stamp keeps the file the same, byte for byte, for the same seed.
    with gzip.GzipFile(work / PROMPTS_FILE, "wb", mtime=0) as file:
        for prompt in train_prompts(train_count, seed):
            file.write(json.dumps(asdict(prompt)).encode() + b"\n")
    held = [
        {"prompt": p.prompt, "keyword": p.keyword, "kind": p.kind}
        for p in held_prompts(held_count, seed)
    ]
    (work / HELD_FILE).write_text(json.dumps(held, indent=1) + "\n")


def read_prompts(work: Path) -> list[Prompt]:
    """The training prompts in the order in which the teacher answers them."""
    return list(_read_lines(work / PROMPTS_FILE))


def _read_lines(path: Path) -> Iterator[Prompt]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield Prompt(**json.loads(line))
