"""A whole request decoded one token at a time, slowly, straight from what each rule says.

Nothing here calls the decode loop, its rules, its stops or its text. What it shares with them is
named: the settings of a request, and the uniform streams of a seed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lse_mlx.decode.randomness import Streams
from tests.boundaries.asked import Asked
from tests.boundaries.languages import Language
from tests.decode.definition import Undecided, probabilities

Row = NDArray[np.float32]
LogitsOf = Callable[[list[int]], Row]
"""The target: the logits, fp32 [vocab], of the token after a sequence."""

FINISH = {
    "stop_token": "stop",
    "stop_string": "stop",
    "max_tokens": "length",
    "context_full": "length",
    "cancelled": "cancelled",
}
CLOSE = 1e-9
"""A uniform nearer than this to the border of two tokens falls on a side that rounding decides."""


@dataclass(frozen=True)
class Chosen:
    """A token, and the row of logits after all rules that it was chosen from."""

    token: int
    row: Row

    def logprob(self, top: int) -> tuple[float, list[tuple[int, float]]]:
        """log softmax of the token, and the `top` likeliest with theirs, lowest id first of equals."""
        best = float(self.row.max())
        total = math.log(math.fsum(math.exp(float(x) - best) for x in self.row))
        every = [float(x) - best - total for x in self.row]
        ranked = sorted(range(len(every)), key=lambda t: (-every[t], t))[:top]
        return every[self.token], [(t, every[t]) for t in ranked if math.isfinite(every[t])]


@dataclass(frozen=True)
class Answer:
    """A finished reply. `held` counts the tokens of prompt and reply that the target has read."""

    chosen: list[Chosen]
    text: str
    reason: str
    stop_string: str | None
    held: int

    @property
    def ids(self) -> list[int]:
        return [c.token for c in self.chosen]

    @property
    def finish(self) -> str:
        return FINISH[self.reason]


def after_rules(row: Row, history: list[int], emitted: int, asked: Asked) -> Row:
    """Bias, repetition, presence and frequency in that order, then bans of end tokens; in fp32.

    history: every token before this one, the prompt's too; emitted: how many of them are the reply's
    """
    row = row.astype(np.float32)
    for token, value in asked.logit_bias.items():
        row[token] += np.float32(value)
    for token in set(history[-asked.repetition_window :]):
        factor = np.float32(asked.repetition)
        row[token] = row[token] * factor if row[token] < 0 else row[token] / factor
    for token in set(history[-asked.presence_window :]):
        row[token] -= np.float32(asked.presence)
    for token in history[-asked.frequency_window :]:
        row[token] -= np.float32(asked.frequency)
    ends = sorted(asked.stop_tokens)
    if asked.end_tokens == "banned" or emitted < asked.min_tokens:
        row[ends] = -np.inf
    if asked.end_tokens == "required" and emitted == asked.most - 1:
        row[[t for t in range(len(row)) if t not in asked.stop_tokens]] = -np.inf
    return row


def chances(row: Row, asked: Asked) -> list[tuple[int, float]]:
    """Tokens with their probabilities, in the order that a uniform runs through them.

    That is by rank where the settings cut by rank, else by id.
    """
    sampling = asked.sampling
    found = probabilities([float(x) for x in row], sampling)
    by_rank = 0 < sampling.top_k < len(row) or sampling.top_p < 1
    return list(found.items()) if by_rank else sorted(found.items())


def draw(chances: Sequence[tuple[int, float]], u: float) -> int:
    """The token whose stretch of [0, 1), laid end to end in this order, holds `u`."""
    total, below = math.fsum(p for _, p in chances), 0.0
    for token, p in chances:
        below += p / total
        if len(chances) > 1 and abs(u - below) < CLOSE:
            raise Undecided
        if u < below:
            return token
    return chances[-1][0]


def plain(logits_of: LogitsOf, asked: Asked) -> Iterator[Chosen]:
    """The tokens that the target alone chooses, one after the other, without an end."""
    history, uniform = list(asked.prompt), Streams.from_seed(asked.seed).residual
    while True:
        emitted = len(history) - len(asked.prompt)
        row = after_rules(logits_of(history), history, emitted, asked)
        token = draw(chances(row, asked), uniform())
        yield Chosen(token, row)
        history.append(token)


def until_the_end(chosen: Iterator[Chosen], asked: Asked, language: Language | None) -> Answer:
    """Take tokens until the first end, in the documented order of ends at each token."""
    reply, held = [], len(asked.prompt)
    if asked.cancel_at == 0:
        return Answer([], "", "cancelled", None, 0)
    for one in chosen:
        if one.token in asked.stop_tokens:
            return _ended(reply, "stop_token", held, asked, language)
        reply.append(one)
        found = stop_after([c.token for c in reply], asked, language)
        if found is not None:
            return Answer(reply, *found, held=held + len(reply) - 1)
        if asked.cancel_at == len(reply):
            return _ended(reply, "cancelled", held - 1, asked, language)
        if len(reply) == asked.max_tokens:
            return _ended(reply, "max_tokens", held - 1, asked, language)
        if len(reply) == asked.room:
            return _ended(reply, "context_full", held - 1, asked, language)
    raise AssertionError("the tokens ran out")


def one_token(logits_of: LogitsOf, asked: Asked, language: Language | None = None) -> Answer:
    """The whole request, by the target alone."""
    return until_the_end(plain(logits_of, asked), asked, language)


def stop_after(
    ids: list[int], asked: Asked, language: Language | None
) -> tuple[str, str, str] | None:
    """(text before it, "stop_string", the string) if the last of `ids` completes a stop string."""
    if language is None:
        return None
    before, now = language.settled(ids[:-1]), language.settled(ids)
    return None if len(ids) < asked.min_tokens else _first_stop(before, now, asked)


def _first_stop(before: str, now: str, asked: Asked) -> tuple[str, str, str] | None:
    """The stop string that ends first in what `now` adds to `before`; of several the longest."""
    assert now.startswith(before)
    for end in range(len(before) + 1, len(now) + 1):
        ending = [stop for stop in asked.stops if now[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return now[: end - len(longest)], "stop_string", longest
    return None


def _ended(
    reply: list[Chosen], reason: str, held: int, asked: Asked, language: Language | None
) -> Answer:
    """An end that is no stop string, unless the text that becomes final with it completes one."""
    ids, held = [c.token for c in reply], held + len(reply)
    if language is None:
        return Answer(reply, "", reason, None, held)
    found = None
    if len(ids) >= asked.min_tokens:
        found = _first_stop(language.settled(ids), language.whole(ids), asked)
    text, reason, stop = found or (language.whole(ids), reason, None)
    return Answer(reply, text, reason, stop, held)
