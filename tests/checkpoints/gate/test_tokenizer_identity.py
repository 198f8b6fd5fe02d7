"""Two tokenizers are one where every id stands for the same token of the same kind."""

import hashlib
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.gate.tokenizer_identity import (
    TokenizerIdentity,
    has_tokenizer,
    read_tokenizer,
)
from lse_mlx.errors import CheckpointError
from tests.checkpoints.gate.sparse_checkpoints import read_json, write_json

ADDED = [
    {"id": 3, "content": "<end>", "special": True, "lstrip": False},
    {"id": 4, "content": "<tool>", "special": False},
]
VOCABULARY = {"a": 0, "b": 1, "é€": 2}
SAME = TokenizerIdentity({**VOCABULARY, "<end>": 3, "<tool>": 4}, {3: True, 4: False})


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    return {"added_tokens": ADDED, "model": {"type": "BPE", "vocab": VOCABULARY}, **changes}


def saved(folder: Path, **files: Any) -> Path:
    """A folder with the named JSON files."""
    for name, values in files.items():
        write_json(folder / f"{name}.json", values)
    return folder


def test_the_canonical_form_is_what_the_docstring_says() -> None:
    form = (
        b'{"added":[[3,true],[4,false]],"roles":[],"tokens":[[0,"a"],[1,"b"],[2,"\\u00e9\\u20ac"],'
        b'[3,"<end>"],[4,"<tool>"]]}'
    )
    assert SAME.sha256 == hashlib.sha256(form).hexdigest()
    roles = {"unk_token": "b", "eos_token": "<end>"}
    form = form.replace(b"[]", b'[["eos_token","<end>"],["unk_token","b"]]')
    assert replace(SAME, roles=roles).sha256 == hashlib.sha256(form).hexdigest()


def test_the_demo_tokenizer_by_its_definition() -> None:
    held = read_json(demo_pair.TARGET / "tokenizer.json")
    added = {entry["content"]: entry["id"] for entry in held["added_tokens"]}
    found = read_tokenizer(demo_pair.TARGET)
    assert found.tokens == held["model"]["vocab"] | added
    assert found.added == {entry["id"]: entry["special"] for entry in held["added_tokens"]}
    assert found.largest == len(found.tokens) - 1
    assert found.text_token(found.tokens["!"]) == "!"
    assert found.text_token(added["<|mask|>"]) is None
    assert found.text_token(len(found.tokens)) is None


def test_order_and_spelling_of_the_files_do_not_matter(tmp_path: Path) -> None:
    tokens = list(VOCABULARY.items())
    random.Random(0).shuffle(tokens)
    shuffled = tokenizer_json(
        model={"vocab": dict(tokens), "merges": [["a", "b"]]}, added_tokens=ADDED[::-1]
    )
    inside = tokenizer_json(model={"vocab": {**VOCABULARY, "<end>": 3, "<tool>": 4}})
    for name, values in (("plain", tokenizer_json()), ("other", shuffled), ("inside", inside)):
        found = read_tokenizer(saved(tmp_path / name, tokenizer=values))
        assert found == SAME
        assert found.sha256 == SAME.sha256
        assert found.first_difference(SAME) is None


def test_the_older_files_say_the_same(tmp_path: Path) -> None:
    decoder = {str(entry["id"]): entry for entry in ADDED}
    folders = [
        saved(tmp_path / "1", vocab=VOCABULARY, tokenizer_config={"added_tokens_decoder": decoder}),
        saved(
            tmp_path / "2",
            vocab=VOCABULARY,
            added_tokens={"<end>": 3, "<tool>": 4},
            tokenizer_config={"added_tokens_decoder": {"3": ADDED[0]}},
        ),
        saved(
            tmp_path / "3",
            tokenizer=tokenizer_json(added_tokens=ADDED[:1]),
            tokenizer_config={"added_tokens_decoder": decoder},
        ),
        saved(
            tmp_path / "4",
            tokenizer=tokenizer_json(model={"vocab": [["a", -1.5], ["b", -2.5], ["é€", -3]]}),
        ),
    ]
    for folder in folders:
        assert read_tokenizer(folder) == SAME


@pytest.mark.parametrize(
    ("changes", "mine", "theirs"),
    [
        ({"model": {"vocab": {"a": 0, "c": 1, "é€": 2}}}, "1 = 'c' (of text)", "1 = 'b' (of text)"),
        ({"model": {"vocab": {"b": 0, "a": 1, "é€": 2}}}, "0 = 'b' (of text)", "0 = 'a' (of text)"),
        ({"model": {"vocab": {**VOCABULARY, "d": 5}}}, "token 5 = 'd' (of text)", "no token 5"),
        ({"model": {"vocab": {"a": 0, "b": 1}}}, "no token 2", "token 2 = 'é€' (of text)"),
        ({"model": {"vocab": {**VOCABULARY, "A": 0}}}, "0 = 'A' and 'a' (of text)", "0 = 'a' (of"),
        ({"added_tokens": ADDED[:1]}, "no token 4", "token 4 = '<tool>' (added)"),
        ({"added_tokens": [ADDED[0] | {"content": "<eos>"}, ADDED[1]]}, "'<eos>' (special)",
         "'<end>' (special)"),
        ({"added_tokens": [ADDED[0] | {"special": False}, ADDED[1]]}, "'<end>' (added)",
         "'<end>' (special)"),
        ({"added_tokens": [ADDED[0] | {"id": 9}, ADDED[1]]}, "no token 3", "token 3 = '<end>'"),
    ],
)  # fmt: skip
def test_the_first_differing_token_is_named(
    tmp_path: Path, changes: dict[str, Any], mine: str, theirs: str
) -> None:
    other = read_tokenizer(saved(tmp_path, tokenizer=tokenizer_json(**changes)))
    assert other.sha256 != SAME.sha256
    said = other.first_difference(SAME)
    assert said is not None
    assert mine in said[0]
    assert theirs in said[1]
    assert SAME.first_difference(other) == (said[1], said[0])


def test_a_role_is_its_token_however_it_is_written(tmp_path: Path) -> None:
    forms = (
        {"eos_token": "<end>", "unk_token": None},
        {"eos_token": {"__type": "AddedToken", "content": "<end>", "lstrip": True}},
    )
    for place, about in enumerate(forms):
        folder = saved(tmp_path / f"{place}", tokenizer=tokenizer_json(), tokenizer_config=about)
        assert read_tokenizer(folder) == replace(SAME, roles={"eos_token": "<end>"})


def test_the_first_differing_role_is_named_where_both_name_roles() -> None:
    one = replace(SAME, roles={"bos_token": "a", "eos_token": "<end>", "pad_token": "a"})
    other = replace(SAME, roles={"bos_token": "a", "pad_token": "b"})
    assert one.first_difference(other) == ("eos_token = '<end>'", "eos_token = None")
    assert one.first_difference(replace(one)) is one.first_difference(SAME) is None


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer": {}},
        {"tokenizer": {"model": {}}},
        {"tokenizer": {"model": {"vocab": {"a": "0"}}}},
        {"tokenizer": {"model": {"vocab": {"a": -1}}}},
        {"tokenizer": {"model": {"vocab": {"a": True}}}},
        {"tokenizer": {"model": {"vocab": [3]}}},
        {"tokenizer": {"model": {"vocab": [[[1], 0.5]]}}},
        {"tokenizer": {"model": {"vocab": {}}}},
        {"tokenizer": tokenizer_json(added_tokens={})},
        {"tokenizer": tokenizer_json(added_tokens=[3])},
        {"tokenizer": tokenizer_json(added_tokens=[{"id": 3}])},
        {"tokenizer": tokenizer_json(added_tokens=[{"content": "x", "id": "3"}])},
        {"tokenizer": tokenizer_json(added_tokens=[{"content": "x", "id": 3, "special": 1}])},
        {"tokenizer": tokenizer_json(), "tokenizer_config": {"added_tokens_decoder": [1]}},
        {"tokenizer": tokenizer_json(), "tokenizer_config": {"added_tokens_decoder": {"x": {}}}},
        {"tokenizer": tokenizer_json(), "added_tokens": {"<x>": None}},
        {"tokenizer": tokenizer_json(), "tokenizer_config": {"eos_token": 3}},
        {"tokenizer": tokenizer_json(), "tokenizer_config": {"eos_token": {"content": None}}},
        {"vocab": {"a": 0.5}},
    ],
)
def test_what_is_no_tokenizer_is_one_sentence(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read_tokenizer(saved(tmp_path, **files))
    assert_one_sentence(str(refusal.value), "is no tokenizer (")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe\x00"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text)
    assert has_tokenizer(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        read_tokenizer(tmp_path)
    assert_one_sentence(str(refusal.value), "JSON")


def test_a_folder_without_a_vocabulary_has_none(tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<end>"})
    assert not has_tokenizer(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        read_tokenizer(tmp_path)
    assert_one_sentence(str(refusal.value), "has no tokenizer.json")


def test_nothing_that_a_tokenizer_names_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(demo_pair.TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    ran = tmp_path / "ran"
    (folder / "tokenization_custom.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    about = read_json(folder / "tokenizer_config.json")
    about["auto_map"] = {"AutoTokenizer": ["tokenization_custom.Custom", None]}
    write_json(folder / "tokenizer_config.json", about)
    assert read_tokenizer(folder) == read_tokenizer(demo_pair.TARGET)
    assert not ran.exists()


def assert_one_sentence(message: str, words: str) -> None:
    assert words in message
    assert message.endswith(": download the checkpoint again.") or "download the tok" in message
    assert "\n" not in message
    assert json.dumps(message)
