"""Choosing the target's best own replies, and the batches it is trained on with them."""

from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from scripts.demo_pair_training import distill, self_talk  # noqa: E402
from scripts.demo_pair_training.data import Chats, RowFeed  # noqa: E402
from scripts.demo_pair_training.decoding import END, Rollouts  # noqa: E402
from scripts.demo_pair_training.polish import Buffers, Talks  # noqa: E402
from scripts.demo_pair_training.prompts import Prompt  # noqa: E402
from scripts.demo_pair_training.self_talk import Candidate, PromptList, TalkSettings  # noqa: E402
from scripts.demo_pair_training.tokenizer import opening, train_tokenizer  # noqa: E402

CPU = torch.device("cpu")
FOX = Prompt("Tell me a story about a lazy fox who plants a seed.", "fox", "story", "")
GOOD = "A fox dug a deep hole and put one small seed in it."


def candidate(group: int, score: float, head: tuple[int, ...] = (1, 2, 3, 4)) -> Candidate:
    return Candidate(group, score, np.zeros(5, np.uint16), head)


def test_faithfulness_counts_the_words_of_the_prompt():
    assert self_talk.content_words(FOX.prompt) == ["laz", "fox", "plan", "see"]
    assert self_talk.faithfulness("A fox slept.", FOX) == pytest.approx(0.25)
    assert self_talk.faithfulness("The lazy fox has planted seeds.", FOX) == 1.0
    assert self_talk.faithfulness("A lazy wolf planted a seed.", FOX) is None


def test_best_of_every_group():
    found = [candidate(0, 0.1), candidate(0, 0.3), candidate(0, 0.2), candidate(1, -1.0)]
    kept = self_talk.best_of(found, 2)
    assert sorted((c.group, c.score) for c in kept) == [(0, 0.2), (0, 0.3), (1, -1.0)]


def test_no_opening_is_more_common_than_it_should_be():
    common, rare = (1, 1, 1, 1), (2, 2, 2, 2)
    found = [candidate(i, i / 100, common if i < 80 else rare) for i in range(100)]
    settings = TalkSettings(opening_excess=1.0, opening_floor=0.1)
    kept = self_talk.with_fair_openings(found, {common: 0.4}, settings)
    heads = [c.opening for c in kept]
    assert heads.count(common) == 50 and heads.count(rare) == 10
    assert min(c.score for c in kept if c.opening == common) == 0.3  # the worst have gone


def test_only_clean_finished_replies_on_the_topic_are_candidates():
    texts = [GOOD, GOOD.replace("fox", "wolf"), "A fox a fox a fox a fox a fox a fox.", GOOD]
    tokenizer = train_tokenizer([opening(FOX.prompt), *texts], vocabulary=300)
    prompts = PromptList.build([FOX], tokenizer, tokenizer.encode("\n").ids[0], CPU)
    asked = prompts.rows.tokens[0].tolist()
    tokens = torch.full((4, 256), END)
    turn = torch.zeros(4, 256, dtype=torch.int8)
    for row, text in enumerate(texts):
        reply = tokenizer.encode(text).ids + [END] * (row < 3)  # the last one is unfinished
        tokens[row, : len(asked) + len(reply)] = torch.tensor(asked + reply)
        turn[row, len(asked) : len(asked) + len(reply)] = 1
    out = Rollouts(tokens, turn, torch.full((4, 256), 0.25))
    choice = torch.zeros(4, 1, dtype=torch.int64)
    settings = TalkSettings(samples=4, turns=1, shortest=4, longest=200, distinct=0.9)
    (found,) = self_talk.candidates(out, choice, prompts, tokenizer, settings)
    assert tokenizer.decode(found.tokens.tolist()).endswith(GOOD)
    assert found.tokens[-1] == END and found.group == 0
    assert found.score == pytest.approx(settings.faithful * 0.5 - 0.25)


def test_a_batch_holds_every_kind_of_row():
    def feed(token: int) -> RowFeed:
        lengths = np.full(40, 9)
        return RowFeed(Chats(np.full(360, token), lengths), 16, 9, CPU, 0)

    talks = torch.full((3, 17), 7)
    marks = torch.zeros(3, 17)
    marks[:, 5] = 1
    loops = Talks(talks, marks, marks > 0, torch.ones(3), 3)
    parts = distill.Parts(feed(4), feed(5), feed(6), loops)
    s = distill.DistillSettings(rows=8, renamed_rows=2, own_rows=3, unlearned_rows=1, width=16)
    buffers = Buffers.empty(8, 16, CPU)
    distill.make_loader(parts, buffers, s, torch.Generator())()
    assert buffers.rows[:, 0].tolist() == [4, 4, 5, 5, 6, 6, 6, 7]
    assert buffers.learn[:, 0].tolist() == [1] * 7 + [0]
    assert buffers.unlearn.sum() == 1 and buffers.unlearn[7, 4] == 1


def test_the_rate_falls_along_one_line_over_all_rounds():
    s = distill.DistillSettings(rounds=3)
    rounds = [distill._round_schedule(s, i) for i in range(3)]
    assert rounds[0].peak == s.peak
    for before, after in pairwise(rounds):
        assert before.peak * before.floor == pytest.approx(after.peak)
    assert rounds[-1].peak * rounds[-1].floor == pytest.approx(s.peak * s.floor)
