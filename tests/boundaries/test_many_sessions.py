"""Fifty sessions step by step beside each other, a third of them broken off: none shows in another."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import TargetError
from lse_mlx.target.model import Target
from tests.boundaries.asked import Asked
from tests.boundaries.drafts import guessing
from tests.boundaries.fast_tables import FastTarget, ReadingDrafter, features_of
from tests.boundaries.one_token import Row, one_token
from tests.boundaries.replies import Given, steps_of
from tests.boundaries.stepwise import TAPS, Stepwise
from tests.decode.runs import Watched
from tests.states import assert_same
from tests.tiny_models import VOCAB, RecordingDrafter, on_cpu

SESSIONS = 50
WORD = 5
"""Tokens of a code word."""


@dataclass(frozen=True)
class Echo(FastTarget):
    """Says again what followed the last token when it was read before, as models do with a secret."""

    def logits(self, tokens: list[int]) -> Row:
        row = super().logits(tokens)
        for at in range(len(tokens) - 2, -1, -1):
            if tokens[at] == tokens[-1]:
                row[tokens[at + 1]] += np.float32(12)
                break
        return row


ECHO = Echo.random(5, 80)

End = Literal["dropped", "cancelled", "failed"]


@dataclass
class Visit:
    """One caller: a session, two turns with a code word in the prompt, and where the first breaks off.

    said: what each turn gave
    """

    number: int
    target: Any
    drafter: Any
    vocab: int
    fail: bool = False
    said: list[list[int]] = field(default_factory=list)
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        watched: Any = Watched(self.target, self._before)
        self.session = Session(watched, self.drafter)

    @property
    def word(self) -> list[int]:
        drawn = np.random.default_rng([1, self.number]).permutation(self.vocab - 8)[:WORD]
        return [8 + int(t) for t in drawn]

    @property
    def end(self) -> tuple[End, int] | None:
        """How and after how many steps the first turn breaks off; None if it does not."""
        rng = np.random.default_rng([2, self.number])
        kinds: tuple[End, ...] = ("dropped", "cancelled", "failed")
        if self.number % 3:
            return None
        return kinds[self.number // 3 % 3], int(rng.integers(1, 5))

    def turns(self) -> list[Asked]:
        """The word, something else, and the first token of the word; later the same once more."""
        rng = np.random.default_rng([3, self.number])
        filler = [int(t) for t in rng.integers(0, 8, 4)]
        sampling = Sampling(0.6) if self.number % 2 else Sampling()
        first = [*self.word, *filler, self.word[0]]
        again = [*first, *filler, self.word[0]]
        return [
            Asked(first, max_tokens=10, sampling=sampling, seed=self.number),
            Asked(again, max_tokens=8, sampling=sampling, seed=self.number + 1),
        ]

    def play(self) -> Iterator[None]:
        """Both turns, step by step; the second prompt goes on from all that was said."""
        first, second = self.turns()
        yield from self._turn(first, self.end)
        grown = [*first.prompt, *self.said[0], *second.prompt[len(first.prompt) :]]
        yield from self._turn(Asked(grown, 8, sampling=second.sampling, seed=second.seed), None)

    def _turn(self, asked: Asked, end: tuple[End, int] | None) -> Iterator[None]:
        given, taken = Given(), 0

        def broken(emitted: int) -> bool:
            return end is not None and end[0] == "cancelled" and taken >= end[1]

        steps = steps_of(self.session, asked.request(prefill_rows=6, cancelled=broken), given)
        try:
            for _ in steps:
                taken += 1
                if end is not None and taken == end[1]:
                    if end[0] == "dropped":
                        steps.close()
                    self.fail = end[0] == "failed"
                yield
        except TargetError:
            assert self.session.tokens == []
        self.said.append(given.ids)

    def _before(self, name: str, tokens: list[int]) -> None:
        if self.fail:
            self.fail = False
            raise RuntimeError("injected")


def on_tables() -> list[Visit]:
    drafter = ReadingDrafter(guessing(3, 80))
    return [Visit(n, ECHO, drafter, 80) for n in range(SESSIONS)]


def on_the_hybrid(target: Target) -> list[Visit]:
    def script(position: int, drafts: int) -> list[int]:
        return [(position * 7 + n + drafts) % VOCAB for n in range(position % 4)]

    drafter = RecordingDrafter(ScriptedDrafter(script, taps=TAPS))
    return [Visit(n, target, drafter, VOCAB) for n in range(SESSIONS)]


def alone(visits: list[Visit]) -> list[Visit]:
    for visit in visits:
        for _ in visit.play():
            pass
    return visits


def beside_each_other(visits: list[Visit], order: str) -> list[Visit]:
    """A step of one, then a step of another: in turn, or in an order drawn by a fixed seed."""
    rng = np.random.default_rng(0)
    playing = [visit.play() for visit in visits]
    while playing:
        chosen = list(playing) if order == "in turn" else [playing[rng.integers(len(playing))]]
        for play in chosen:
            if next(play, self_ended := object()) is self_ended:
                playing.remove(play)
    return visits


def says(ids: list[int], word: list[int]) -> bool:
    return any(ids[at : at + len(word)] == word for at in range(len(ids)))


def assert_no_word_of_another(visits: list[Visit], lone: list[Visit]) -> None:
    for mine, mine_alone in zip(visits, lone, strict=True):
        for other in visits:
            if other.number != mine.number:
                for ids, ids_alone in zip(mine.said, mine_alone.said, strict=True):
                    assert says(ids, other.word[1:]) <= says(ids_alone, other.word[1:])


def assert_nothing_shared(visits: list[Visit]) -> None:
    """No two states hold the same array, nor memory of the same array."""
    held = [visit.session.state.arrays() for visit in visits]
    for mine, theirs in combinations(held, 2):
        for a in mine:
            for b in theirs:
                assert a is not b
                if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
                    assert not np.may_share_memory(a, b)


orders = pytest.mark.parametrize("order", ["in turn", "drawn"])


@orders
def test_code_words_on_tables(order: str) -> None:
    lone, visits = alone(on_tables()), beside_each_other(on_tables(), order)
    assert [v.said for v in visits] == [v.said for v in lone]
    assert_no_word_of_another(visits, lone)
    # The test means something: these replies do give words away, each its own.
    assert sum(any(says(ids, v.word[1:]) for ids in v.said) for v in visits) > SESSIONS // 2
    for visit in visits:
        assert visit.session.state.committed == visit.session.tokens  # pyright: ignore
        assert visit.session.context.rows == features_of(visit.session.tokens).tolist()  # pyright: ignore


@pytest.fixture(scope="module")
def lone_on_the_hybrid(target: Target) -> list[Visit]:
    with on_cpu():
        return alone(on_the_hybrid(target))


@orders
def test_code_words_on_the_hybrid(
    target: Target, stepwise: Stepwise, lone_on_the_hybrid: list[Visit], order: str
) -> None:
    visits = beside_each_other(on_the_hybrid(target), order)
    assert [v.said for v in visits] == [v.said for v in lone_on_the_hybrid]
    assert_no_word_of_another(visits, lone_on_the_hybrid)
    assert_nothing_shared(visits)
    for visit, other in zip(visits, lone_on_the_hybrid, strict=True):
        assert visit.session.tokens == other.session.tokens
        assert_same(visit.session.state, other.session.state)
        if visit.number % 5 == 0:
            stepwise.assert_holds(visit.session, visit.session.tokens)


def test_what_was_said_alone_is_one_token_decoding() -> None:
    for visit in alone(on_tables()):
        if visit.turns()[0].sampling.temperature:
            continue
        asked = visit.turns()[0]
        answer = one_token(ECHO.logits, asked)
        assert visit.said[0] == answer.ids[: len(visit.said[0])]
        assert visit.end is not None or visit.said[0] == answer.ids


def seeded(seed: int) -> Iterator[list[int]]:
    session: Any = Session(ECHO, ReadingDrafter(guessing(3, 80)))  # pyright: ignore
    given = Given()
    asked = Asked([8, 9, 10], max_tokens=14, sampling=Sampling(1.3), seed=seed)
    for _ in steps_of(session, asked.request(), given):
        mx.random.seed(seed)
        np.random.default_rng().random()
        yield given.ids


def test_a_seed_gives_the_same_alone_and_beside_others() -> None:
    def last(steps: Iterator[list[int]]) -> list[int]:
        *_, ids = steps
        return ids

    expected = {seed: last(seeded(seed)) for seed in range(20)}
    assert len({tuple(ids) for ids in expected.values()}) == 20
    seeds = [*range(20), *range(20)]
    playing = {n: seeded(seed) for n, seed in enumerate(seeds)}
    found: dict[int, list[int]] = {}
    while playing:
        for n in list(playing):
            ids = next(playing[n], None)
            if ids is None:
                del playing[n]
            else:
                found[n] = ids
    assert [found[n] for n in range(40)] == [expected[seed] for seed in seeds]
