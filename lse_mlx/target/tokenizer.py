"""The target's tokenizer: prompts in, text out."""

import numbers
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_wrapper
from transformers import PretrainedConfig

from lse_mlx.errors import CheckpointError, RequestError, reason, shown
from lse_mlx.target.text_stream import Plan, TextStream, read_plan

Message = dict[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True)
class Thinking:
    """The part of a reply in which a model thinks, between two markers of one token each.

    opens, closes:    the markers' ids
    opening, closing: their texts
    inside:           whether the prompt ends inside such a part
    """

    opens: int
    closes: int
    opening: str
    closing: str
    inside: bool


@dataclass(frozen=True)
class Tokenizer:
    """mlx-lm's tokenizer with the rules a request needs.

    wrapper: mlx-lm's TokenizerWrapper
    vocab_size: the target's; ids from it on are refused
    """

    wrapper: TokenizerWrapper
    vocab_size: int

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Ids that end a reply."""
        return frozenset(self.wrapper.eos_token_ids)

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt.

        A string is one user message put through the chat template, or plain text if `raw` is set or
        there is no template; a list of messages always goes through the template; a list of ids is
        taken as it is. Raises RequestError for an empty prompt, ids outside the vocabulary, and
        messages that the template refuses.
        """
        if isinstance(prompt, str):
            _check_text(prompt)
            if not prompt.strip() and not (raw and prompt):
                raise RequestError("The prompt is empty: give it some text.")
            if raw or not self.wrapper.has_chat_template:
                return self._checked(self.wrapper.encode(prompt))
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, bytes | dict) or not isinstance(prompt, Iterable):
            raise RequestError(
                f"The prompt is a {type(prompt).__name__}: "
                "give text, a list of messages, or a list of token ids."
            )
        items: list[Any] = list(prompt)
        if not items:
            raise RequestError("The prompt is empty: give it at least one message or token.")
        if all(isinstance(item, dict) for item in items):
            return self._checked(self._apply_template(items))
        return self._checked(items)

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`."""
        return self.wrapper.decode(tokens)

    def streaming(self) -> TextStream:
        """A fresh stream, which gives the text of tokens as soon as no later one can change it."""
        return TextStream(self.wrapper._tokenizer, self._plan)

    def thinking(self, prompt: Sequence[int]) -> Thinking | None:
        """The thinking part of a reply to `prompt`; None if no single tokens mark one.

        The prompt ends inside one if nothing ends the last that it opens: neither the closing
        marker, nor a stop token as at the end of a message.
        """
        begin, end = self.wrapper.think_start_tokens, self.wrapper.think_end_tokens
        if begin is None or end is None or not len(begin) == len(end) == 1:
            return None
        opens, closes = begin[0], end[0]
        marks = {opens, closes, *self.stop_tokens}
        last = next((token for token in reversed(prompt) if token in marks), None)
        return Thinking(
            opens, closes, self.decode([opens]), self.decode([closes]), inside=last == opens
        )

    @cached_property
    def _plan(self) -> Plan | None:
        return read_plan(self.wrapper._tokenizer)

    def _apply_template(self, messages: list[Message]) -> list[int]:
        if not self.wrapper.has_chat_template:
            raise RequestError(
                "This model has no chat template: give the prompt as text instead of messages."
            )
        for message in messages:
            content = message.get("content")
            says = message.get("tool_calls") if content is None else isinstance(content, str | list)
            if isinstance(content, str):
                _check_text(content)
            if not isinstance(message.get("role"), str) or not says:
                raise RequestError(
                    f"The message {shown(message)} is not a chat message: "
                    "give it a role and a content of text."
                )
        try:
            return self.wrapper.apply_chat_template(messages, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RequestError(
                f"The chat template refuses these messages ({reason(error)}): "
                "check their roles and order."
            ) from error

    def _checked(self, tokens: list[Any]) -> list[int]:
        if not tokens:
            raise RequestError("The prompt is empty: give it some text.")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, numbers.Integral):
                raise RequestError(
                    f"The prompt holds {shown(token)}: give text, messages, or integer token ids."
                )
            if not 0 <= int(token) < self.vocab_size:
                raise RequestError(
                    f"Token id {shown(int(token))} is outside the vocabulary of {self.vocab_size}: "
                    "use ids of this model's tokenizer."
                )
        return [int(token) for token in tokens]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The prompt is not valid text at character {error.start}: give it as UTF-8."
        ) from error


def load_tokenizer(folder: Path, stop_tokens: list[int] | None, vocab_size: int) -> Tokenizer:
    """Load the tokenizer in `folder`.

    stop_tokens: the checkpoint's end tokens, if it names any; the tokenizer's own is always one.
    Raises CheckpointError when there is none or it does not load.
    """
    if not (folder / "tokenizer.json").exists():
        raise CheckpointError(
            f"{folder} has no tokenizer.json: download the tokenizer of this checkpoint."
        )
    try:
        # A bare config: by the model's own one the library would pick a class for the family and
        # split text by that family's rules instead of those in tokenizer.json.
        as_stored = {"config": PretrainedConfig(), "trust_remote_code": False}
        wrapper = load_wrapper(folder, as_stored, eos_token_ids=stop_tokens)
    except (ValueError, OSError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The tokenizer in {folder} does not load ({reason(error)}): "
            "download the checkpoint again."
        ) from error
    # The engine holds a prompt to the context itself; the library's warning would come before it.
    wrapper._tokenizer.model_max_length = sys.maxsize
    return Tokenizer(wrapper, vocab_size)
