"""Speculative sampling written out slowly: which tokens a drafter's proposals and a seed lead to."""

from collections.abc import Callable, Iterator

from lse_mlx.decode.randomness import Streams
from tests.boundaries.asked import Asked
from tests.boundaries.one_token import CLOSE, Chosen, LogitsOf, Row, after_rules, chances, draw
from tests.decode.definition import Undecided

Drafted = list[tuple[int, list[tuple[int, float]]]]
"""Drafted tokens, each with the chances it was drawn from."""
Draft = Callable[[list[int], int, Callable[[], float]], Drafted]
"""(every token up to the anchor, how many drafts came before, the draft stream) -> a proposal."""


def walked(logits_of: LogitsOf, asked: Asked, draft: Draft) -> Iterator[Chosen]:
    """The tokens of a speculative reply, one after the other, without an end (Leviathan et al. 2023).

    A drafted x stays with probability min(1, p(x) / q(x)); in place of a rejected one comes a draw
    from max(p - q, 0); behind a proposal that stays whole, a draw from p. Each row takes one uniform
    to accept with and one to draw with. Limits have no part in it.
    """
    streams = Streams.from_seed(asked.seed)
    history, drafts = list(asked.prompt), 0

    def row_after(tokens: list[int]) -> tuple[Row, list[tuple[int, float]]]:
        row = after_rules(logits_of(tokens), tokens, len(tokens) - len(asked.prompt), asked)
        return row, chances(row, asked)

    row, p = row_after(history)
    token = draw(p, streams.residual())
    while True:
        yield Chosen(token, row)
        history.append(token)
        proposal = draft(list(history), drafts, streams.draft)
        drafts += 1
        for x, q in proposal:
            row, p = row_after(history)
            u, r = streams.accept(), streams.residual()
            ratio = dict(p).get(x, 0.0) / dict(q)[x]
            if abs(u - ratio) < CLOSE:
                raise Undecided
            token = x
            if u >= ratio:
                token = draw(_left(p, q), r)
                break
            yield Chosen(token, row)
            history.append(token)
        else:
            row, p = row_after(history)
            streams.accept()
            token = draw(p, streams.residual())


def _left(p: list[tuple[int, float]], q: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """max(p - q, 0), in p's order, not normalized."""
    minus = dict(q)
    left = [(t, max(chance - minus.get(t, 0.0), 0.0)) for t, chance in p]
    return [(t, chance) for t, chance in left if chance > 0] or p
