"""The engine's own acceptance and stop rules decide the golden passes as they are written by hand."""

from collections.abc import Iterator

import numpy as np
import pytest

from lse_mlx.decode.acceptance import judge
from lse_mlx.decode.randomness import Streams
from lse_mlx.decode.stopping import Limits
from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import Proposal
from tests.golden import table
from tests.golden.cases import CASES, Case, Pass

NO_CONTEXT_LIMIT = 1000


def distribution(prefix: list[int], greedy: bool) -> Distribution:
    if greedy:
        return Distribution.point(table.likeliest(prefix)[0][0])
    shares = sorted(table.likeliest(prefix))
    return Distribution(np.array([t for t, _ in shares]), np.array([p for _, p in shares]))


def proposal_of(one: Pass, greedy: bool) -> Proposal:
    if greedy:
        return Proposal.certain(list(one.path))
    q = [Distribution(np.array([*c]), np.array([*c.values()])) for c in one.candidates]
    return Proposal(list(one.path), q)


def no_draft() -> float:
    raise AssertionError("what was drafted stands in the case")


def streams_of(case: Case) -> tuple[Streams, Iterator[float], Iterator[float]]:
    accept, residual = iter(case.accept), iter(case.residual)
    zero = (lambda: 0.0) if case.temperature == 0 else None  # greedy draws from points
    streams = Streams(
        no_draft, zero or (lambda: next(accept)), zero or (lambda: next(residual))
    )  # fmt: skip
    return streams, accept, residual


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_engine_decides_as_it_is_written(case: Case) -> None:
    greedy = case.temperature == 0
    streams, accept, residual = streams_of(case)
    limits = Limits(frozenset(case.stop_tokens), case.max_tokens, NO_CONTEXT_LIMIT)
    first = distribution([*case.prompt], greedy).draw(streams.residual())
    assert first == case.first
    read, anchor, emitted = [*case.prompt], first, 1
    reason = limits.cut([first], 0).reason
    for number, one in enumerate(case.passes, 1):
        block = [anchor, *one.path]
        count = len(one.path) + one.last_row
        rows = [distribution([*read, *block[: n + 1]], greedy) for n in range(count)]
        verdict = judge(proposal_of(one, greedy), rows, streams)
        bonus = [] if one.bonus is None else [one.bonus]
        assert (verdict.accepted, verdict.tokens) == (
            one.accepted,
            [*one.path[: one.accepted], *bonus],
        )
        cut = limits.cut(verdict.tokens, emitted)
        if case.stop_reason == "cancelled" and number == len(case.passes):
            return  # by whoever asked: the limits know nothing of it
        assert cut.rows == one.committed
        emitted, reason = emitted + len(cut.emitted), cut.reason
        read += [anchor, *verdict.tokens[: cut.rows - 1]]
        anchor = verdict.tokens[cut.rows - 1]
    assert reason == case.stop_reason
    if not greedy:
        assert [*accept, *residual] == []  # each row took its two
