"""The decode cycle: propose, verify, accept, commit. Plain decoding is the cycle without proposals."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import mlx.core as mx

from lse_mlx.decode.acceptance import Verdict, judge
from lse_mlx.decode.drafting import Drafting
from lse_mlx.decode.randomness import Streams
from lse_mlx.decode.reply_text import ReplyText
from lse_mlx.decode.rules import Rules
from lse_mlx.decode.sampling import Sampling, TargetRows, TokenLogprob
from lse_mlx.decode.session import Session
from lse_mlx.decode.stopping import Cut, Limits, StopReason, settled
from lse_mlx.decode.timings import Timings
from lse_mlx.drafters.base import Proposal
from lse_mlx.errors import RequestError, TargetError, counted, reason
from lse_mlx.target.model import Pass

PREFILL_ROWS = 512
_FAILURES = (RuntimeError, MemoryError, ValueError, ArithmeticError, LookupError)
"""What MLX and NumPy raise when a pass cannot be computed."""


@dataclass(frozen=True)
class Request:
    """What to decode: a prompt (token ids, at least one), how to choose, where to end.

    prefill_rows: how many prompt rows go through the target at a time; bounds memory
    rules:        what changes a row of logits before a token is chosen from it
    top_logprobs: with each token its log-probability and that of so many likeliest ones; None for
                  no log-probabilities
    strict_draft: end with DraftError when the drafter fails, instead of going on without it
    Raises RequestError for a seed that `Streams.from_seed` refuses.
    """

    prompt: list[int]
    sampling: Sampling
    limits: Limits
    seed: int
    speculate: bool
    prefill_rows: int = PREFILL_ROWS
    rules: Rules = Rules()
    top_logprobs: int | None = None
    strict_draft: bool = False

    def __post_init__(self) -> None:
        Streams.from_seed(self.seed)  # refused here, before a session is touched


@dataclass(frozen=True)
class Cycle:
    """One verify pass as it went, for those who record or examine it.

    position: of the anchor in the sequence
    proposal: what was judged; empty in a plain step
    answer:   the target's pass over the anchor and the proposal
    rows:     its distributions
    """

    position: int
    anchor: int
    proposal: Proposal
    answer: Pass
    rows: TargetRows
    verdict: Verdict
    cut: Cut


@dataclass(frozen=True)
class Step:
    """Tokens emitted by one pass, possibly none, and why the reply ends if it does.

    logprobs:   of each token, where the request asks for them
    stop_token: the one that ended the reply; it is not emitted
    cycle:      the pass; None for the prompt's, and where the reply ended before one
    """

    tokens: list[int]
    reason: StopReason | None
    logprobs: list[TokenLogprob] | None = None
    stop_token: int | None = None
    cycle: Cycle | None = None


def decode(
    session: Session, request: Request, timings: Timings, text: ReplyText | None = None
) -> Iterator[Step]:
    """Decode until the reply ends; the last step has a reason.

    At every step the session already holds exactly the tokens of the prompt and those emitted, but
    for the last one emitted, the anchor, which no pass has read unless a stop token ended the reply;
    after a cancel in the prompt it holds the pieces that were read.
    So the caller may stop asking at any step. A failure inside a step leaves the session empty, and
    raises TargetError where the target failed. Going on after another reply began in the session
    raises RequestError, and so does a step while one of another reply runs; both leave the other
    alone.

    text: takes in the emitted tokens and finds stop strings; None where nobody reads text
    """
    cycles, emitted, turn = _cycles(session, request, timings, text), 0, None
    while True:
        with session.step():
            if turn is not None and session.turn != turn:
                raise RequestError(
                    f"A reply cannot go on after {counted(emitted, 'token')}, because its session "
                    "was reset or another one began in it: finish or drop a reply first, or take a "
                    "session for each."
                )
            try:
                step = next(cycles)
            except BaseException:
                session.reset()
                raise
            turn = session.turn
        emitted += len(step.tokens)
        yield step
        if step.reason is not None:
            return  # whatever begins in the session now, this reply is whole


@contextmanager
def _target_failures(emitted: int) -> Iterator[None]:
    """Name what MLX raises in a pass of the target after so many tokens."""
    try:
        yield
    except _FAILURES as error:
        mx.clear_cache()  # it may be memory that was missing
        raise TargetError(
            f"The target failed after {counted(emitted, 'token')} ({reason(error)}): try again, "
            "and where memory ran out, with a shorter prompt or reply."
        ) from error


def _cycles(
    session: Session, request: Request, timings: Timings, text: ReplyText | None
) -> Iterator[Step]:
    target, limits = session.target, request.limits
    sampling, rules = request.sampling, request.rules
    streams = Streams.from_seed(request.seed)
    drafting = Drafting(session, request.speculate, request.strict_draft, timings)

    logits = _prefill(session, request, drafting, timings)
    if logits is None:
        yield _cancelled(request, text)
        return
    rows = TargetRows(logits, sampling, rules, _last(session.tokens, rules.window + 1))
    with _target_failures(0):
        first = rows[0].draw(streams.residual())
    cut = limits.cut([first], 0, text)
    emitted = timings.generated_n = len(cut.emitted)
    yield _step(rows, [first], cut, request)

    while cut.reason is None:
        started = perf_counter()
        anchor, position = cut.emitted[-1], len(session.tokens)
        if limits.cancels(emitted):
            yield _cancelled(request, text)
            return
        # Near the limit fewer tokens are judged and fewer rows verified, but the drafter's block
        # stays whole, and no token depends on where the limit is.
        proposal = drafting.propose(anchor, sampling.temperature, streams.draft)
        proposal = proposal.first(limits.left(emitted))
        drafted = perf_counter()
        if limits.cancels(emitted):
            yield _cancelled(request, text)
            return

        read = [anchor, *proposal.tokens][: limits.left(emitted)]
        behind = _last(session.tokens, rules.window)
        with _target_failures(emitted):
            answer = target.verify(read, session.state, drafting.taps)
            rows = TargetRows(answer.logits, sampling, rules, [*behind, *read], emitted)
            verdict = judge(proposal, rows, streams)
        cut = limits.cut(verdict.tokens, emitted, text)

        session.state.commit(cut.rows)
        session.tokens += read[: cut.rows]
        drafting.append(answer.features[: cut.rows], position)

        timings.count(len(proposal.tokens), verdict, cut, started, drafted, perf_counter())
        emitted += len(cut.emitted)
        cycle = Cycle(position, anchor, proposal, answer, rows, verdict, cut)
        yield _step(rows, verdict.tokens, cut, request, cycle)


def _prefill(
    session: Session, request: Request, drafting: Drafting, timings: Timings
) -> mx.array | None:
    """Take in what the session does not hold of the prompt; fp32 [1, vocab] logits of its end.

    None where the caller cancelled; the session then holds the pieces taken in so far.
    """
    started = perf_counter()
    rest = session.resume(request.prompt, request.speculate)
    drafting.begin()
    timings.prompt_n, timings.prompt_cached_n = 0, len(session.tokens)
    logits = None
    for at in range(0, len(rest), request.prefill_rows):
        if request.limits.cancels(0):
            logits = None
            break
        piece = rest[at : at + request.prefill_rows]
        position = len(session.tokens)
        with _target_failures(0):
            rows = session.target.advance(piece, session.state, drafting.taps)
            mx.eval(rows.logits)
        session.tokens += piece
        drafting.append(rows.features, position)
        timings.prompt_n += len(piece)
        logits = rows.logits
        mx.clear_cache()  # a piece's buffers are of sizes that no later pass asks for
    timings.prompt_ms = 1000 * (perf_counter() - started)
    return logits


def _step(
    rows: TargetRows, tokens: list[int], cut: Cut, request: Request, cycle: Cycle | None = None
) -> Step:
    """What a pass that answered `tokens` and was cut gives the caller, who may change the lists."""
    logprobs = None
    if (top := request.top_logprobs) is not None:
        logprobs = [rows.logprob(i, token, top) for i, token in enumerate(cut.emitted)]
    stop_token = tokens[cut.rows - 1] if cut.rows > len(cut.emitted) else None
    return Step(list(cut.emitted), cut.reason, logprobs, stop_token, cycle)


def _cancelled(request: Request, text: ReplyText | None) -> Step:
    """The caller ended the reply between two passes."""
    return Step([], settled("cancelled", text), None if request.top_logprobs is None else [])


def _last(tokens: list[int], count: int) -> list[int]:
    return tokens[max(0, len(tokens) - count) :]
