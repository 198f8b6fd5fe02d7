"""The demo pair's tokenizer and the text form of its chats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4_096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
"""Ids 0..3. The last one is the drafter's: it stands where a token is to be proposed."""
MAX_LENGTH = 4_096

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ ('' if loop.first else '\\n') + '<|im_start|>' + message['role'] + '\\n'"
    " + message['content'] + '<|im_end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ ('\\n' if messages else '') + '<|im_start|>assistant\\n' }}"
    "{%- endif -%}"
)
"""The same text as `opening` and `chat_pieces`; no system turn unless the caller gives one."""


def opening(question: str, *, first: bool = True) -> str:
    """A user turn and the start of the answer; later turns join the chat with a line break."""
    joint = "" if first else "\n"
    return f"{joint}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def chat_pieces(turns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """For each (question, reply): the text up to the reply, and the reply with its end token."""
    return [
        (opening(question, first=i == 0), f"{reply}<|im_end|>")
        for i, (question, reply) in enumerate(turns)
    ]


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE in which every digit stands alone and nothing is normalized."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    # Readers of tokenizer.json take a bare ByteLevel decoder as leave to strip the first space of
    # a text; inside a sequence it decodes the same bytes and is left alone.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer folder that Transformers and mlx-lm load."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    generation = {
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
        "do_sample": True,
        "temperature": 0.7,
    }
    for name, content in (
        ("tokenizer_config.json", config),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
