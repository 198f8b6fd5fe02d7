"""After every verify and commit the state is that of decoding one token at a time."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lse_mlx.target.attention_layer import AttentionLayer
from lse_mlx.target.model import Target
from lse_mlx.target.state import DeltaState, TargetState
from tests.states import Held, assert_same, held_by
from tests.tiny_models import VOCAB, on_cpu, random_prompt

ROWS = 8


@dataclass(frozen=True)
class Walk:
    """A sequence decoded one token at a time: what was held and answered after each token."""

    tokens: list[int]
    start: int
    held: list[Held]
    logits: list[NDArray[np.float32]]
    features: list[NDArray[np.float32]]

    def at(self, position: int) -> Held:
        return self.held[position - self.start]


def walk(target: Target, tokens: list[int], start: int = 0) -> Walk:
    """Decode `tokens` one at a time from position `start` on; the ones before come in one piece."""
    state = target.new_state()
    if start:
        target.advance(tokens[:start], state, ())
    steps = Walk(tokens, start, [held_by(state)], [], [])
    taps = tuple(tap for tap in (1, 4) if tap < target.layer_count)
    for token in tokens[start:]:
        rows = target.verify([token], state, taps)
        state.commit(1)
        steps.held.append(held_by(state))
        steps.logits.append(np.array(rows.logits[0]))
        steps.features.append(np.array(rows.features[0]))
    return steps


@pytest.fixture(scope="module")
def steps(hybrid: Target) -> Walk:
    with on_cpu():
        return walk(hybrid, random_prompt(64))


def drafted(tokens: list[int], at: int, rows: int, right: int) -> list[int]:
    """`rows` tokens for a pass at position `at`: the first `right` as in the sequence, then wrong."""
    known = tokens[at : at + rows]
    return [t if i < right else (t + 1 + i) % VOCAB for i, t in enumerate(known)]


def test_taking_in_and_verifying_one_token_are_the_same(hybrid: Target, steps: Walk) -> None:
    state = hybrid.new_state()
    for position, token in enumerate(steps.tokens[:12], 1):
        last = hybrid.advance([token], state, (1, 4))
        assert np.array_equal(np.array(last.logits[0]), steps.logits[position - 1])
        assert np.array_equal(np.array(last.features[0]), steps.features[position - 1])
        assert_same(state, steps.at(position))


@pytest.mark.parametrize("context", range(1, 21))
def test_every_commit_leaves_the_state_of_the_committed_tokens(
    hybrid: Target, steps: Walk, context: int
) -> None:
    for n in range(1, ROWS + 1):
        state = hybrid.new_state()
        hybrid.advance(steps.tokens[:context], state, ())
        rows = hybrid.verify(drafted(steps.tokens, context, ROWS, n), state, (1, 4))
        state.commit(n)
        assert state.position == context + n
        assert_same(state, steps.at(context + n))
        for i in range(n):
            assert np.array_equal(np.array(rows.logits[i]), steps.logits[context + i])
            assert np.array_equal(np.array(rows.features[i]), steps.features[context + i])


@pytest.mark.parametrize(
    "context",
    [
        pytest.param(250, id="where the attention cache grows"),
        pytest.param(2047, id="where a ring of 2055 rows wraps"),
    ],
)
def test_commits_deep_in_a_sequence(hybrid: Target, context: int) -> None:
    deep = walk(hybrid, random_prompt(context + 20), start=context)
    base = hybrid.new_state()
    hybrid.advance(deep.tokens[:context], base, ())
    for first in range(1, ROWS + 1):
        state, at = copied(base), context
        for n in (first, ROWS + 1 - first, 8):
            hybrid.verify(drafted(deep.tokens, at, ROWS, n), state, ())
            state.commit(n)
            at += n
            assert_same(state, deep.at(at))


def copied(state: TargetState) -> TargetState:
    """A second state with the same content, as another sequence would have reached it."""
    layers = []
    for layer in state.layers:
        if isinstance(layer, DeltaState):
            own = mx.array if isinstance(layer.tail, mx.array) else np.array
            layers.append(replace(layer, tail=own(layer.tail), recurrent=own(layer.recurrent)))
        else:
            cache = type(layer)()
            cache.update_and_fetch(*(x[:, :, : layer.offset] for x in (layer.keys, layer.values)))
            layers.append(cache)
    return TargetState(layers, state.position)


@pytest.mark.parametrize("kind", ["q4", "qwen3", "moe", "moe-q4"])
def test_other_kinds_of_targets_commit_alike(targets: dict[str, Target], kind: str) -> None:
    target, tokens = targets[kind], random_prompt(40)
    steps = walk(target, tokens)
    for n in range(1, ROWS + 1):
        state, at = target.new_state(), 0
        while at + ROWS <= 32:
            target.verify(drafted(tokens, at, ROWS, n), state, ())
            state.commit(n)
            at += n
            assert_same(state, steps.at(at))


passes = st.integers(1, ROWS).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows)))


@settings(max_examples=40)
@given(prompt=st.integers(0, 12), walked=st.lists(passes, min_size=1, max_size=8))
def test_any_sequence_of_passes_is_one_token_at_a_time(
    hybrid: Target, steps: Walk, prompt: int, walked: list[tuple[int, int]]
) -> None:
    with on_cpu():
        state, at = hybrid.new_state(), prompt
        if prompt:
            hybrid.advance(steps.tokens[:prompt], state, ())
        for rows, n in walked:
            if at + rows > len(steps.tokens):
                break
            n = rows if rows == 1 else n
            answer = hybrid.verify(drafted(steps.tokens, at, rows, n), state, ())
            state.commit(n)
            assert np.array_equal(np.array(answer.logits[n - 1]), steps.logits[at + n - 1])
            at += n
        assert state.position == at
        assert_same(state, steps.at(at))


def test_prompt_pieces_may_follow_verify_passes(hybrid: Target, steps: Walk) -> None:
    state = hybrid.new_state()
    hybrid.verify(drafted(steps.tokens, 0, ROWS, 5), state, ())
    state.commit(5)
    last = hybrid.advance(steps.tokens[5:11], state, ())
    assert np.array_equal(np.array(last.logits[0]), steps.logits[10])
    hybrid.verify(drafted(steps.tokens, 11, ROWS, 2), state, ())
    state.commit(2)
    assert_same(state, steps.at(13))


def test_settling_early_or_never_changes_nothing(hybrid: Target, steps: Walk) -> None:
    settled, left = hybrid.new_state(), hybrid.new_state()
    for state in (settled, left):
        hybrid.verify(drafted(steps.tokens, 0, ROWS, 3), state, ())
        state.commit(3)
    assert any(isinstance(x, DeltaState) and x.pending for x in settled.layers)
    settled.settle()
    assert not any(isinstance(x, DeltaState) and x.pending for x in settled.layers)
    for state in (settled, left):
        assert_same(state, steps.at(3))
        hybrid.verify(drafted(steps.tokens, 3, ROWS, 6), state, ())
        state.commit(6)
        assert_same(state, steps.at(9))


def test_every_pass_and_every_settling_is_one_call_a_layer(hybrid: Target) -> None:
    served, kernel = hybrid.registry.served, ("gated_delta_verify", "reference")
    layers = sum(not isinstance(mixer, AttentionLayer) for mixer in hybrid.mixers)
    state, before = hybrid.new_state(), served[kernel]

    def calls() -> int:
        return (served[kernel] - before) // layers

    hybrid.advance(random_prompt(9), state, ())
    assert calls() == 1
    for n in (3, 8):  # what is pending is folded in by the pass itself
        hybrid.verify(random_prompt(ROWS), state, ())
        state.commit(n)
    assert calls() == 3
    for _ in range(2):  # there is nothing left to settle
        state.settle()
        assert calls() == 4


@pytest.mark.parametrize("n", [0, -1, 9])
def test_a_commit_of_none_or_too_many_rows_is_refused_and_harmless(
    hybrid: Target, steps: Walk, n: int
) -> None:
    state = hybrid.new_state()
    hybrid.verify(drafted(steps.tokens, 0, ROWS, 4), state, ())
    with pytest.raises(ValueError, match=rf"cannot commit {n} of 8 open rows"):
        state.commit(n)
    state.commit(4)
    assert_same(state, steps.at(4))


@pytest.mark.parametrize("n", [0, 2])
def test_a_pass_of_one_row_is_committed_whole(hybrid: Target, steps: Walk, n: int) -> None:
    state = hybrid.new_state()
    hybrid.verify(steps.tokens[:1], state, ())
    with pytest.raises(ValueError, match=rf"cannot commit {n} of 1 open rows"):
        state.commit(n)
    state.commit(1)
    assert_same(state, steps.at(1))


def test_a_piece_of_the_prompt_is_committed_whole(hybrid: Target) -> None:
    state = hybrid.new_state()
    hybrid._blocks(random_prompt(5), state, (), whole=True)
    with pytest.raises(ValueError, match="cannot commit 4 of 5 open rows"):
        state.commit(4)
    state.commit(5)
    assert state.position == 5


def test_a_commit_without_a_pass_is_refused(hybrid: Target) -> None:
    state = hybrid.new_state()
    for take in (lambda: None, lambda: hybrid.advance(random_prompt(3), state, ())):
        take()
        with pytest.raises(ValueError, match="cannot commit 1 of 0 open rows"):
            state.commit(1)


def test_no_pass_starts_while_one_is_open(hybrid: Target, steps: Walk) -> None:
    state = hybrid.new_state()
    hybrid.verify(drafted(steps.tokens, 0, ROWS, 4), state, ())
    for start in (hybrid.verify, hybrid.advance):
        with pytest.raises(ValueError, match="a pass of 8 rows is still open"):
            start([1, 2], state, ())
    state.commit(4)
    assert_same(state, steps.at(4))
