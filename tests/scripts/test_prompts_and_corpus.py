"""The demo pair's prompts, the cleaning of teacher replies, the tokenizer and the corpus."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from scripts.demo_pair_training import word_lists as words
from scripts.demo_pair_training.cleaning import (
    Drop,
    Rejected,
    clean_follow_up,
    clean_reply,
    cut_after_sentence,
    distinct_share,
    first_sentence,
    keyword_pattern,
    mentions,
)
from scripts.demo_pair_training.corpus import (
    Chat,
    build_corpus,
    encode_chats,
    gather_chats,
    pad_rows,
    split_chats,
)
from scripts.demo_pair_training.prompts import (
    HELD,
    ONE_SENTENCE,
    TRAIN,
    Prompt,
    entry_and_keyword,
    held_prompts,
    read_prompts,
    train_prompts,
    with_articles,
    write_prompts,
)
from scripts.demo_pair_training.shards import ReplyBatch, pack_shards, write_batch
from scripts.demo_pair_training.teacher_files import TOKENIZER
from scripts.demo_pair_training.tokenizer import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    chat_pieces,
    opening,
    save_tokenizer,
    train_tokenizer,
)

GOOD = "The little fox found a key under a stone. She ran home and opened the old blue door."
ODD_STRINGS = [
    "",
    " ",
    "  two spaces first",
    "one last ",
    "\n\nlines\n",
    "\tx\r\n",
    "1234 and 5.6",
    "caf\u00e9 \u2014 \u732b \U0001f98a",
    'it\'s, "so" (he) said...',
    "a" * 50,
]


# Prompts


def _nouns(split) -> list[str]:
    return [*split.heroes, *split.topics, *split.activities, *split.objects]


def test_no_held_out_noun_occurs_in_a_training_prompt():
    text = "\n".join({prompt.prompt for prompt in train_prompts(60_000, seed=1)})
    for entry in _nouns(HELD):
        noun, keyword = entry_and_keyword(entry)
        assert not re.search(rf"\b{noun}\b", text)
        assert not mentions(text, keyword), keyword
    assert not set(_nouns(HELD)) & set(_nouns(TRAIN))


def test_lists_are_large_enough_and_without_repeats():
    sizes = {"heroes": 150, "topics": 180, "activities": 65, "objects": 28}
    for name, least in sizes.items():
        entries = getattr(TRAIN, name)
        assert len(entries) >= least
        assert len(set(entries)) == len(entries)
    held = [len(HELD.heroes), len(HELD.topics), len(HELD.activities), len(HELD.objects)]
    assert held == [10, 15, 8, 4]


def test_held_lists_do_not_repeat_training_words():
    keywords = {entry_and_keyword(entry)[1] for entry in _nouns(HELD)}
    assert not keywords & {entry_and_keyword(entry)[1] for entry in _nouns(TRAIN)}
    assert len(words.ADJECTIVES) == len(set(words.ADJECTIVES))


def test_every_prompt_names_its_keyword():
    for prompt in train_prompts(5_000, seed=3) + held_prompts(640, seed=3):
        assert mentions(prompt.prompt, prompt.keyword), prompt


def test_held_prompts_are_distinct_and_the_seed_decides():
    held = held_prompts(1_024, seed=1)
    assert len({prompt.prompt for prompt in held}) == 1_024
    assert held == held_prompts(1_024, seed=1)
    assert train_prompts(50, seed=1) != train_prompts(50, seed=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a old owl", "an old owl"),
        ("A elephant and a unicorn", "An elephant and a unicorn"),
        ("about a astronaut who plants a seed", "about an astronaut who plants a seed"),
        ("a old island in a hour", "an old island in a hour"),
        ("a useful one, a one", "a useful one, a one"),
        ("panda or", "panda or"),
    ],
)
def test_articles(text: str, expected: str):
    assert with_articles(text) == expected


def test_no_prompt_has_a_wrong_article():
    for prompt in train_prompts(20_000, seed=2) + held_prompts(640, seed=2):
        before = prompt.prompt.lower().split()
        for article, word in pairwise(before):
            vowel = word[0] in "aeiou" and word.strip(".") != "unicorn"
            assert not (article == "a" and vowel), prompt
            assert not (article == "an" and not vowel), prompt


def test_prompt_files_round_trip_and_are_the_same_each_time(tmp_path: Path):
    for folder in (tmp_path / "a", tmp_path / "b"):
        write_prompts(folder, seed=4, train_count=100, held_count=30)
    assert read_prompts(tmp_path / "a") == train_prompts(100, seed=4)
    for name in ("prompts.jsonl.gz", "held_prompts.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    held = json.loads((tmp_path / "a" / "held_prompts.json").read_text())
    assert set(held[0]) == {"prompt", "keyword", "kind"}


# Cleaning


def _reason(raw: str, ended: bool = True, keyword: str = "") -> Drop:
    with pytest.raises(Rejected) as caught:
        clean_reply(raw, ended, keyword)
    return caught.value.reason


def test_typographic_marks_become_ascii():
    raw = "\u201cI\u2019m here\u201d, said the fox\u2014and it was so\u2026 Then it went home."
    assert clean_reply(raw, True) == (
        '"I\'m here", said the fox - and it was so... Then it went home.'
    )


def test_each_rule_bites():
    assert _reason("Short.") == Drop.SHORT
    assert _reason(GOOD + " \u732b") == Drop.NON_ASCII
    assert _reason("no end in this long reply that runs on and on", False) == Drop.NO_SENTENCE
    assert _reason("the fox ran and ran. " * 10) == Drop.REPEATS
    assert _reason(GOOD, keyword="otter") == Drop.OFF_TOPIC
    assert clean_reply(GOOD, True, "fox") == GOOD


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("It rained. Then it", "It rained."),
        ('He said "Go!" and she', 'He said "Go!"'),
        ('It rained. He said "Wait. I', "It rained."),
        ("1. Eat well.\n2. Sleep.\n3. Wal", "1. Eat well.\n2. Sleep."),
        ("1. Eat well.\n2.", "1. Eat well."),
        ("She met Mr. Fox. He was Mr. ", "She met Mr. Fox."),
        ("All good. **Bold. words", "All good."),
        ("no end", ""),
    ],
)
def test_cut_after_the_last_full_sentence(text: str, kept: str):
    assert cut_after_sentence(text) == kept


def test_a_finished_reply_is_not_cut():
    raw = "Here is a list that ends without a mark:\n- one apple\n- two pears"
    assert clean_reply(raw, ended=True) == raw
    assert _reason(raw, ended=False) == Drop.NO_SENTENCE


def test_distinct_share():
    assert distinct_share("one two three") == 1.0
    assert distinct_share("a b c d e f g h i") == 1.0
    assert distinct_share("a b c d " * 4) == pytest.approx(4 / 13)
    assert distinct_share("\n".join(f"{i}. Use a scarf." for i in range(9))) < 0.2


@pytest.mark.parametrize(
    ("keyword", "yes", "no"),
    [
        ("ant", ["An ant ran", "ants"], ["anthem", "giant", "pants"]),
        ("bees", ["A bee flew", "bees"], ["been", "beer"]),
        ("wolves", ["a wolf", "Wolves"], ["wool"]),
        ("teeth", ["one tooth"], ["the"]),
        ("running", ["run daily", "runners"], ["ruin", "prune"]),
        ("baking", ["bake", "baked"], ["back"]),
        ("butterflies", ["a butterfly"], ["butter"]),
        ("Lily", ["Lily ran"], ["a lily grew", "Lilyana"]),
        ("Milky Way", ["the Milky Way is"], ["milky ways"]),
        ("black hole", ["black holes are"], ["a hole"]),
    ],
)
def test_mentions(keyword: str, yes: list[str], no: list[str]):
    for text in yes:
        assert mentions(text, keyword), (text, keyword_pattern(keyword).pattern)
    for text in no:
        assert not mentions(text, keyword), (text, keyword_pattern(keyword).pattern)


def test_follow_up_rules():
    second = "The next day she met a bear. They shared bread and honey by the river."
    assert clean_follow_up(second, True, GOOD, one_sentence=False) == second
    with pytest.raises(Rejected, match=Drop.ECHO):
        clean_follow_up(GOOD, True, GOOD, one_sentence=False)
    one = clean_follow_up(second, False, GOOD, one_sentence=True)
    assert one == "The next day she met a bear."
    assert first_sentence("Dr. Owl sang. Then") == "Dr. Owl sang."


# Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [f"user\n{p.prompt}" for p in train_prompts(400, seed=1)]
    return train_tokenizer([*texts, f"assistant\n{GOOD}"], vocabulary=600)


def test_special_tokens_have_the_first_ids_and_digits_stand_alone(tokenizer: Tokenizer):
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]


@pytest.mark.parametrize("text", ODD_STRINGS)
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str, tmp_path: Path):
    save_tokenizer(tokenizer, tmp_path)
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for reader in (tokenizer, loaded):
        assert reader.decode(reader.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ODD_STRINGS)
def test_transformers_reads_the_folder_and_round_trips(
    tokenizer: Tokenizer, text: str, tmp_path: Path
):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.eos_token_id, loaded.pad_token_id) == (2, 0)


def test_chat_template_gives_the_text_of_the_corpus():
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    turns = [("Tell me about rain.", GOOD), ("Tell me more.", "It falls.")]
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    pieces = chat_pieces(turns)
    whole = "".join(part for pair in pieces for part in pair)
    assert template.render(messages=messages) == whole
    asked = template.render(messages=messages[:3], add_generation_prompt=True)
    assert asked == "".join(pieces[0]) + pieces[1][0]
    assert template.render(messages=messages[:1], add_generation_prompt=True) == opening(
        turns[0][0]
    )
    system = [{"role": "system", "content": "Be kind."}, *messages[:1]]
    assert template.render(messages=system).startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    )


# Corpus


def _prompt(i: int, follow_up: str = "Tell me more.") -> Prompt:
    return Prompt(f"Tell me about rain, number {i}.", "rain", "explain", follow_up)


def test_spans_cover_the_replies_and_rows_equal_whole_encodings(tokenizer: Tokenizer):
    chats = [
        Chat(_prompt(0), ["Rain falls."]),
        Chat(_prompt(1), ['"Rain" is wet.', "- It rains.\n- It pours."]),
        Chat(_prompt(2), ["1. Rain comes from clouds."]),
    ]
    rows = encode_chats(chats, tokenizer)
    starts = np.cumsum(rows.len) - rows.len
    assert rows.cat.dtype == np.uint16
    assert len(rows.cat) == rows.len.sum()
    assert rows.span_chat.tolist() == [0, 1, 1, 2]
    for chat, start, length in zip(chats, starts, rows.len, strict=True):
        text = "".join(part for pair in chat_pieces(chat.turns) for part in pair)
        assert rows.cat[start : start + length].tolist() == tokenizer.encode(text).ids
    replies = [reply for chat in chats for reply in chat.replies]
    for i, reply in enumerate(replies):
        start = starts[rows.span_chat[i]]
        span = rows.cat[start + rows.span_start[i] : start + rows.span_end[i]]
        text = tokenizer.decode(span.tolist(), skip_special_tokens=False)
        assert text == f"{reply}<|im_end|>"


def test_split_keeps_chats_apart_single_turns_first():
    chats = [Chat(_prompt(i), ["x"] * (1 + i % 2)) for i in range(200)]
    train, held = split_chats(chats, seed=0)
    turns = [len(chat.replies) for chat in held]
    assert turns == sorted(turns)
    assert set(turns) == {1, 2}
    assert len(train) + len(held) == len(chats)
    assert not {c.prompt.prompt for c in train} & {c.prompt.prompt for c in held}


def test_gather_counts_what_it_drops(tokenizer: Tokenizer):
    good = "Rain falls from the clouds in small drops. It waters the fields and the woods."
    more = "After that the sun comes out again and all the birds begin to sing a song."
    prompts = [_prompt(0), _prompt(1), _prompt(2), _prompt(3, ONE_SENTENCE)]

    def batch(turn: int, replies: dict[int, str]) -> ReplyBatch:
        tokens = [np.array(tokenizer.encode(t).ids, np.uint16) for t in replies.values()]
        return ReplyBatch(turn, np.array(list(replies), np.int32), tokens)

    end = "<|im_end|>"
    firsts = batch(1, {0: good + end, 1: good + end, 2: GOOD + end, 3: f"{good} {more}{end}"})
    seconds = batch(2, {0: more + end, 1: more + end, 3: more + " And th"})
    gathered = gather_chats(prompts, [firsts, seconds], tokenizer)
    assert gathered.outcomes[1] == {"kept": 2, str(Drop.DUPLICATE): 1, str(Drop.OFF_TOPIC): 1}
    # Chat 3 wants one sentence, which here is the whole reply of chat 0.
    assert gathered.outcomes[2] == {"kept": 1, str(Drop.NO_FIRST): 1, str(Drop.DUPLICATE): 1}
    assert gathered.chats[0].replies == [good, more]
    assert len(gathered.chats[3].replies) == 1


def test_pad_rows(tokenizer: Tokenizer):
    matrix, lengths = pad_rows(["one", "one two three"], tokenizer)
    assert matrix.dtype == np.uint16
    assert matrix.shape == (2, lengths.max())
    assert not matrix[0, lengths[0] :].any()


def test_build_corpus_from_shards(tmp_path: Path, tokenizer: Tokenizer):
    write_prompts(tmp_path, seed=1, train_count=120, held_count=20)
    tokenizer.save(str(tmp_path / TOKENIZER))
    prompts = read_prompts(tmp_path)
    texts = [
        f"This is reply {i} about {p.keyword}. It says a few plain words and no more.<|im_end|>"
        for i, p in enumerate(prompts)
    ]
    replies = [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch(texts)]
    batch = ReplyBatch(1, np.arange(len(prompts), dtype=np.int32), replies)
    write_batch(tmp_path / "raw", 0, batch)
    pack_shards(tmp_path / "raw", tmp_path / "samples")
    figures = build_corpus(tmp_path, tmp_path / "samples")
    out = tmp_path / "corpus"
    rows = np.load(out / "corpus.npz")
    assert figures["chats"]["train"] == len(rows["len"]) == len(rows["span_start"])
    assert figures["tokens"] == rows["len"].sum() == len(rows["cat"])
    assert len(np.load(out / "held.npz")["len"]) == figures["chats"]["held"] > 0
    rollout = np.load(out / "prompts.npz")
    assert len(rollout["train"]) == len(rollout["train_len"]) == len({p.prompt for p in prompts})
    assert len(rollout["held"]) == 20
    assert json.loads((out / "held_prompts.json").read_text())[0]["keyword"]
    assert (out / "tokenizer" / "tokenizer_config.json").is_file()
