"""What the kernels compute, written out in float64 NumPy from their definitions, one row at a time.

Slow and plain on purpose, and independent of the kernels and of their references.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


def best(logits: Floats, k: int) -> tuple[Floats, NDArray[np.int64]]:
    """Values and columns of the `k` best of each row: NaN, then descending, ties by the column."""
    values, columns = [], []
    for row in logits:
        # The last key leads, equal ones stay in order, and -0 equals 0.
        order = np.lexsort((-np.where(np.isnan(row), 0, row), ~np.isnan(row)))[:k]
        values.append(row[order])
        columns.append(order)
    return np.array(values), np.array(columns)


def selector_scores(logits: Floats, before: Floats, gates: Floats, after: Floats) -> Floats:
    """S[p, a, b] = logit[p, b] + sum over r of before[p, a, r] gate[p, r] after[p, b, r]."""
    double = [x.astype(np.float64) for x in (logits, before, gates, after)]
    logits, before, gates, after = double
    return logits[:, None] + np.einsum("par,pr,pbr->pab", before, gates, after)


def walk(scores: Floats, ids: NDArray[np.int32], vocab_size: int) -> list[int]:
    """The best token of each position after the one before, and the status of the path.

    Ties go to the smaller token, then to the first place. A row with a score that is not finite
    adds 1 to the status, an id outside the vocabulary anywhere adds 2; where the path meets either,
    the token is 0 and the path goes on from place 0.
    """
    malformed = (ids < 0) | (ids >= vocab_size)
    broken, taken, tokens = False, 0, []
    for row_scores, row_ids, row_malformed in zip(scores, ids, malformed, strict=True):
        row = row_scores[taken]
        taken = min(range(len(row)), key=lambda b: (-row[b], row_ids[b], b))
        finite = bool(np.isfinite(row).all())
        broken |= not finite
        token = int(row_ids[taken])
        if not finite or row_malformed[taken]:
            taken, token = 0, 0
        tokens.append(token)
    return [*tokens, int(broken) + 2 * int(malformed.any())]


def attention(
    queries: Floats,
    keys: Floats,
    values: Floats,
    seen: NDArray[np.bool_],
    scale: float | None = None,
) -> NDArray[np.float64]:
    """softmax(scale q k^T) v of [rows, heads, D] over what `seen` [rows, keys] says.

    keys, values: [kv, keys, D]; head h reads h // (heads / kv). What nobody sees may be anything.
    scale: 1 / sqrt(D) if None
    """
    rows, heads, width = queries.shape
    scale = width**-0.5 if scale is None else scale
    out = np.zeros((rows, heads, width))
    for row in range(rows):
        visible = np.flatnonzero(seen[row])
        for head in range(heads):
            kv = head // (heads // len(keys))
            k, v = (x[kv, visible].astype(np.float64) for x in (keys, values))
            scores = scale * (k @ queries[row, head].astype(np.float64))
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v / weights.sum()
    return out


def convolution(x: Floats, base: Floats, dynamic: Floats, side: int) -> Floats:
    """y[t, c] = sum over tap of (base[side, tap, c] + D[t, side, tap, group]) x[t - tap, c]."""
    rows, hidden = x.shape
    _, taps, groups, width = base.shape
    coefficients = dynamic.astype(np.float64).reshape(rows, 2, taps, groups)
    y = np.zeros((rows, hidden))
    for t in range(rows):
        for tap in range(min(t, taps - 1) + 1):
            by_channel = np.repeat(coefficients[t, side, tap], width)
            y[t] += (base[side, tap].astype(np.float64).reshape(-1) + by_channel) * x[t - tap]
    return y


def delta_rule(
    mixed: Floats, decay: Floats, beta: Floats, state: Floats, eps: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`recurrence` of queries and keys that are not normalized yet.

    mixed: [rows, 2 Hk Dk + Hv Dv], q, k and v side by side; eps is added under the root
    """
    heads, dv, dk = state.shape
    keys = (mixed.shape[1] - heads * dv) // 2
    q, k, v = np.split(mixed.astype(np.float64), [keys, 2 * keys], axis=1)

    def unit(x: Floats) -> Floats:
        x = x.reshape(len(x), keys // dk, dk)
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)

    v = v.reshape(len(v), heads, dv)
    return recurrence(unit(q) / np.sqrt(dk), unit(k), v, decay, beta, state)


def recurrence(
    q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats, state: Floats
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """S <- g S + beta (v - g S k) k^T, y = S q, row by row; the outputs and the state after them.

    q, k: [rows, Hk, Dk]; v: [rows, Hv, Dv]; decay, beta: [rows, Hv]; state: [Hv, Dv, Dk]; value head
    h belongs to key head h // (Hv / Hk)
    """
    state = state.astype(np.float64)
    y = np.zeros(v.shape)
    for row in range(len(v)):
        for h in range(len(state)):
            key = h // (len(state) // k.shape[1])
            decayed = float(decay[row, h]) * state[h]
            missing = v[row, h] - decayed @ k[row, key]
            state[h] = decayed + float(beta[row, h]) * np.outer(missing, k[row, key])
            y[row, h] = state[h] @ q[row, key]
    return y, state


def affine_matrix(
    words: NDArray[np.uint32], scales: Floats, biases: Floats, bits: int, group: int
) -> NDArray[np.float64]:
    """W[o, i] = scale[o, i // group] code[o, i] + bias[o, i // group], lowest bits first."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = (words[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    codes = codes.reshape(len(words), -1, group).astype(np.float64)
    weight = scales.astype(np.float64)[:, :, None] * codes + biases.astype(np.float64)[:, :, None]
    return weight.reshape(len(words), -1)
