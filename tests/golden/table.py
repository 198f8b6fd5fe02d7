"""A target small enough to follow by hand: it counts.

After token t it gives t + 1 the weight 40, t + 2 the weight 16 and t + 3 the weight 8, out of 64 and
modulo 16. After 7 it hesitates: 8 and 9 get 24 each, and 10 gets 16. Once it has read a 15 it counts
down instead, for ever, and no longer hesitates. So a rejected 15 that stayed behind would be seen.

Every number is a multiple of 1/64, so any machine computes the same bits.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

VOCAB, LAYERS, HIDDEN = 16, 4, 4
CAPTURED = (1, 3)
EXPERTS, TOP_K, SPARSE = 8, 2, (1, 3)


def weights(prefix: Sequence[int]) -> dict[int, int]:
    """Weight of each possible next token, out of 64."""
    last, down = prefix[-1], 15 in prefix
    if last == 7 and not down:
        return {8: 24, 9: 24, 10: 16}
    step = -1 if down else 1
    return {(last + step * n) % VOCAB: weight for n, weight in ((1, 40), (2, 16), (3, 8))}


def row(prefix: Sequence[int]) -> NDArray[np.float32]:
    """What stands for logits: the weights, fp32 [vocab]."""
    held = weights(prefix)
    return np.array([held.get(token, 0) for token in range(VOCAB)], np.float32)


def likeliest(prefix: Sequence[int]) -> list[tuple[int, float]]:
    """The three possible tokens and their probabilities, the lower id first where they are equal."""
    ranked = sorted(weights(prefix).items(), key=lambda item: (-item[1], item[0]))
    return [(token, weight / 64) for token, weight in ranked]


def hidden(prefix: Sequence[int]) -> NDArray[np.float32]:
    """The captured features of the last token, a function of all of them: fp32 [layers * HIDDEN]."""
    total = sum((place + 1) * (token + 1) for place, token in enumerate(prefix))
    values = [total * (layer + unit + 1) % 251 / 4 for layer in CAPTURED for unit in range(HIDDEN)]
    return np.array(values, np.float32)


def experts(position: int, layer: int) -> tuple[int, int]:
    """The experts of a token, in the router's order."""
    return (position + layer) % EXPERTS, (position + layer + 3) % EXPERTS
