"""Drafts for the fast tables: points and chances, right, wrong and in between."""

from collections.abc import Sequence

import numpy as np

from lse_mlx.drafters.base import Uniform
from tests.boundaries.asked import Asked
from tests.boundaries.one_token import LogitsOf, after_rules, chances, draw
from tests.boundaries.slow_walk import Draft, Drafted


def knowing(sequence: Sequence[int], right: Sequence[int], vocab: int, depth: int = 7) -> Draft:
    """Drafts the sequence, the n-th time right for `right[n]` tokens (over and over), then wrong."""

    def draft(tokens: list[int], drafts: int, uniform: Uniform) -> Drafted:
        k = right[drafts % len(right)]
        known = sequence[len(tokens) : len(tokens) + depth]
        told = [t if i < k else (t + 1) % vocab for i, t in enumerate(known)]
        return [(t, [(t, 1.0)]) for t in told]

    return draft


def agreeing(logits_of: LogitsOf, asked: Asked, depth: int = 7) -> Draft:
    """Draws from the target's own chances after all rules, so that every proposal stays."""

    def draft(tokens: list[int], drafts: int, uniform: Uniform) -> Drafted:
        drafted: Drafted = []
        for _ in range(depth):
            path = [*tokens, *(x for x, _ in drafted)]
            row = after_rules(logits_of(path), path, len(path) - len(asked.prompt), asked)
            q = chances(row, asked)
            drafted.append((draw(q, uniform()), q))
        return drafted

    return draft


def guessing(seed: int, vocab: int, depth: int = 7, support: int = 12) -> Draft:
    """Draws each token from `support` tokens with chances that only the token before decides."""
    rng = np.random.default_rng(seed)
    listed = [rng.permutation(vocab)[:support].tolist() for _ in range(vocab)]
    weights = [rng.dirichlet([0.5] * support).tolist() for _ in range(vocab)]

    def draft(tokens: list[int], drafts: int, uniform: Uniform) -> Drafted:
        drafted: Drafted = []
        for _ in range(depth):
            last = drafted[-1][0] if drafted else tokens[-1]
            q = [(t, w) for t, w in zip(listed[last], weights[last], strict=True) if w > 0]
            drafted.append((draw(q, uniform()), q))
        return drafted

    return draft


def leaning(logits_of: LogitsOf, asked: Asked, depth: int = 7) -> Draft:
    """Draws from the target's chances before all rules, flattened: often kept, often not."""
    flat = Asked(asked.prompt, sampling=asked.sampling)

    def draft(tokens: list[int], drafts: int, uniform: Uniform) -> Drafted:
        drafted: Drafted = []
        for _ in range(depth):
            path = [*tokens, *(x for x, _ in drafted)]
            roots = [(t, p**0.7) for t, p in chances(logits_of(path), flat)]
            total = sum(w for _, w in roots)
            q = [(t, w / total) for t, w in roots]
            drafted.append((draw(q, uniform()), q))
        return drafted

    return draft
