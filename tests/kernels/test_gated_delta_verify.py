"""The gated delta rule on a device: against float64, and the same bits however rows are cut."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import gated_delta_ops, normalize_qk
from numpy.typing import NDArray

from lse_mlx.errors import KernelError
from lse_mlx.kernels.gated_delta_verify import (
    DeltaRows,
    fold_rows,
    gated_delta_verify,
    gated_delta_verify_reference,
)
from lse_mlx.kernels.registry import Registry
from tests.kernels.delta_rows import (
    SMALL,
    TARGET_27B,
    Heads,
    cut,
    in_float64,
    random_rows,
)
from tests.kernels.modes import (
    SLOWLY_IN_EVERY_MODE,
    Harness,
    each_harness,
    in_every_mode,
    needs_compiler,
    plain,
)
from tests.states import in_numpy

ROWS = 8
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
HALF_STEP = {mx.float32: 0.0, mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
"""What rounding an output to a dtype may change, relative to it."""

Run = Callable[[Registry], list[mx.array]]


def reference() -> Registry:
    return Registry("reference")


each_form = pytest.mark.parametrize(
    "registry",
    [
        pytest.param(plain, marks=needs_compiler, id="kernel"),
        SLOWLY_IN_EVERY_MODE,
        pytest.param(reference, id="mlx"),
    ],
)


def stepped(
    registry: Registry, rows: DeltaRows, state: mx.array
) -> tuple[list[mx.array], list[mx.array]]:
    """Step-by-step decoding: every row's output, and the states before the first and after each."""
    outputs, states = [], [state]
    for i in range(len(rows)):
        y, after = gated_delta_verify(registry, cut(rows, i, i + 1), None, 0, states[-1], True)
        outputs.append(y)
        states.append(after)
    return outputs, states


def spoiled(rows: DeltaRows, n: int) -> DeltaRows:
    """`rows` with NaN in all but the first `n`: rejected rows must never be looked at."""
    return DeltaRows(
        *(
            mx.concatenate([a[:, :n], mx.full(a[:, n:].shape, float("nan"), a.dtype)], axis=1)
            for a in rows.arrays()
        )
    )


# ---- values


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads",
    [SMALL, Heads(1, 1, 32, 4), Heads(1, 6, 64, 12), Heads(2, 2, 96, 16), Heads(4, 8, 128, 8)],
    ids=str,
)
def test_the_kernel_follows_the_recurrence(heads: Heads, dtype: mx.Dtype) -> None:
    rows, state = random_rows(11, heads, dtype)
    y, kept = in_every_mode(
        lambda registry: [
            *gated_delta_verify(registry, cut(rows, 3, 11), cut(rows, 0, 6), 3, state, True)
        ]
    )
    expected_y, expected = in_float64(rows, state)
    np.testing.assert_allclose(y[0], expected_y[3:], atol=2e-6, rtol=1e-5 + HALF_STEP[dtype])
    np.testing.assert_allclose(kept[0], expected, atol=2e-6, rtol=1e-5)


@each_form
@pytest.mark.parametrize("n_pending", [0, 4])
@pytest.mark.parametrize("n", [1, 8, 40])
def test_outputs_and_state_follow_the_recurrence(
    registry: Callable[[], Registry], n: int, n_pending: int
) -> None:
    rows, state = random_rows(n + n_pending)
    pending = cut(rows, 0, n_pending) if n_pending else None
    y, kept = gated_delta_verify(
        registry(), cut(rows, n_pending, n + n_pending), pending, n_pending, state, True
    )
    expected_y, expected = in_float64(rows, state)
    np.testing.assert_allclose(in_numpy(y[0]), expected_y[n_pending:], atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(in_numpy(kept[0]), expected, atol=2e-6, rtol=1e-5)


@each_form
def test_it_agrees_with_the_operations_of_mlx_lm(registry: Callable[[], Registry]) -> None:
    rows, state = random_rows(9)
    y, after = gated_delta_verify(registry(), rows, None, 0, state, True)
    q, k, v = mx.split(rows.mixed, [64, 128], axis=-1)
    q, k = normalize_qk(
        q.reshape(1, 9, 2, 32), k.reshape(1, 9, 2, 32), inv_scale=32**-0.5, eps=1e-6
    )
    same_y, same = gated_delta_ops(q, k, v.reshape(1, 9, 4, 8), rows.decay, rows.beta, state)
    np.testing.assert_allclose(in_numpy(y), in_numpy(same_y), atol=2e-6)
    np.testing.assert_allclose(in_numpy(after), in_numpy(same), atol=2e-6)


@each_form
def test_no_decay_and_no_write_keep_the_state(registry: Callable[[], Registry]) -> None:
    rows, state = random_rows(3)
    still = DeltaRows(rows.mixed, mx.ones_like(rows.decay), mx.zeros_like(rows.beta))
    kept = gated_delta_verify(registry(), still, None, 0, state, True)[1]
    assert np.array_equal(in_numpy(kept), in_numpy(state))


@each_form
def test_a_decay_near_one_is_not_rounded_away(registry: Callable[[], Registry]) -> None:
    rows, state = random_rows(512, dtype=mx.bfloat16)
    slow = DeltaRows(rows.mixed, mx.full(rows.decay.shape, 0.999), mx.zeros_like(rows.beta))
    after = gated_delta_verify(registry(), slow, None, 0, state, True)[1]
    np.testing.assert_allclose(in_numpy(after), in_numpy(state) * 0.999**512, rtol=1e-4)


@each_form
def test_keys_and_queries_of_zeros_write_and_read_nothing(
    registry: Callable[[], Registry],
) -> None:
    rows, state = random_rows(2)
    empty = DeltaRows(mx.zeros_like(rows.mixed), mx.ones_like(rows.decay), rows.beta)
    y, after = gated_delta_verify(registry(), empty, None, 0, state, True)
    assert not in_numpy(y).any()
    assert np.array_equal(in_numpy(after), in_numpy(state))


@each_form
def test_what_is_added_to_a_short_key_is_that_of_mlx_lm(registry: Callable[[], Registry]) -> None:
    rows, state = random_rows(5)
    short = DeltaRows(rows.mixed * 1e-4, rows.decay, rows.beta)
    y, after = gated_delta_verify(registry(), short, None, 0, state, True)
    expected_y, expected = in_float64(short, state)
    np.testing.assert_allclose(in_numpy(y[0]), expected_y, atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(in_numpy(after[0]), expected, atol=2e-6, rtol=1e-5)


@each_form
def test_a_nan_stays_in_its_row_of_the_state(registry: Callable[[], Registry]) -> None:
    rows, state = random_rows(3)
    mixed = np.array(rows.mixed)
    mixed[0, 1, 128 + 8 * 2 + 5] = np.nan  # v of head 2, row 5
    y, after = gated_delta_verify(
        registry(), DeltaRows(mx.array(mixed), rows.decay, rows.beta), None, 0, state, True
    )
    wrong = np.zeros((1, 4, 8), bool)
    wrong[0, 2, 5] = True
    assert np.array_equal(np.isnan(in_numpy(after)).all(-1), wrong)
    assert np.array_equal(np.isnan(in_numpy(after)).any(-1), wrong)
    assert np.array_equal(
        np.isnan(in_numpy(y[0])), wrong & np.array([0, 1, 1], bool)[:, None, None]
    )


@each_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_take_the_dtype_of_the_rows_and_the_state_stays_fp32(
    registry: Callable[[], Registry], dtype: mx.Dtype
) -> None:
    rows, state = random_rows(2, dtype=dtype)
    y, after = gated_delta_verify(registry(), rows, None, 0, state, True)
    assert (y.dtype, after.dtype) == (dtype, mx.float32)
    assert y.shape == (1, 2, 4, 8)
    assert after.shape == state.shape


# ---- the same bits however rows are cut into passes


def pairs(before: int, dtype: mx.Dtype) -> tuple[Run, NDArray[np.float32], NDArray[np.float32]]:
    """What runs passes of 1 to 8 rows behind `before` accepted ones, and what they should give:
    all states and outputs of step-by-step decoding."""
    rows, state = random_rows(before + ROWS, dtype=dtype)
    pending = spoiled(cut(rows, 0, ROWS), before) if before else None

    def run(registry: Registry) -> list[mx.array]:
        out = []
        for now in range(1, ROWS + 1):
            new = cut(rows, before, before + now)
            for whole in (False, True):
                out += gated_delta_verify(registry, new, pending, before, state, whole)
        return out

    outputs, states = stepped(plain(), rows, state)
    return (
        run,
        np.concatenate([in_numpy(y) for y in outputs], axis=1),
        np.stack([in_numpy(s) for s in states]),
    )


@needs_compiler
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("before", range(ROWS + 1))
def test_every_pair_of_accepted_and_new_rows_is_step_by_step_decoding(
    before: int, dtype: mx.Dtype
) -> None:
    run, outputs, states = pairs(before, dtype)
    results = iter(in_every_mode(run))
    for now in range(1, ROWS + 1):
        for kept_after in (before, before + now):
            y, kept = next(results), next(results)
            assert np.array_equal(y, outputs[:, before : before + now])
            assert np.array_equal(kept, states[kept_after])


@needs_compiler
def test_pieces_of_a_prompt_are_step_by_step_decoding() -> None:
    rows, state = random_rows(29)

    def run(registry: Registry) -> list[mx.array]:
        whole = gated_delta_verify(registry, rows, None, 0, state, True)
        first, middle = gated_delta_verify(registry, cut(rows, 0, 9), None, 0, state, True)
        second, last = gated_delta_verify(registry, cut(rows, 9, 29), None, 0, middle, True)
        return [*whole, mx.concatenate([first, second], axis=1), last]

    y, kept, pieces, kept_by_pieces = in_every_mode(run)
    outputs, states = stepped(plain(), rows, state)
    assert np.array_equal(y, np.concatenate(outputs, axis=1))
    assert np.array_equal(pieces, y)
    assert np.array_equal(kept, in_numpy(states[-1]))
    assert np.array_equal(kept_by_pieces, kept)


@needs_compiler
def test_folding_alone_is_step_by_step_decoding() -> None:
    rows, state = random_rows(ROWS)
    states = stepped(plain(), rows, state)[1]
    folded = in_every_mode(
        lambda registry: [
            fold_rows(registry, spoiled(rows, n), n, state) for n in range(1, ROWS + 1)
        ]
    )
    for n, after in enumerate(folded, 1):
        assert np.array_equal(after, in_numpy(states[n]))


@given(
    n=st.integers(1, 17), split=st.integers(0, 17), hk=st.integers(1, 3), share=st.integers(1, 3)
)
def test_the_reference_does_not_depend_on_the_cut_either(
    n: int, split: int, hk: int, share: int
) -> None:
    before = min(split, n - 1)
    rows, state = random_rows(n, Heads(hk, hk * share, 32, 8), seed=split)
    outputs, states = stepped(reference(), rows, state)
    pending = spoiled(rows, before) if before else None
    for whole, kept_after in ((False, before), (True, n)):
        y, kept = gated_delta_verify_reference(cut(rows, before, n), pending, before, state, whole)
        assert np.array_equal(in_numpy(y), np.concatenate(outputs[before:], axis=1))
        assert np.array_equal(in_numpy(kept), in_numpy(states[kept_after]))


@pytest.mark.parametrize("n", range(1, ROWS + 1))
@each_form
def test_folding_is_what_the_next_pass_does(registry: Callable[[], Registry], n: int) -> None:
    rows, state = random_rows(ROWS)
    folded = fold_rows(registry(), rows, n, state)
    _, kept = gated_delta_verify(registry(), cut(rows, 0, 1), rows, n, state, False)
    assert np.array_equal(in_numpy(folded), in_numpy(kept))


@each_harness
def test_at_the_size_of_the_27b_target(harness: Harness) -> None:
    rows, state = random_rows(13, TARGET_27B, mx.bfloat16)
    y, before = gated_delta_verify(harness(), cut(rows, 5, 13), cut(rows, 0, 8), 5, state, False)
    after = gated_delta_verify(harness(), cut(rows, 5, 13), cut(rows, 0, 8), 5, state, True)[1]
    outputs, states = stepped(harness(), rows, state)
    assert np.array_equal(in_numpy(y), in_numpy(mx.concatenate(outputs[5:], axis=1)))
    assert np.array_equal(in_numpy(before), in_numpy(states[5]))
    assert np.array_equal(in_numpy(after), in_numpy(states[13]))
    expected_y, expected = in_float64(rows, state)
    np.testing.assert_allclose(in_numpy(y[0]), expected_y[5:], atol=2e-6, rtol=2.0**-8)
    np.testing.assert_allclose(in_numpy(after[0]), expected, atol=2e-6, rtol=1e-5)


# ---- what is held, launched and compiled


@each_form
def test_the_inputs_are_not_changed(registry: Callable[[], Registry]) -> None:
    rows, state = random_rows(ROWS)
    held = [state, *rows.arrays()]
    before = [in_numpy(a) for a in held]
    mx.eval(gated_delta_verify(registry(), rows, rows, 5, state, True))
    mx.eval(fold_rows(registry(), rows, 3, state))
    for array, then in zip(held, before, strict=True):
        assert np.array_equal(in_numpy(array), then)


@each_form
def test_an_open_pass_with_nothing_pending_keeps_the_state_itself(
    registry: Callable[[], Registry],
) -> None:
    rows, state = random_rows(4)
    assert gated_delta_verify(registry(), rows, None, 0, state, False)[1] is state


@each_harness
def test_every_pass_and_fold_is_one_launch_of_one_variant(harness: Harness) -> None:
    heads = Heads(hk=4, hv=8, dk=32, dv=4)
    registry, (pending, state) = harness(), random_rows(ROWS, heads)
    calls = 0
    for n in (1, 2, 7, 8, 40):
        rows, _ = random_rows(n, heads)
        for n_pending in (0, 1, 8):
            for whole in (False, True):
                behind = pending if n_pending else None
                gated_delta_verify(registry, rows, behind, n_pending, state, whole)
                calls += 1
    fold_rows(registry, pending, 3, state)
    assert [c.name for c in registry.compilations] == ["gated_delta_verify"]
    assert registry.served == {("gated_delta_verify", "metal"): calls + 1}


@needs_compiler
@pytest.mark.parametrize(
    "heads", [Heads(1, 2, 48, 8), Heads(1, 2, 16, 8), Heads(1, 2, 32, 6)], ids=str
)
def test_other_sizes_are_served_by_the_reference(heads: Heads) -> None:
    rows, state = random_rows(3, heads)
    registry = plain()
    y, kept = gated_delta_verify(registry, rows, rows, 2, state, True)
    same_y, same = gated_delta_verify_reference(rows, rows, 2, state, True)
    folded = fold_rows(registry, rows, 2, state)
    assert np.array_equal(in_numpy(y), in_numpy(same_y))
    assert np.array_equal(in_numpy(kept), in_numpy(same))
    assert folded.shape == state.shape
    assert registry.served == {("gated_delta_verify", "reference"): 2}


def test_without_a_device_the_reference_is_counted_or_refused() -> None:
    rows, state = random_rows(3)
    registry = reference()
    gated_delta_verify(registry, rows, None, 0, state, True)
    fold_rows(registry, rows, 2, state)
    assert registry.counts().reference_calls == 2
    strict = Registry("reference", required=True)
    with pytest.raises(KernelError, match="gated_delta_verify"):
        gated_delta_verify(strict, rows, None, 0, state, True)
    with pytest.raises(KernelError, match="gated_delta_verify"):
        fold_rows(strict, rows, 2, state)


def test_more_pending_rows_than_there_are_is_a_mistake() -> None:
    rows, state = random_rows(3)
    for pending, n in ((None, 1), (rows, 4)):
        with pytest.raises(AssertionError):
            gated_delta_verify(reference(), rows, pending, n, state, True)
