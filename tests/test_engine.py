"""The public API with the demo pair: the trained models, the real drafter, real text."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

import lse_mlx
from lse_mlx import demo_pair
from lse_mlx.checkpoints.drafter_config import DFlash2Config
from lse_mlx.checkpoints.target_config import read_stop_tokens
from lse_mlx.drafters.dflash2.drafter import DFlash2
from lse_mlx.drafters.dflash2.weights import DFlash2Weights
from lse_mlx.target.loading import load_target
from lse_mlx.target.tokenizer import Tokenizer, load_tokenizer

TURN = "Write a story about a shy fox."


@pytest.fixture(scope="module")
def engine() -> Iterator[lse_mlx.Engine]:
    with lse_mlx.load() as loaded:
        yield loaded


class Endless(Tokenizer):
    """Names no stop token, so that a reply is as long as a test asks for, whatever was trained."""

    stop_tokens = frozenset()


def endless(engine: lse_mlx.Engine) -> lse_mlx.Engine:
    """The same models, whose replies only a limit ends."""
    tokenizer = Endless(engine.tokenizer.wrapper, engine.tokenizer.vocab_size)
    return lse_mlx.Engine(engine.target, tokenizer, engine.drafter)


def held_out(count: int) -> list[str]:
    entries = json.loads(demo_pair.HELD_OUT_PROMPTS.read_text(encoding="utf-8"))
    return [entry["prompt"] for entry in entries[:count]]


@pytest.mark.parametrize("prompt", held_out(30))
def test_greedy_output_equals_plain_output(engine: lse_mlx.Engine, prompt: str):
    fast = engine.generate(prompt, max_tokens=48)
    alone = engine.generate(prompt, max_tokens=48, speculate=False)
    assert fast.token_ids == alone.token_ids
    assert fast.text == alone.text
    assert fast.stop_reason == alone.stop_reason
    assert fast.timings["spec_accepted"] > 0


def test_greedy_output_stays_equal_past_the_drafters_window(engine: lse_mlx.Engine):
    prompt, long = "Tell me a story about a brave sailor.", endless(engine)
    fast = long.generate(prompt, max_tokens=200)  # 128 positions are the window
    assert len(fast.token_ids) == 200
    assert fast.token_ids == long.generate(prompt, max_tokens=200, speculate=False).token_ids


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}])
def test_a_second_turn_equals_a_cold_run(engine: lse_mlx.Engine, options: dict):
    session = engine.session()
    first = engine.generate(TURN, max_tokens=40, session=session, **options)
    turns = [
        {"role": "user", "content": TURN},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Tell me more."},
    ]
    warm = engine.generate(turns, max_tokens=40, session=session, **options)
    cold = engine.generate(turns, max_tokens=40, **options)
    assert warm.token_ids == cold.token_ids
    assert warm.timings["prompt_cached_n"] > first.prompt_tokens
    assert cold.timings["prompt_cached_n"] == 0


def test_pieces_add_up_to_the_result(engine: lse_mlx.Engine):
    pieces = list(engine.stream(TURN, max_tokens=40))
    result = pieces[-1].result
    assert result is not None
    assert "".join(str(piece) for piece in pieces) == result.text
    assert [t for piece in pieces for t in piece.token_ids] == result.token_ids
    assert engine.tokenizer.decode(result.token_ids) == result.text
    assert all(piece.result is None for piece in pieces[:-1])


def test_messages_text_and_ids_are_the_same_prompt(engine: lse_mlx.Engine):
    messages = [{"role": "user", "content": TURN}]
    ids = engine.tokenizer.encode(messages)
    replies = [engine.generate(p, max_tokens=8).token_ids for p in (TURN, messages, ids)]
    assert replies[0] == replies[1] == replies[2]


def test_a_prompt_that_fills_the_context_to_the_last_token(engine: lse_mlx.Engine):
    with lse_mlx.load(context_length=24) as loaded:
        small = endless(loaded)
        ids = small.tokenizer.encode("One day, a little fox", raw=True)
        result = small.generate(ids, max_tokens=None)
        assert len(ids) + len(result.token_ids) == 24
        assert (result.finish_reason, result.stop_reason) == ("length", "context_full")
        expected = endless(engine).generate(ids, max_tokens=24 - len(ids))
        assert result.token_ids == expected.token_ids
        with pytest.raises(lse_mlx.RequestError, match="context holds 24"):
            small.generate(ids * 24)


def test_a_request_is_refused_before_the_first_piece(engine: lse_mlx.Engine):
    with pytest.raises(lse_mlx.RequestError, match="temperature"):
        engine.stream(TURN, temperature=-0.5)
    session = engine.session()
    engine.generate(TURN, max_tokens=4, session=session)
    held = list(session.tokens)
    with pytest.raises(lse_mlx.RequestError, match="seed is -1"):
        engine.stream(TURN, seed=-1, session=session)
    assert session.tokens == held


def test_a_session_of_another_engine_is_refused(engine: lse_mlx.Engine):
    with lse_mlx.load() as other, pytest.raises(lse_mlx.RequestError, match="another engine"):
        engine.generate(TURN, session=other.session())
    with pytest.raises(lse_mlx.RequestError, match=r"session is 'mine': give one of `engine"):
        engine.generate(TURN, session="mine")  # pyright: ignore


def test_two_engines_live_side_by_side(engine: lse_mlx.Engine):
    with lse_mlx.load() as other:
        mine, theirs = engine.stream(TURN, max_tokens=16), other.stream(TURN, max_tokens=16)
        pairs = list(zip(mine, theirs, strict=True))
    assert [a.token_ids for a, _ in pairs] == [b.token_ids for _, b in pairs]


def test_a_closed_engine_says_so():
    engine = lse_mlx.load()
    asked_before = engine.stream(TURN)
    engine.close()
    engine.close()
    with pytest.raises(lse_mlx.RequestError, match="closed"):
        next(asked_before)
    with pytest.raises(lse_mlx.RequestError, match="closed"):
        engine.generate(TURN)


def test_a_target_alone_decodes_plain():
    with lse_mlx.load(drafter=None) as alone:
        result = alone.generate(TURN, max_tokens=8)
    assert result.timings["spec_method"] == "none"
    assert "spec_steps" not in result.timings


def test_the_device_form_decodes_the_same_with_and_without_the_drafter():
    """What runs on a GPU, on MLX's CPU: quantized products, bf16, MLX between the products."""
    target = load_target(demo_pair.TARGET, on_host=False)
    config = DFlash2Config.read(demo_pair.DRAFTER)
    weights = DFlash2Weights.read(demo_pair.DRAFTER, config)
    tokenizer = load_tokenizer(
        demo_pair.TARGET, read_stop_tokens(demo_pair.TARGET), target.vocab_size
    )
    with lse_mlx.Engine(
        target, tokenizer, DFlash2(config, weights, target, on_host=False)
    ) as engine:
        fast = engine.generate(TURN, max_tokens=24)
        assert fast.token_ids == engine.generate(TURN, max_tokens=24, speculate=False).token_ids
        assert fast.timings["spec_accepted"] > 8


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (3, "a int"),
        (b"hi", "a bytes"),
        ({"role": "user", "content": "hi"}, "a dict"),
        ([1, 2.5], "2.5"),
        ([True], "True"),
        ([[1]], "[1]"),
        ("caf\udce9", "character 3"),
        ([{"role": "user", "content": "caf\udce9"}], "character 3"),
        ([{"content": "hi"}], "role"),
        ([{"role": "user", "content": None}], "a role and a content"),
    ],
)
def test_a_prompt_of_another_kind_is_one_sentence(engine: lse_mlx.Engine, prompt, words: str):
    with pytest.raises(lse_mlx.RequestError) as refused:
        engine.generate(prompt)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": float("inf")},
        {"top_k": 2.0},
        {"top_p": None},
        {"min_p": "0.1"},
        {"max_tokens": 4.0},
        {"max_tokens": True},
        {"seed": 1.5},
        {"seed": "x"},
        {"session": 3},
    ],
)
def test_an_option_of_another_kind_is_one_sentence(engine: lse_mlx.Engine, options: dict):
    with pytest.raises(lse_mlx.RequestError, match=next(iter(options)).split("_")[0]):
        engine.stream(TURN, **options)


def test_numbers_of_numpy_are_numbers(engine: lse_mlx.Engine):
    ids = np.array(engine.tokenizer.encode(TURN))
    options = {"temperature": np.float32(0.8), "top_k": np.int64(5), "seed": np.uint64(3)}
    found = engine.generate(ids, max_tokens=np.int32(4), **options)
    plain = {"temperature": float(np.float32(0.8)), "top_k": 5, "seed": 3}
    assert found.token_ids == engine.generate(ids.tolist(), max_tokens=4, **plain).token_ids


def test_what_a_notebook_shows_is_short(engine: lse_mlx.Engine):
    session = engine.session()
    result = engine.generate(TURN, max_tokens=4, session=session)
    assert str(result) == result.text
    assert max(len(repr(shown)) for shown in (engine, session)) < 400
