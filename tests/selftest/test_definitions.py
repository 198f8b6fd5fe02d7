"""The self-test's own definitions, against values worked out by hand or by other means."""

import numpy as np
import pytest

from lse_mlx.selftest import definitions

NAN, INF = np.nan, np.inf


def test_the_order_of_the_best():
    row = np.array([[1.0, NAN, -INF, 5.0, INF, NAN, 5.0, -0.0, 0.0]], np.float32)
    values, columns = definitions.best(row, 9)
    assert columns.tolist() == [[1, 5, 4, 3, 6, 0, 7, 8, 2]]
    assert np.isnan(values[0, :2]).all()
    assert values[0, 2:].tolist() == [INF, 5.0, 5.0, 1.0, 0.0, 0.0, -INF]
    assert definitions.best(np.full((1, 4), -INF, np.float32), 2)[1].tolist() == [[0, 1]]


def test_scores_of_one_pair():
    logits, gates = np.array([[10.0, 20.0]]), np.array([[2.0, 3.0]])
    before = np.array([[[1.0, 1.0], [0.0, 1.0]]])
    after = np.array([[[5.0, 7.0], [1.0, 0.0]]])
    # 1*2*5 + 1*3*7 = 31 and so on, with the candidate's logit on top.
    wanted = [[[10 + 31, 20 + 2], [10 + 21, 20 + 0]]]
    assert definitions.selector_scores(logits, before, gates, after).tolist() == wanted


def test_a_walk_follows_the_row_of_what_it_took_and_breaks_ties_by_the_token():
    scores = np.array([[[1.0, 3.0], [9.0, 0.0]], [[9.0, 0.0], [4.0, 4.0]]])
    ids = np.array([[5, 6], [8, 7]], np.int32)
    assert definitions.walk(scores, ids, 100) == [6, 7, 0]


def test_a_walk_says_what_is_not_finite_and_what_is_no_token():
    ids = np.array([[5, 6], [8, 7]], np.int32)
    scores = np.array([[[1.0, 3.0], [9.0, 0.0]], [[0.0, 9.0], [4.0, NAN]]])
    assert definitions.walk(scores, ids, 100) == [6, 0, 1]
    # Place 1 of the first position is no token, so the second goes on from place 0.
    assert definitions.walk(scores, ids, 6) == [0, 0, 2]
    scores[0, 0, 0] = INF
    assert definitions.walk(scores, ids, 8) == [0, 7, 1 | 2]


def test_attention_is_a_mean_where_all_scores_are_equal():
    queries = np.zeros((2, 2, 4))
    keys = np.zeros((1, 3, 4))
    values = np.array([[[1.0] * 4, [3.0] * 4, [NAN] * 4]])
    seen = np.array([[True, False, False], [True, True, False]])
    found = definitions.attention(queries, keys, values, seen)
    assert found[:, 0, 0].tolist() == found[:, 1, 3].tolist() == [1.0, 2.0]


def test_attention_weighs_by_the_exponential_of_scaled_products():
    queries = np.array([[[2.0, 0.0, 0.0, 0.0]]])
    keys = np.array([[[np.log(3.0), 0, 0, 0], [0.0, 0, 0, 0]]])
    values = np.array([[[1.0] * 4, [5.0] * 4]])
    # 2 log 3 / sqrt(4) = log 3, so the weights are 3/4 and 1/4.
    found = definitions.attention(queries, keys, values, np.ones((1, 2), bool))
    assert found[0, 0, 0] == pytest.approx(0.75 * 1 + 0.25 * 5)
    found = definitions.attention(queries, keys, values, np.ones((1, 2), bool), scale=0.0)
    assert found[0, 0, 0] == pytest.approx(3.0)
    found = definitions.attention(queries, keys, values, np.ones((1, 2), bool), scale=0.0)
    assert found[0, 0, 0] == pytest.approx(3.0)


def test_a_convolution_sees_its_row_and_the_one_before():
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    base = np.zeros((2, 2, 1, 2))
    base[1, 0, 0], base[1, 1, 0] = [10.0, 20.0], [1.0, 2.0]
    dynamic = np.array([[0.0, 0.0, 0.5, 7.0], [0.0, 0.0, 0.25, 100.0]])
    # Row 0 has none before it: (10 + 0.5) * 1, (20 + 0.5) * 2.
    wanted = [[10.5, 41.0], [10.25 * 3 + 101 * 1, 20.25 * 4 + 102 * 2]]
    assert definitions.convolution(x, base, dynamic, 1).tolist() == wanted


def test_the_delta_rule_writes_what_is_missing_and_forgets():
    # One head of two dimensions; k and q have length one, so the norm's eps is left out here.
    mixed = np.array([[1.0, 0.0, 1.0, 0.0, 8.0, 6.0], [0.0, 1.0, 1.0, 0.0, 2.0, 2.0]])
    decay, beta = np.array([[1.0], [0.5]]), np.array([[0.5], [1.0]])
    outputs, state = definitions.delta_rule(mixed, decay, beta, np.zeros((1, 2, 2)), 0.0)
    # Row 0 writes half of (8, 6) at k = (1, 0). Row 1 halves that and replaces it with (2, 2); its
    # query looks at (0, 1), where nothing is.
    assert outputs[0, 0].tolist() == pytest.approx([4 / np.sqrt(2), 3 / np.sqrt(2)])
    assert outputs[1, 0].tolist() == [0.0, 0.0]
    assert state[0].tolist() == [[2.0, 0.0], [2.0, 0.0]]


def test_the_delta_rule_normalizes_queries_and_keys():
    rng = np.random.default_rng(0)
    mixed, (decay, beta) = rng.standard_normal((3, 2 * 8 + 2 * 6)), rng.uniform(0, 1, (2, 3, 2))
    state = rng.standard_normal((2, 6, 8))
    outputs, after = definitions.delta_rule(mixed, decay, beta, state, 0.0)
    longer = np.concatenate([5 * mixed[:, :16], mixed[:, 16:]], axis=1)
    others = definitions.delta_rule(longer, decay, beta, state, 0.0)
    np.testing.assert_allclose(others[0], outputs, rtol=1e-12)
    np.testing.assert_allclose(others[1], after, rtol=1e-12)
    # The eps is added to the sum of squares.
    unlike = definitions.delta_rule(longer, decay, beta, state, 1.0)
    unit = [x / np.sqrt((x * x).sum(-1) + 1)[:, None] for x in np.split(longer[:, :16], 2, 1)]
    by_parts = definitions.recurrence(
        unit[0][:, None] / np.sqrt(8),
        unit[1][:, None],
        mixed[:, 16:].reshape(3, 2, 6),
        decay,
        beta,
        state,
    )
    np.testing.assert_allclose(unlike[0], by_parts[0], rtol=1e-12)


def test_the_delta_rule_of_no_rows_is_its_state():
    state = np.ones((2, 6, 8))
    none = np.zeros((0, 28)), np.zeros((0, 2)), np.zeros((0, 2))
    outputs, after = definitions.delta_rule(*none, state, 1e-6)
    assert outputs.shape == (0, 2, 6)
    assert after.tolist() == state.tolist()


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_read_from_the_lowest_bits(bits: int):
    count = 32 // bits
    word = sum(n << (bits * n) for n in range(count))
    words = np.array([[word]], np.uint32)
    found = definitions.affine_matrix(words, np.array([[2.0]]), np.array([[0.5]]), bits, count)
    assert found.tolist() == [[2.0 * n + 0.5 for n in range(count)]]
