"""The decode cycle: propose, verify, accept, commit. Plain decoding is the cycle without proposals."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import mlx.core as mx

from lse_mlx.decode.acceptance import check_tokens, judge
from lse_mlx.decode.randomness import Streams
from lse_mlx.decode.sampling import Sampling, TargetRows
from lse_mlx.decode.session import Session
from lse_mlx.decode.stopping import Limits, StopReason
from lse_mlx.decode.timings import Timings
from lse_mlx.drafters.base import Proposal
from lse_mlx.errors import RequestError

PREFILL_ROWS = 512


@dataclass(frozen=True)
class Request:
    """What to decode: a prompt (token ids, at least one), how to choose, where to end.

    prefill_rows: how many prompt rows go through the target at a time; bounds memory
    Raises RequestError for a seed that `Streams.from_seed` refuses.
    """

    prompt: list[int]
    sampling: Sampling
    limits: Limits
    seed: int
    speculate: bool
    prefill_rows: int = PREFILL_ROWS

    def __post_init__(self) -> None:
        Streams.from_seed(self.seed)  # refused here, before a session is touched


@dataclass(frozen=True)
class Step:
    """Tokens emitted by one pass, possibly none, and why the reply ends if it does."""

    tokens: list[int]
    reason: StopReason | None


def decode(session: Session, request: Request, timings: Timings) -> Iterator[Step]:
    """Decode until the reply ends; the last step has a reason.

    At every step the session already holds exactly the tokens of the prompt and those emitted; only
    the last one emitted, the anchor, is not read by any pass yet, unless a stop token followed it.
    So the caller may stop asking at any step. A failure inside a pass leaves the session empty.
    Going on after another reply began in the session raises RequestError and leaves that one alone.
    """
    try:
        yield from _cycles(session, request, timings)
    except (GeneratorExit, RequestError):
        raise  # between two passes: the session is whole, or another reply's by now
    except BaseException:
        session.reset()
        raise


def _cycles(session: Session, request: Request, timings: Timings) -> Iterator[Step]:
    limits, sampling = request.limits, request.sampling
    streams = Streams.from_seed(request.seed)
    drafter = session.drafter if request.speculate else None
    taps = () if drafter is None else drafter.taps

    logits = _prefill(session, request, taps, timings)
    target, context = session.target, None if drafter is None else session.context
    first = TargetRows(logits, sampling)[0].draw(streams.residual())
    cut, turn = limits.cut([first], 0), session.turn
    timings.generated_n = len(cut.emitted)
    yield Step(cut.emitted, cut.reason)

    while cut.reason is None:
        if session.turn != turn:
            raise RequestError(
                f"A reply cannot go on after {timings.generated_n} tokens, because another one began "
                "in its session: finish or drop a reply first, or take a session for each."
            )
        started = perf_counter()
        anchor, left = cut.emitted[-1], limits.left(timings.generated_n)
        proposal = Proposal([], [])
        if drafter is not None and context is not None and left > 1:
            # Near the limit fewer rows are verified, but the drafter's block stays whole.
            proposal = context.propose(anchor, sampling.temperature, streams.draft)
            check_tokens(proposal, drafter.depth, target.vocab_size)
            proposal = proposal.first(left - 1)
        drafted = perf_counter()

        rows = target.verify([anchor, *proposal.tokens], session.state, taps)
        verdict = judge(proposal, TargetRows(rows.logits, sampling), streams)
        cut = limits.cut(verdict.tokens, timings.generated_n)

        session.state.commit(cut.rows)
        if context is not None:
            context.append(rows.features[: cut.rows], first=len(session.tokens))
        session.tokens += [anchor, *verdict.tokens[: cut.rows - 1]]

        timings.count(len(proposal.tokens), verdict, cut, started, drafted, perf_counter())
        yield Step(cut.emitted, cut.reason)


def _prefill(
    session: Session, request: Request, taps: tuple[int, ...], timings: Timings
) -> mx.array:
    """Take in what the session does not hold of the prompt; fp32 [1, vocab] logits of its end."""
    started = perf_counter()
    speculating = request.speculate and session.drafter is not None
    rest = session.resume(request.prompt, speculating)
    timings.prompt_n, timings.prompt_cached_n = len(rest), len(session.tokens)
    logits = mx.zeros((1, 0))
    for at in range(0, len(rest), request.prefill_rows):
        piece = rest[at : at + request.prefill_rows]
        rows = session.target.advance(piece, session.state, taps)
        if speculating and session.context is not None:
            session.context.append(rows.features, first=len(session.tokens))
        session.tokens += piece
        logits = rows.logits
        mx.eval(logits)
        mx.clear_cache()  # a piece's buffers are of sizes that no later pass asks for
    timings.prompt_ms = 1000 * (perf_counter() - started)
    return logits
