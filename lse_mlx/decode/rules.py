"""What a request asks of the logits before a token is chosen: bias, penalties, and end tokens.

The arithmetic of bias and penalties is mlx-lm's (`mlx_lm.sample_utils.make_logits_processors`),
called for each row with that row's own history, so a row of a verified block and the same row in
plain decoding see the same operations on the same numbers.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from lse_mlx.decode.values import check_integer, check_number
from lse_mlx.errors import RequestError, shown

EndTokens = Literal["allowed", "banned", "required"]

WINDOW = 64
MAX_WINDOW = 1 << 30
MAX_REPETITION = 1000.0
MAX_PENALTY = 100.0
MAX_BIAS = 1e30
# As JSON writes an integer; longer ones are no token's id.
DECIMAL_ID = re.compile(r"0|[1-9][0-9]{0,17}")


def _checked_bias(given: Any) -> dict[int, float]:
    """A private copy of a bias with plain ids and numbers; RequestError for anything else."""
    if not isinstance(given, Mapping):
        raise RequestError(
            f"logit_bias is {shown(given)}: give a mapping from token ids to numbers."
        )
    bias: dict[int, float] = {}
    for key, value in given.items():
        token = int(key) if isinstance(key, str) and DECIMAL_ID.fullmatch(key) else key
        check_integer("logit_bias id", token, 0, "a token id, 0 or above")
        wanted = f"a finite number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
        check_number(f"logit_bias of token {shown(int(token))}", value, -MAX_BIAS, MAX_BIAS, wanted)
        if int(token) in bias:
            raise RequestError(
                f"logit_bias names token {shown(int(token))} twice, as a number and as a string: "
                "give it one bias."
            )
        bias[int(token)] = float(value)
    return bias


@dataclass(frozen=True)
class Penalties:
    """Bias and penalties, in this order: logit_bias, repetition, presence, frequency.

    Every one works in fp32, on a token's logit as those before it left it. A window is how many of
    the last tokens count, prompt and reply alike; 0, which mlx-lm would read as all, is refused.

    repetition: from 0.001 to 1000; 1 is none. Each distinct token of the window once, however often
        it occurs: a negative logit is multiplied by it, any other divided (Keskar et al. 2019)
    presence:   from -100 to 100; 0 is none. Subtracted once from each distinct token of the window
    frequency:  from -100 to 100; 0 is none. Subtracted for each occurrence, one after another
    logit_bias: token id -> a number from -1e30 to 1e30 that is added, whatever the history; an id
        may be a decimal string, as JSON has it

    Values of another kind or out of range raise RequestError with the name of the public option
    (`repetition_penalty`, `repetition_window`, ...); nothing is clamped.
    """

    repetition: float = 1.0
    repetition_window: int = WINDOW
    presence: float = 0.0
    presence_window: int = WINDOW
    frequency: float = 0.0
    frequency_window: int = WINDOW
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_number(
            "repetition_penalty",
            self.repetition,
            1 / MAX_REPETITION,
            MAX_REPETITION,
            f"a number from {1 / MAX_REPETITION:g} to {MAX_REPETITION:g}, where 1 is no penalty",
        )
        for name, value in (("presence", self.presence), ("frequency", self.frequency)):
            wanted = f"a number from {-MAX_PENALTY:g} to {MAX_PENALTY:g}, where 0 is no penalty"
            check_number(f"{name}_penalty", value, -MAX_PENALTY, MAX_PENALTY, wanted)
        for name in ("repetition", "presence", "frequency"):
            window = getattr(self, f"{name}_window")
            wanted = f"a count of at least 1, or no {name}_penalty"
            check_integer(f"{name}_window", window, 1, wanted)
            # Plain numbers: a NumPy scalar would decide the type of the arithmetic. No sequence is
            # longer than `MAX_WINDOW`, and MLX counts no further.
            object.__setattr__(self, f"{name}_window", min(int(window), MAX_WINDOW))
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def active(self) -> bool:
        """Whether any of them can change a logit."""
        return bool(self._processors)

    @cached_property
    def window(self) -> int:
        """How many of the last tokens any penalty looks at."""
        windows = (
            self.repetition_window if self.repetition != 1 else 0,
            self.presence_window if self.presence != 0 else 0,
            self.frequency_window if self.frequency != 0 else 0,
        )
        return max(windows)

    @cached_property
    def _processors(self) -> list[Callable[[mx.array, mx.array], mx.array]]:
        return make_logits_processors(
            logit_bias={token: bias for token, bias in self.logit_bias.items() if bias != 0},
            repetition_penalty=self.repetition if self.repetition != 1 else None,
            repetition_context_size=self.repetition_window,
            presence_penalty=self.presence,
            presence_context_size=self.presence_window,
            frequency_penalty=self.frequency,
            frequency_context_size=self.frequency_window,
        )

    def apply(self, logits: mx.array, history: list[int]) -> mx.array:
        """fp32 [1, vocab] after bias and penalties; `history` may be longer than the window."""
        tokens = mx.array(history[-self.window :] if self.window else [], mx.int32)
        row = mx.array(logits)  # the processors write into what they are given
        for process in self._processors:
            row = process(tokens, row)
        return row

    def check_vocab(self, vocab_size: int) -> None:
        """Raise RequestError for a bias of an id that the vocabulary does not have."""
        outside = max(self.logit_bias, default=0)
        if outside >= vocab_size:
            raise RequestError(
                f"logit_bias names token {shown(outside)}, outside the vocabulary of {vocab_size}: "
                "give ids of this model's tokenizer."
            )


@dataclass(frozen=True)
class Rules:
    """A request's penalties, and whether and when a stop token may be chosen.

    stop_tokens: the ids that end the reply
    min_tokens:  none of them as one of the first `min_tokens` tokens, at least 0
    end_tokens:  "allowed"; "banned", never one of them; "required", so that the reply ends by one:
                 where nothing ended it before, token number `most` is one of them
    most:        how many tokens can be emitted at all; needed where one is required
    Raises RequestError for another value, and for wishes that exclude each other.
    """

    penalties: Penalties = Penalties()
    stop_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    end_tokens: EndTokens = "allowed"
    most: int | None = None

    def __post_init__(self) -> None:
        check_integer("min_tokens", self.min_tokens, 0, "0 for no least count, or a count")
        if not isinstance(self.end_tokens, str) or self.end_tokens not in get_args(EndTokens):
            raise RequestError(
                f"end_tokens is {shown(self.end_tokens)}: give 'allowed', 'banned' or 'required'."
            )
        if self.most is not None and self.min_tokens > self.most:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, and at most {self.most} can be emitted: lower it, "
                "or raise max_tokens where the context has room."
            )
        if self.end_tokens == "required":
            self._check_required(self.stop_tokens)

    def _check_required(self, choice: Collection[int]) -> None:
        if not choice:
            raise RequestError(
                "end_tokens is 'required' and there is no stop token to end by: "
                "give stop_token_ids of this model, or 'allowed'."
            )
        if self.most is None:
            raise RequestError(
                "end_tokens is 'required' and no limit says where the reply must end: "
                "give max_tokens, or 'allowed'."
            )
        if self.min_tokens >= self.most:
            raise RequestError(
                f"end_tokens is 'required', which leaves at most {self.most - 1} tokens before the "
                f"stop token, and min_tokens is {self.min_tokens}: lower min_tokens or raise "
                "max_tokens."
            )

    @cached_property
    def active(self) -> bool:
        """Whether any row of the reply can be changed."""
        ends = self.end_tokens != "allowed" or self.min_tokens > 0
        return self.penalties.active or (bool(self.stop_tokens) and ends)

    @property
    def window(self) -> int:
        """How many of the last tokens any rule needs to know."""
        return self.penalties.window

    def acts(self, emitted: int) -> bool:
        """Whether the row that is answered after `emitted` tokens can be changed."""
        return self.penalties.active or self.restricts(emitted)

    def restricts(self, emitted: int) -> bool:
        """Whether the answer after `emitted` tokens must be a stop token, or must be none."""
        return self._requires(emitted) or self._bans(emitted)

    def apply(self, logits: mx.array, history: list[int], emitted: int) -> mx.array:
        """One row after bias, penalties and end tokens: fp32 [1, vocab], a new array.

        logits:  fp32 [1, vocab], never changed
        history: the tokens read up to this row, the prompt's included, the last `window` at least
        emitted: how many tokens of the reply are emitted before this row's answer
        A logit of -inf stays one. Ids must lie in the vocabulary, which `check_vocab` sees to.
        """
        row = self.penalties.apply(logits, history)
        if not self.restricts(emitted):
            return row
        # An id outside the vocabulary is never chosen, and MLX does not check an index.
        ends = mx.array(self._ends_within(row.shape[1]), mx.int32)
        if self._requires(emitted):
            only = mx.full(row.shape, -mx.inf, row.dtype)
            only[:, ends] = row[:, ends]
            return only
        row[:, ends] = -mx.inf
        return row

    def check_vocab(self, vocab_size: int) -> None:
        """Raise RequestError for ids that a vocabulary of `vocab_size` tokens does not have.

        A stop token outside it is none that can be chosen; it is wrong only where one is required
        and no other is left.
        """
        self.penalties.check_vocab(vocab_size)
        if self.end_tokens == "required":
            self._check_required(self._ends_within(vocab_size))

    def _ends_within(self, vocab_size: int) -> list[int]:
        return sorted(token for token in self.stop_tokens if 0 <= token < vocab_size)

    def _bans(self, emitted: int) -> bool:
        """Whether the answer after `emitted` tokens must not be a stop token."""
        early = self.end_tokens == "banned" or emitted < self.min_tokens
        return bool(self.stop_tokens) and early

    def _requires(self, emitted: int) -> bool:
        """Whether the answer after `emitted` tokens must be a stop token."""
        last = self.most is not None and emitted + 1 >= self.most
        return self.end_tokens == "required" and last


NO_RULES = Rules()
