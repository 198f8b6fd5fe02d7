"""Prompts become token ids, or one sentence says what is wrong with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from lse_mlx import demo_pair
from lse_mlx.errors import CheckpointError, RequestError
from lse_mlx.target.tokenizer import Thinking, Tokenizer, load_tokenizer
from tests.tiny_models import save_tokenizer

END, START = 0, 1
VOCAB = 262


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder, None, VOCAB)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer without a chat template."""
    folder = save_tokenizer(tmp_path_factory.mktemp("bare"), template=False)
    return load_tokenizer(folder, None, VOCAB)


def refusal(tokenizer: Tokenizer, prompt: Any, *named: str, raw: bool = False) -> None:
    """`prompt` is refused with one sentence that names every one of `named`."""
    with pytest.raises(RequestError) as refused:
        tokenizer.encode(prompt, raw)
    message = str(refused.value)
    assert message.endswith(".")
    assert "\n" not in message
    for name in named:
        assert name in message


def test_raw_text_is_encoded_as_it_is(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("the ant", raw=True)
    assert [tokenizer.decode([t]) for t in tokens] == ["the", " ", "an", "t"]


def test_text_is_one_user_message_in_the_template(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("hi")
    assert tokenizer.decode(tokens) == "<|start|>user:hi<|end|><|start|>assistant:"
    assert tokens == tokenizer.encode([{"role": "user", "content": "hi"}])
    assert tokens.count(START) == 2
    assert tokens.count(END) == 1


def test_messages_keep_their_order(tokenizer: Tokenizer) -> None:
    said = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    tokens = tokenizer.encode([{"role": role, "content": text} for role, text in said])
    expected = "".join(f"<|start|>{role}:{text}<|end|>" for role, text in said)
    assert tokenizer.decode(tokens) == expected + "<|start|>assistant:"


def test_token_ids_are_taken_as_they_are(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode([0, VOCAB - 1, 5]) == [0, VOCAB - 1, 5]
    assert tokenizer.encode((7, 7)) == [7, 7]


def test_without_a_template_text_is_plain_and_messages_are_refused(bare: Tokenizer) -> None:
    assert bare.encode("hi") == bare.encode("hi", raw=True)
    refusal(bare, [{"role": "user", "content": "hi"}], "chat template")


@pytest.mark.parametrize("prompt", ["", "  \n ", [], ()])
def test_an_empty_prompt_is_refused(tokenizer: Tokenizer, bare: Tokenizer, prompt: Any) -> None:
    refusal(tokenizer, prompt, "empty")
    refusal(bare, prompt, "empty")


def test_raw_white_space_is_a_prompt(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("\n", raw=True)) == 1
    refusal(tokenizer, "", "empty", raw=True)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**12])
def test_ids_outside_the_vocabulary_are_named(tokenizer: Tokenizer, token: int) -> None:
    refusal(tokenizer, [3, token], str(token), str(VOCAB))


@pytest.mark.parametrize("item", [True, False, 1.0, "7", None])
def test_ids_that_are_no_integers_are_named(tokenizer: Tokenizer, item: Any) -> None:
    refusal(tokenizer, [3, item], repr(item))


def test_a_tokenizer_larger_than_the_model_is_noticed(folder: Path) -> None:
    small = load_tokenizer(folder, None, 40)
    refusal(small, "zebra", "outside the vocabulary of 40")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"content": "hi"}, "{'content': 'hi'}"),
        ({"role": "user"}, "{'role': 'user'}"),
        ({"role": 3, "content": "hi"}, "'role': 3"),
        ({"role": "user", "content": 5}, "'content': 5"),
        ({"role": "assistant", "content": 5, "tool_calls": [{}]}, "'content': 5"),
        ({}, "{}"),
    ],
    ids=str,
)
def test_a_message_without_role_or_content_is_named(
    tokenizer: Tokenizer, message: Any, named: str
) -> None:
    refusal(tokenizer, [{"role": "user", "content": "hi"}, message], named, "a role and a content")


@pytest.mark.parametrize(
    "prompt",
    [[10**5000], [-(10**5000)], ["x" * 5000], [{"role": 10**5000}], [{"role": "x" * 5000}]],
    ids=["large", "small", "text", "role", "long role"],
)
def test_a_long_wrong_value_is_quoted_short(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(RequestError) as refused:
        tokenizer.encode(prompt)
    assert len(str(refused.value)) < 250


def test_what_the_template_refuses_is_said(tokenizer: Tokenizer) -> None:
    refusal(tokenizer, [{"role": "pirate", "content": "hi"}], "unknown role pirate")
    refusal(tokenizer, [{"role": "pirate. Ahoy.", "content": "hi"}], "unknown role pirate")


def test_messages_and_ids_do_not_mix(tokenizer: Tokenizer) -> None:
    refusal(tokenizer, [{"role": "user", "content": "hi"}, 5], "role")


def test_stop_tokens_are_the_named_ones_and_the_tokenizers_own(folder: Path) -> None:
    assert load_tokenizer(folder, None, VOCAB).stop_tokens == {END}
    assert load_tokenizer(folder, [9, 11], VOCAB).stop_tokens == {END, 9, 11}


@pytest.mark.parametrize("text", ["plain words", "naïve café, 東京, 🙂 and\nmore "])
def test_streamed_pieces_are_whole_characters_and_join_to_the_text(
    tokenizer: Tokenizer, text: str
) -> None:
    stream = tokenizer.streaming()
    pieces = [stream.add(token) for token in tokenizer.encode(text, raw=True)]
    assert stream.finish() == ""
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_what_ends_inside_a_character_is_streamed_as_it_is_decoded(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("naïve 🙂", raw=True)[:-1]
    tokens += [VOCAB + 5, *tokenizer.encode("an", raw=True)]  # the first is in no vocabulary
    stream = tokenizer.streaming()
    pieces = [*(stream.add(token) for token in tokens), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(tokens) == "naïve \ufffdan"


def test_two_streams_do_not_share_text(tokenizer: Tokenizer) -> None:
    one, other = tokenizer.streaming(), tokenizer.streaming()
    assert "".join(one.add(token) for token in tokenizer.encode("left", raw=True)) == "left"
    assert other.finish() == ""


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path, None, VOCAB)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"type": "none"}}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text, "utf-8")
    with pytest.raises(CheckpointError, match=r"The tokenizer in .* does not load \(.*\.$"):
        load_tokenizer(tmp_path, None, VOCAB)


def test_a_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{", "utf-8")
    with pytest.raises(CheckpointError, match=r"The tokenizer in .* does not load \(.*\.$"):
        load_tokenizer(tmp_path, None, VOCAB)


def test_a_template_that_does_not_parse_is_said(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    about = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(about | {"chat_template": "{% for %}"}), "utf-8")
    refusal(load_tokenizer(tmp_path, None, VOCAB), "hi", "template")


@pytest.mark.parametrize(
    "text",
    [
        "on it.\n\nLuna",
        "it's 12 o'clock,\tisn't it?\n",
        "  two  spaces ",
        "caf\u00e9 \U0001f98a\u200d",
        "a\r\nb",
    ],
)
def test_text_is_split_as_tokenizer_json_says(text: str) -> None:
    """And not as the class that is registered for the model's family would."""
    stored = tokenizers.Tokenizer.from_file(str(demo_pair.TARGET / "tokenizer.json"))
    loaded = load_tokenizer(demo_pair.TARGET, None, 4096)
    assert loaded.encode(text, raw=True) == stored.encode(text).ids
    assert loaded.decode(stored.encode(text).ids) == text


def with_tokens(folder: Path, *texts: str) -> Tokenizer:
    """The tokenizer in `folder` with these as tokens of their own."""
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_tokens([tokenizers.AddedToken(text) for text in texts])
    raw.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder, None, raw.get_vocab_size())


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that has markers of a thinking part."""
    return with_tokens(save_tokenizer(tmp_path_factory.mktemp("thinker")), "<think>", "</think>")


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("a", False),
        ("a<think>", True),
        ("a<think>\n", True),
        ("a<think>b</think>c", False),
        ("a<think>b</think>c<think>d", True),
        ("a</think>", False),
        # A message that only speaks of the marker has an end of its own.
        ("<|start|>user:what is <think>?<|end|><|start|>assistant:", False),
        ("<|start|>user:what is <think>?<|end|><|start|>assistant:<think>\n", True),
    ],
)
def test_a_prompt_may_end_inside_the_thinking_part(
    thinker: Tokenizer, prompt: str, inside: bool
) -> None:
    thinking = thinker.thinking(thinker.encode(prompt, raw=True))
    assert thinking == Thinking(VOCAB, VOCAB + 1, "<think>", "</think>", inside)


def test_without_a_marker_of_one_token_there_is_no_thinking_part(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert tokenizer.thinking(tokenizer.encode("<think>", raw=True)) is None
    longer = with_tokens(save_tokenizer(tmp_path), "<|channel>", "<channel|>")
    assert longer.wrapper.has_thinking
    assert longer.thinking(longer.encode("<|channel>thought", raw=True)) is None
