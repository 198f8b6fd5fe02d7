"""The target's logits and taps are those of mlx-lm's own model on the same weights."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from numpy.typing import NDArray

from lse_mlx.target.model import Target
from tests.tiny_models import KINDS, VOCAB, load_tiny, random_prompt

each_kind = pytest.mark.parametrize("kind", KINDS)


def walked(model: nn.Module, tokens: list[int]) -> tuple[list[NDArray[np.float32]], mx.array]:
    """Every block's output [rows, hidden] by mlx-lm's own layers, and the logits [rows, vocab]."""
    inner = model.model
    x = inner.embed_tokens(mx.array([tokens]))
    outputs = []
    for layer in inner.layers:
        delta = getattr(layer, "is_linear", False)
        x = layer(x, mask=None if delta else create_attention_mask(x), cache=None)
        outputs.append(np.array(x[0]))
    return outputs, model(mx.array([tokens]))[0]


def assert_same_logits(got: mx.array, expected: mx.array, tolerance: float = 2e-4) -> None:
    ours, theirs = np.array(got), np.array(expected)
    assert got.dtype == mx.float32
    np.testing.assert_allclose(ours, theirs, atol=tolerance)
    best = np.sort(theirs, axis=-1)
    apart = best[:, -1] - best[:, -2] > 10 * tolerance
    assert apart.mean() > 0.8
    assert np.array_equal(ours.argmax(-1)[apart], theirs.argmax(-1)[apart])


@each_kind
@pytest.mark.parametrize("rows", [1, 2, 8, 33])
def test_logits_of_a_verify_pass_are_those_of_mlx_lm(
    targets: dict[str, Target], references: dict[str, nn.Module], kind: str, rows: int
) -> None:
    prompt, target = random_prompt(40 + rows), targets[kind]
    expected = references[kind](mx.array([prompt]))[0]
    state = target.new_state()
    last = target.advance(prompt[:40], state, ())
    assert_same_logits(last.logits, expected[39:40])
    assert_same_logits(target.verify(prompt[40:], state, ()).logits, expected[40:])


@each_kind
def test_taps_are_the_outputs_of_the_blocks(
    targets: dict[str, Target], references: dict[str, nn.Module], kind: str
) -> None:
    prompt, target = random_prompt(21), targets[kind]
    outputs, logits = walked(references[kind], prompt)
    every = tuple(range(target.layer_count))
    assert len(outputs) == target.layer_count
    state = target.new_state()
    first = target.advance(prompt[:13], state, every)
    then = target.verify(prompt[13:], state, every)
    features = np.concatenate([np.array(first.features), np.array(then.features)])
    assert first.features.dtype == mx.float32
    np.testing.assert_allclose(features, np.concatenate(outputs, axis=-1), atol=1e-4, rtol=1e-5)
    assert_same_logits(then.logits, logits[13:])


@pytest.mark.parametrize("taps", [(0,), (3,), (4,), (1, 3), (0, 2, 4)])
def test_only_the_tapped_blocks_are_kept_in_order(hybrid: Target, taps: tuple[int, ...]) -> None:
    prompt = random_prompt(9)
    every = np.array(hybrid.advance(prompt, hybrid.new_state(), (0, 1, 2, 3, 4)).features)
    blocks = np.split(every, 5, axis=-1)
    chosen = np.array(hybrid.advance(prompt, hybrid.new_state(), taps).features)
    assert np.array_equal(chosen, np.concatenate([blocks[t] for t in taps], axis=-1))


def test_the_last_block_is_tapped_before_the_final_norm(hybrid: Target) -> None:
    last = hybrid.layer_count - 1
    rows = hybrid.verify(random_prompt(6), hybrid.new_state(), (last,))
    own = rows.features.astype(hybrid.trunk.norm.weight.dtype)  # as it was before it was handed out
    assert np.array_equal(np.array(hybrid.head(hybrid.trunk.norm(own))), np.array(rows.logits))


def test_taps_change_no_logits_and_none_gives_empty_features(hybrid: Target) -> None:
    prompt = random_prompt(12)
    bare = hybrid.verify(prompt, hybrid.new_state(), ())
    tapped = hybrid.verify(prompt, hybrid.new_state(), (1, 4))
    assert bare.features.shape == (12, 0)
    assert tapped.features.shape == (12, 2 * hybrid.hidden_size)
    assert np.array_equal(np.array(bare.logits), np.array(tapped.logits))


@each_kind
def test_the_shared_parts_are_embedding_and_head(
    targets: dict[str, Target], references: dict[str, nn.Module], kind: str
) -> None:
    target, inner = targets[kind], references[kind].model
    tokens = mx.array([0, 5, VOCAB - 1])
    np.testing.assert_allclose(
        np.array(target.embed(tokens)), np.array(inner.embed_tokens(tokens)), atol=1e-6
    )
    outputs, logits = walked(references[kind], random_prompt(9))
    hidden = inner.norm(mx.array(outputs[-1]))
    np.testing.assert_allclose(np.array(target.head(hidden)), np.array(logits), atol=2e-4)


@pytest.mark.parametrize("kind", ["bf16", "tied"])
def test_the_head_takes_fp32_rows_without_converting_its_matrix(
    checkpoints: dict[str, Path], kind: str
) -> None:
    target = load_tiny(checkpoints[kind], on_host=False)
    rows = mx.random.normal((7, target.hidden_size), key=mx.random.key(3))
    logits = target.head(rows)
    assert logits.dtype == mx.float32
    assert np.array_equal(np.array(logits), np.array(target.head(rows.astype(mx.bfloat16))))


@each_kind
@pytest.mark.parametrize("piece", [1, 3, 8, 16])
def test_a_prompt_in_pieces_gives_the_same_bits(
    targets: dict[str, Target], kind: str, piece: int
) -> None:
    target, prompt = targets[kind], random_prompt(21)
    whole = target.advance(prompt, target.new_state(), (0, 2))
    state, features = target.new_state(), []
    for at in range(0, 21, piece):
        part = target.advance(prompt[at : at + piece], state, (0, 2))
        features.append(np.array(part.features))
    assert np.array_equal(np.array(part.logits), np.array(whole.logits))
    assert np.array_equal(np.concatenate(features), np.array(whole.features))


def test_sequences_on_one_target_do_not_touch_each_other(hybrid: Target) -> None:
    one, other = random_prompt(9, seed=1), random_prompt(9, seed=2)
    alone = [np.array(hybrid.advance(p, hybrid.new_state(), ()).logits) for p in (one, other)]
    states = hybrid.new_state(), hybrid.new_state()
    for at in range(9):
        mixed = [hybrid.advance([p[at]], s, ()) for p, s in zip((one, other), states, strict=True)]
    for got, expected in zip(mixed, alone, strict=True):
        assert np.array_equal(np.array(got.logits), expected)


@pytest.mark.parametrize("tap", [-1, 99])
def test_a_tap_that_is_no_block_is_refused(hybrid: Target, tap: int) -> None:
    state = hybrid.new_state()
    with pytest.raises(ValueError, match="are not blocks"):
        hybrid.verify([1, 2], state, (0, tap))
    assert state.open_rows == 0


def test_features_lie_in_the_order_of_the_taps(hybrid: Target) -> None:
    tokens = random_prompt(5)
    one, other = (hybrid.verify(tokens, hybrid.new_state(), (tap,)).features for tap in (0, 2))
    both = hybrid.verify(tokens, hybrid.new_state(), (2, 0)).features
    assert np.array_equal(np.array(both), np.concatenate([np.array(other), np.array(one)], axis=1))
