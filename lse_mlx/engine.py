"""Engine: a loaded pair that answers prompts."""

import inspect
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ParamSpec

import mlx.core as mx

from lse_mlx.decode.loop import Request, Step, decode
from lse_mlx.decode.reply_text import ReplyText
from lse_mlx.decode.rules import WINDOW, EndTokens, Penalties, Rules
from lse_mlx.decode.sampling import Sampling, TokenLogprob
from lse_mlx.decode.session import Session
from lse_mlx.decode.stopping import FINISH_REASONS, Cancelled, Limits
from lse_mlx.decode.timings import Timings
from lse_mlx.decode.values import check_integer, room_after
from lse_mlx.drafters.base import Drafter
from lse_mlx.errors import RequestError, shown
from lse_mlx.kernels.options import check_bool
from lse_mlx.replies import EngineStats, Piece, Result
from lse_mlx.target.model import Target
from lse_mlx.target.tokenizer import Prompt, Tokenizer
from lse_mlx.warmup import WarmupReport

MAX_TOKENS = 256
"""The most tokens of a reply where the caller does not say."""

MOST_LOGPROBS = 20
"""How many of the likeliest tokens may be asked for with each token."""

Options = ParamSpec("Options")


def _with_options_of(
    stream: Callable[Options, Any],
) -> Callable[[Callable[..., Result]], Callable[Options, Result]]:
    """Let a method that hands everything on to `stream` show the same options, to `help`, editors
    and type checkers."""

    def decorate(method: Callable[..., Result]) -> Callable[Options, Result]:
        signature = inspect.signature(stream).replace(return_annotation=Result)
        method.__dict__["__signature__"] = signature
        return method

    return decorate


@dataclass
class Engine:
    """A target, its tokenizer and possibly a drafter. Use it in the thread that loaded it.

    target, tokenizer, drafter: what answers; drafter is None where the target decodes alone
    warmed: what the warm-up did and found, see `WarmupReport`; None after `load(warm_up=False)`
    strict_draft: a failure of the drafter fails the request; otherwise the target goes on alone
    """

    target: Target
    tokenizer: Tokenizer = field(repr=False)
    drafter: Drafter | None = None
    warmed: WarmupReport | None = field(default=None, repr=False)
    strict_draft: bool = False
    _closed: bool = field(default=False, init=False, repr=False)
    _draft_failures: int = field(default=0, init=False, repr=False)

    def session(self) -> Session:
        """A session that saves work: give it to `generate` together with a whole conversation.

        What the conversation has in common with the session's tokens is not computed again. A
        session adds nothing to a prompt: pass all earlier turns as messages each time.
        """
        self._check_open()
        return Session(self.target, self.drafter)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = MAX_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        repetition_penalty: float = 1.0,
        repetition_window: int = WINDOW,
        presence_penalty: float = 0.0,
        presence_window: int = WINDOW,
        frequency_penalty: float = 0.0,
        frequency_window: int = WINDOW,
        logit_bias: Mapping[int, float] | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        min_tokens: int = 0,
        end_tokens: EndTokens = "allowed",
        top_logprobs: int | None = None,
        cancelled: Cancelled | None = None,
        speculate: bool = True,
        raw: bool = False,
        session: Session | None = None,
    ) -> Iterator[Piece]:
        """Answer `prompt` piece by piece; the last piece carries the result.

        prompt: text (a user message, or plain text with `raw`), chat messages, or token ids
        max_tokens: at least 1; None for as many as the context holds
        temperature: 0 is greedy; top_k, top_p, min_p: as in `Sampling`
        seed: fixes a sampled reply; None takes a fresh one, which the result names
        repetition_penalty, presence_penalty, frequency_penalty: 1, 0 and 0 are none; formulas at
        `Penalties`. Each looks at as many of the last tokens, the prompt's too, as its window says
        logit_bias: token id -> what is added to its logit
        stop: one string or several; the reply's text ends before the first that it comes to hold
        stop_token_ids: they end the reply as the model's own end tokens do
        min_tokens: until so many tokens, no end token is chosen and no stop string is looked for
        end_tokens: "allowed"; "banned", never one; "required", one at the latest in place of token
        number max_tokens, so that the model itself ends the reply
        top_logprobs: give each token's log-probability, and so many of the likeliest tokens (up to
        `MOST_LOGPROBS`) with theirs; None for no log-probabilities
        cancelled: called often, with the number of tokens emitted so far; True ends the reply there
        speculate: False decodes with the target alone; the distribution of replies is the same
        session: from `session()`, whose work is reused where the prompt goes on from it; None for
        none

        The request is checked here and now, before the first piece is asked for. Raises
        RequestError for a request that cannot be served. Later, TargetError for a target that fails
        or gives no number to choose by, and with `strict_draft` DraftError for such a drafter;
        without it the target goes on alone. What ends a reply and what stays then: docs/decoding.md.
        """
        self._check_open()
        check_bool("raw", raw)
        check_bool("speculate", speculate)
        check_top_logprobs(top_logprobs)
        tokens = self.tokenizer.encode(prompt, raw)
        vocab_size = self.target.vocab_size
        extra = check_token_ids("stop_token_ids", stop_token_ids, vocab_size)
        stop_tokens = self.tokenizer.stop_tokens | extra
        room = room_after(tokens, self.target.context_length)
        limits = Limits(stop_tokens, max_tokens, room, cancelled)
        penalties = Penalties(
            repetition_penalty,
            repetition_window,
            presence_penalty,
            presence_window,
            frequency_penalty,
            frequency_window,
            {} if logit_bias is None else logit_bias,
        )
        rules = Rules(penalties, stop_tokens, min_tokens, end_tokens, limits.most)
        rules.check_vocab(vocab_size)
        request = Request(
            prompt=tokens,
            sampling=Sampling(temperature, top_k, top_p, min_p),
            limits=limits,
            seed=secrets.randbits(32) if seed is None else seed,
            speculate=speculate,
            rules=rules,
            top_logprobs=top_logprobs,
            strict_draft=self.strict_draft,
        )
        thinking = self.tokenizer.thinking(tokens)
        text = ReplyText(self.tokenizer.streaming(), stop, min_tokens, thinking)
        return self._pieces(self._session_for(session, speculate), request, text)

    @_with_options_of(stream)
    def generate(self, *asked: Any, **options: Any) -> Result:
        """Answer `prompt` and return the whole reply; everything else is said at `stream`."""
        *_, last = self.stream(*asked, **options)
        assert last.result is not None  # the last piece always has it
        return last.result

    def stats(self) -> EngineStats:
        """What kernels did since the engine was loaded: compilations, calls, and who served them.

        The numbers are of this moment and do not change afterwards. Raises RequestError once the
        engine is closed.
        """
        self._check_open()
        registry = self.target.registry
        counts = registry.counts()
        return EngineStats(
            jit_compiles_total=counts.jit_compiles,
            jit_compile_ms_total=counts.jit_compile_ms,
            device_kernel_calls=counts.device_kernel_calls,
            reference_calls=counts.reference_calls,
            kernels=registry.forms(),
            refused=dict(registry.refused),
            forms=dict(registry.choices.chosen),
            draft_failures=self._draft_failures,
        )

    def close(self) -> None:
        """Free the weights, as soon as no session that holds them is left.

        The engine cannot be used afterwards; closing twice is harmless.
        """
        self._closed = True
        self.__dict__.update(target=None, tokenizer=None, drafter=None)
        mx.clear_cache()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("This engine is closed: load it again.")

    def _session_for(self, session: Session | None, speculate: bool) -> Session:
        if session is None:
            return Session(self.target, self.drafter if speculate else None)
        if not isinstance(session, Session):
            raise RequestError(f"session is {shown(session)}: give one of `engine.session()`.")
        if session.target is not self.target:
            raise RequestError("The session belongs to another engine: take one from this one.")
        return session

    def _pieces(self, session: Session, request: Request, text: ReplyText) -> Iterator[Piece]:
        self._check_open()  # the first piece may be asked for long after the request was made
        drafter = session.drafter if request.speculate else None
        timings = Timings() if drafter is None else Timings(drafter.name, drafter.depth)
        emitted: list[int] = []
        logprobs: list[TokenLogprob] = []
        for step in self._steps(session, request, timings, text):
            self._check_open()
            emitted += step.tokens
            logprobs += step.logprobs or []
            result = None
            if step.reason is not None:
                result = Result(
                    text=text.text,
                    token_ids=emitted,
                    prompt_tokens=len(request.prompt),
                    seed=request.seed if request.sampling.temperature > 0 else None,
                    finish_reason=FINISH_REASONS[step.reason],
                    stop_reason=step.reason,
                    stop_string=text.stop_string,
                    logprobs=None if request.top_logprobs is None else logprobs,
                    timings=timings.as_dict(),
                )
            yield Piece(text.piece(), step.tokens, step.logprobs, result)

    def _steps(
        self, session: Session, request: Request, timings: Timings, text: ReplyText
    ) -> Iterator[Step]:
        """The steps of a reply, with what kernels and the drafter do for each counted; other
        replies may run in between."""
        registry, steps = self.target.registry, decode(session, request, timings, text)
        while True:
            before, failures = registry.counts(), timings.draft_failures
            try:
                step = next(steps, None)
            finally:
                timings.count_kernels(before, registry.counts())
                self._draft_failures += timings.draft_failures - failures
            if step is None:
                return
            yield step


def check_token_ids(name: str, ids: Iterable[int] | None, vocab_size: int) -> frozenset[int]:
    """The token ids of the option `name`, of which None has none.

    Raises RequestError for what is no id of the vocabulary.
    """
    if ids is None:
        return frozenset()
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise RequestError(f"{name} is {shown(ids)}: give a list of token ids.")
    ids = list(ids)
    for token in ids:
        check_integer(f"A token of {name}", token, 0, "a token id, 0 or above")
        if token >= vocab_size:
            raise RequestError(
                f"{name} names token {shown(token)}, outside the vocabulary of {vocab_size}: "
                "give ids of this model's tokenizer."
            )
    return frozenset(int(token) for token in ids)


def check_top_logprobs(top: int | None) -> None:
    """RequestError unless it is None or a count that may be asked for."""
    if top is not None:
        wanted = f"a count from 0 to {MOST_LOGPROBS}, or None"
        check_integer("top_logprobs", top, 0, wanted)
        if top > MOST_LOGPROBS:
            raise RequestError(f"top_logprobs is {shown(top)}: give {wanted}.")
