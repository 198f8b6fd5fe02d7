"""The target's distribution straight from its definition, with plain floats, one token at a time."""

import math
from collections.abc import Sequence

from lse_mlx.decode.sampling import Sampling


class Undecided(Exception):
    """A token lies within rounding of a border, so the definition does not say which side."""


def probabilities(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """Temperature, top-k, top-p (mass before a token below top_p), min-p; tokens with a chance."""
    ranked = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    if sampling.temperature == 0:
        return {ranked[0]: 1.0}
    best = logits[ranked[0]]
    kept = ranked[: sampling.top_k] if sampling.top_k else ranked
    mass = {t: math.exp((logits[t] - best) / sampling.temperature) for t in kept}
    probs = {t: m / math.fsum(mass.values()) for t, m in mass.items()}
    if sampling.top_p < 1:
        before = [math.fsum(probs[t] for t in kept[:i]) for i in range(len(kept))]
        if any(abs(b - sampling.top_p) < 1e-12 for b in before):
            raise Undecided
        kept = [t for t, b in zip(kept, before, strict=True) if b < sampling.top_p]
    border = sampling.min_p * probs[ranked[0]]
    if any(0 < abs(probs[t] - border) < 1e-12 * border for t in kept):
        raise Undecided
    kept = [t for t in kept if probs[t] >= border]
    total = math.fsum(probs[t] for t in kept)
    return {t: probs[t] / total for t in kept if probs[t] > 0}
