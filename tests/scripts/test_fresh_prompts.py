"""The prompts and renamed chats for the target's own talks: nothing held out gets in."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from scripts.demo_pair_training import copy_words as copies
from scripts.demo_pair_training import fresh
from scripts.demo_pair_training.cleaning import mentions
from scripts.demo_pair_training.corpus import Chat, encode_chats
from scripts.demo_pair_training.data import Corpus
from scripts.demo_pair_training.prompts import (
    HELD,
    TRAIN,
    WordSplit,
    entry_and_keyword,
    read_prompts,
    write_prompts,
)
from scripts.demo_pair_training.tokenizer import save_tokenizer, train_tokenizer


def keywords(split: WordSplit) -> set[str]:
    entries = split.heroes + split.topics + split.activities + split.objects
    return {entry_and_keyword(entry)[1].lower() for entry in entries}


def test_words_to_copy_and_to_choose_by_are_not_held_out():
    rare = (copies.RARE_ANIMALS, copies.RARE_PEOPLE, copies.RARE_NAMES, copies.RARE_TOPICS)
    rare += (copies.RARE_ACTIVITIES, copies.RARE_OBJECTS)
    named = {entry_and_keyword(e)[1].lower() for part in rare for e in part}
    held, choose = keywords(HELD), keywords(fresh.CHOOSE)
    for word in held:
        assert not any(mentions(other, word) for other in named | choose), word
    assert not choose & (named | keywords(TRAIN))


def test_invented_words_are_no_held_out_words():
    rng = random.Random(0)
    made = {copies.invented_word(rng) for _ in range(5000)}
    assert len(made) > 4000
    held = keywords(HELD)
    assert not made & held and not {fresh.plural(word) for word in made} & held


@pytest.mark.parametrize(
    ("old", "new", "text", "expected"),
    [
        ("fox", "heron", "A fox met foxes. Foxy!", "A heron met herons. Foxy!"),
        ("fox", "emu", "A fox and the Fox", "An emu and the Emu"),
        ("owl", "gnome", "An owl, an old owl", "A gnome, an old gnome"),
        ("mouse", "lynx", "Mice fear a mouse.", "Lynxes fear a lynx."),
        ("bananas", "peach", "Bananas are good: eat a banana.", "Peaches are good: eat a peach."),
        ("Lily", "velka", "Lily's lily", "Velka's lily"),
    ],
)
def test_renaming(old: str, new: str, text: str, expected: str):
    assert fresh.Renaming(old, new)(text) == expected


@pytest.mark.parametrize("noun", ["fox", "cherry", "monkey", "peach", "owl", "potato"])
def test_plural_and_back(noun: str):
    assert fresh.singular(fresh.plural(noun)) == noun


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A work folder with prompts and a corpus of made-up replies."""
    write_prompts(tmp_path, train_count=1500, held_count=64)
    chats = [
        Chat(p, [f"The {p.keyword} went home. A {p.keyword} slept."])
        for p in read_prompts(tmp_path)[:200]
    ]
    folder = tmp_path / "corpus"
    texts = [f"user\n{c.prompt.prompt}\nassistant\n{c.replies[0]}" for c in chats]
    tokenizer = train_tokenizer(texts, vocabulary=400)
    save_tokenizer(tokenizer, folder / "tokenizer")
    rows = encode_chats(chats, tokenizer)
    rows.save(folder / "corpus.npz")
    rows.save(folder / "held.npz")
    held = json.loads((tmp_path / "held_prompts.json").read_text())
    (folder / "held_prompts.json").write_text(json.dumps(held))
    return tmp_path


def test_fresh_prompts_hold_nothing_that_is_measured(work: Path, monkeypatch):
    monkeypatch.setattr(fresh, "MEASURED", 50)
    corpus = Corpus.read(work / "corpus")
    sizes = fresh.FreshSettings(known=300, copied=300, choose=20, renamed=30, invented=200)
    fresh.write_fresh(corpus, work, work / "fresh", sizes)
    prompts, choose = fresh.read_fresh(work / "fresh"), fresh.read_choose(work / "fresh")
    texts = [p.prompt for p in prompts]
    stories = [p.prompt for p in prompts if p.kind == "story"]
    assert len(texts) == 600 and len(set(stories)) == len(stories)
    measured = {p.prompt for p in fresh.known_prompts(work, 50)}
    measured |= {entry["prompt"] for entry in corpus.held_prompts()}
    chosen = {p.prompt for part in choose.values() for p in part}
    assert len(choose["known"]) == len(choose["new"]) == 20
    assert not measured & (set(texts) | chosen)
    assert not chosen & set(texts)
    held = keywords(HELD)
    assert not [p for p in prompts if p.keyword.lower() in held]


def test_renamed_chats_name_the_new_thing_on_both_sides(work: Path):
    corpus = Corpus.read(work / "corpus")
    path = work / "renamed.npz"
    count = fresh.write_renamed(corpus, work, path, fresh.FreshSettings(renamed=30))
    with np.load(path) as file:
        assert 0 < len(file["len"]) == count <= 30 and file["len"].sum() == len(file["cat"])
    known = {p.prompt for p in read_prompts(work)}
    prompt = next(p for p in read_prompts(work) if p.keyword == "fox")
    text = f"<|im_start|>user\n{prompt.prompt}<|im_end|>\nThe fox ran.<|im_end|>"
    (renamed,) = fresh.renamed_texts(iter([text]), {prompt.prompt: "fox"}, random.Random(0))
    question, _, answer = renamed.removeprefix("<|im_start|>user\n").partition("<|im_end|>")
    assert question not in known and "fox" not in renamed
    new = answer.split()[1]
    assert new in question
