"""What a request makes of the logits straight from its definition, one token at a time, plainly."""

import math
from collections.abc import Sequence

import numpy as np

from lse_mlx.decode.rules import Rules
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


def chosen_row(
    logits: Sequence[float], history: Sequence[int], emitted: int, rules: Rules
) -> list[float]:
    """The row that a token is chosen from, one fp32 operation after another.

    history: the prompt and the tokens emitted so far; emitted: how many of them are the reply's.
    Bias, repetition (each distinct token once), presence (each once), frequency (each occurrence),
    then end tokens.
    """
    row = [np.float32(x) for x in logits]
    wishes = rules.penalties

    def last(window: int) -> Sequence[int]:
        return history[max(0, len(history) - window) :]

    with np.errstate(over="ignore"):
        for token, bias in wishes.logit_bias.items():
            row[token] = row[token] + np.float32(bias)
        factor = np.float32(wishes.repetition)
        for token in set(last(wishes.repetition_window)):
            row[token] = row[token] * factor if row[token] < 0 else row[token] / factor
        for token in set(last(wishes.presence_window)):
            row[token] = row[token] - np.float32(wishes.presence)
        for token in last(wishes.frequency_window):
            row[token] = row[token] - np.float32(wishes.frequency)
    for token in range(len(row)):
        ends = token in rules.stop_tokens
        if ends and (rules.end_tokens == "banned" or emitted < rules.min_tokens):
            row[token] = np.float32(-math.inf)
        if not ends and rules.end_tokens == "required" and emitted + 1 == rules.most:
            row[token] = np.float32(-math.inf)
    return [float(x) for x in row]


def log_probabilities(row: Sequence[float]) -> list[float]:
    """The natural log-softmax of a row."""
    best = max(row)
    norm = math.log(math.fsum(math.exp(x - best) for x in row))
    return [(x - best) - norm for x in row]
