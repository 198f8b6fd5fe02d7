"""The best k tokens of each row of logits, in an order that depends on nothing but the logits."""

import math

import mlx.core as mx


def top_candidates(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The `k` best tokens of each row, best first; equal logits by the lower id, NaN before all.

    logits: fp32 [rows, vocab]. Returns their logits, fp32 [rows, k], and ids, int32 [rows, k].
    NaN ranks with +inf, so it cannot hide below the finite ones: the walk sees and refuses it.

    Two stages instead of one sort of the vocabulary: the k best tokens lie in the k chunks with
    the best maxima, because each better chunk holds one better token (lower chunks hold lower ids,
    so ties agree).
    """
    rows, vocab = logits.shape
    width = 1 << max(0, math.ceil(math.log2(vocab / k) / 2))
    negated = -mx.where(mx.isnan(logits), mx.inf, logits)
    if vocab % width:
        negated = mx.pad(negated, [(0, 0), (0, -vocab % width)], constant_values=mx.inf)
    chunks = negated.reshape(rows, -1, width)
    best_chunks = mx.argsort(chunks.min(axis=-1), axis=-1)[:, :k]
    # Back to ascending order, so that the stable sort below breaks ties by token id.
    best_chunks = mx.sort(best_chunks, axis=-1).astype(mx.int32)
    finalists = mx.take_along_axis(chunks, best_chunks[:, :, None], axis=1).reshape(rows, -1)
    order = mx.argsort(finalists, axis=-1)[:, :k].astype(mx.int32)
    ids = mx.take_along_axis(best_chunks, order // width, axis=1) * width + order % width
    return mx.take_along_axis(logits, ids, axis=1), ids
