"""Scores of every candidate after every candidate of the position before, and the best path.

Source: DFlash2, selector.
"""

from dataclasses import dataclass

import mlx.core as mx

from lse_mlx.kernels.registry import Kernel, Registry

KERNEL = Kernel(
    "selector",
    ("logits", "ids", "predecessors", "gates", "successors", "vocab_size"),
    ("scores", "path"),
)

NOT_FINITE = 1
"""Bit of a path's status: a row on the path has a score that is not finite."""

MALFORMED = 2
"""Bit of a path's status: an id somewhere is outside the vocabulary."""

_MAX_K = 32
_THREADS = 256


@dataclass(frozen=True)
class Selection:
    """Scores of a drafted block, and the greedy walk over them.

    scores: fp32 [positions, k, k]; [p, a, b] of candidate b of position p after token a
    path:   int32 [positions + 1], a token a position and then the status: 0, or the bits NOT_FINITE
            and MALFORMED, and then the tokens mean nothing
    """

    scores: mx.array
    path: mx.array


def select(
    registry: Registry,
    logits: mx.array,
    ids: mx.array,
    predecessors: mx.array,
    gates: mx.array,
    successors: mx.array,
    vocab_size: int,
) -> Selection:
    """S[p, a, b] = logit[p, b] + sum over r of pred[p, a, r] * gate[p, r] * succ[p, b, r]; the walk.

    logits:       fp32 [positions, k], of the candidates
    ids:          int32 [positions, k], their tokens
    predecessors: fp32 [positions, k, rank], codebook rows of the tokens before each position
    gates:        fp32 [positions, rank]
    successors:   fp32 [positions, k, rank], codebook rows of the candidates

    The walk takes the best score of the row of the candidate taken before, from row 0 on; equal
    scores by the smaller token, then by the smaller place. A row with a score that is not finite, or
    a winner outside the vocabulary, gives token 0 and goes on from row 0.
    """
    positions, k = ids.shape

    def launch() -> Selection:
        scores, path = registry.launch(
            KERNEL,
            inputs=[logits, ids, predecessors, gates, successors, vocab_size],
            outputs=[((positions, k, k), mx.float32), ((positions + 1,), mx.int32)],
            grid=(_THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            template={"K": k},
        )
        return Selection(scores, path)

    def reference() -> Selection:
        scores = scores_reference(logits, predecessors, gates, successors)
        return Selection(scores, path_reference(scores, ids, vocab_size))

    fits = k <= _MAX_K and positions * k <= _THREADS
    return registry.serve(KERNEL.name, fits, launch, reference)


def scores_reference(
    logits: mx.array, predecessors: mx.array, gates: mx.array, successors: mx.array
) -> mx.array:
    """The scores in plain MLX; shapes as in `select`. The sum over the rank is in another order."""
    asked = predecessors * gates[:, None]
    # Not a matrix product: too small to gain by one, and some devices would round its inputs.
    follows = (asked[:, :, None] * successors[:, None]).sum(axis=-1)
    return follows + logits[:, None]


def path_reference(scores: mx.array, ids: mx.array, vocab_size: int) -> mx.array:
    """The path and its status in plain MLX; shapes as in `Selection`."""
    finite = mx.abs(scores) < mx.inf
    malformed = (ids < 0) | (ids >= vocab_size)
    taken = mx.array(0)
    status = mx.where(malformed.any(), MALFORMED, 0)
    tokens: list[mx.array] = []
    for row_scores, row_finite, row_ids, row_malformed in zip(
        scores, finite, ids, malformed, strict=True
    ):
        row, choosable = row_scores[taken], row_finite[taken].all()
        # argmin takes the first of equal ones; no int32 reaches 2^31.
        among = mx.where(row == row.max(), row_ids.astype(mx.int64), 2**31)
        winner = mx.argmin(among)
        valid = choosable & ~row_malformed[winner]
        status = status | mx.where(choosable, 0, NOT_FINITE)
        taken = mx.where(valid, winner, 0)
        tokens.append(mx.where(valid, row_ids[taken], 0))
    return mx.stack([*tokens, status]).astype(mx.int32)
