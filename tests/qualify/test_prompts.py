"""Prompts from a file: a JSON list or a line each, and one sentence for anything else."""

import json
from pathlib import Path

import pytest

from lse_mlx.errors import RequestError
from lse_mlx.qualify.prompts import demo_prompts, read_prompts


def test_the_demo_pair_has_its_own() -> None:
    prompts = demo_prompts()
    assert len(prompts) > 100
    assert all(text.strip() for text in prompts)


def test_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Say one.\n\n  Say [two].  \n", "utf-8")
    assert read_prompts(path) == ["Say one.", "Say [two]."]


@pytest.mark.parametrize("entries", [["one", "two"], [{"prompt": "one", "kind": "a"}, "two"]])
def test_json_has_texts_or_objects(entries: list, tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(entries), "utf-8")
    assert read_prompts(path) == ["one", "two"]


REFUSED = {
    "empty": b"",
    "blank": b" \n\n",
    "an empty list": b"[]",
    "an object": b'{"prompts": ["one"]}',
    "half a list": b'["one",',
    "numbers": b"[1, 2]",
    "a blank entry": b'["one", " "]',
    "objects without a prompt": b'[{"text": "one"}]',
    "no text": b"caf\xe9",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", REFUSED)
def test_anything_else_is_one_sentence(case: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(REFUSED[case])
    with pytest.raises(RequestError) as refused:
        read_prompts(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nothing\.txt"):
        read_prompts(tmp_path / "nothing.txt")
    with pytest.raises(RequestError, match=tmp_path.name):
        read_prompts(tmp_path)
