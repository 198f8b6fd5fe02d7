"""Acceptance, exactly: every pair of uniforms on a grid that no border falls on is tried."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lse_mlx.decode.acceptance import check_proposal, judge, residual
from lse_mlx.decode.randomness import Streams
from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import Proposal
from lse_mlx.errors import DraftError

PARTS = 5
GRID = 60
"""Divisible by every number up to PARTS, so that each chance is a whole count of grid points."""

Shares = dict[int, int]
"""Token to how many PARTS of probability it has, in the order of the support."""


def made(shares: Shares) -> Distribution:
    return Distribution(np.array(list(shares)), np.array(list(shares.values())) / PARTS)


def scripted(accept: list[float], rest: list[float]) -> Streams:
    return Streams(lambda: 0.5, iter(accept).__next__, iter(rest).__next__)


def judge_one(x: int, q: Distribution, p: Distribution, u: float, r: float) -> int:
    """The first token that a proposal of `x` alone leads to."""
    after = Distribution.point(99)
    return judge(Proposal([x], [q]), [p, after], scripted([u, 0.5], [r, 0.5])).tokens[0]


PAIRS: list[tuple[Shares, Shares]] = [
    ({0: 2, 1: 3}, {0: 4, 1: 1}),
    ({3: 1, 1: 3, 2: 1}, {1: 1, 2: 2, 3: 2}),
    ({0: 4, 1: 1}, {0: 1, 1: 1, 2: 3}),  # q goes where p is nothing
    ({5: 2, 4: 2, 3: 1}, {4: 5}),  # q is certain
    ({7: 1, 8: 4}, {1: 2, 2: 3}),  # nothing in common
    ({0: 2, 1: 3}, {0: 2, 1: 3}),  # the same
]


@pytest.mark.parametrize(("p_shares", "q_shares"), PAIRS)
def test_the_first_token_is_distributed_as_the_targets(p_shares: Shares, q_shares: Shares) -> None:
    p, q = made(p_shares), made(q_shares)
    points = [(i + 0.5) / GRID for i in range(GRID)]
    chance: Counter[int] = Counter()
    for x, share in q_shares.items():
        for u, r in product(points, points):
            chance[judge_one(x, q, p, u, r)] += share
    whole = PARTS * GRID**2
    assert {t: Fraction(n, whole) for t, n in chance.items()} == {
        t: Fraction(n, PARTS) for t, n in p_shares.items()
    }


@pytest.mark.parametrize(("p_shares", "q_shares"), PAIRS)
def test_a_draft_is_accepted_below_the_ratio_and_not_at_it(
    p_shares: Shares, q_shares: Shares
) -> None:
    p, q = made(p_shares), made(q_shares)
    for x, share in q_shares.items():
        ratio = p_shares.get(x, 0) / share

        def accepted(u: float, x: int = x) -> bool:
            rows = [p, Distribution.point(99)]
            return judge(Proposal([x], [q]), rows, scripted([u, 0.5], [0.5, 0.5])).accepted == 1

        if ratio >= 1:
            assert accepted(np.nextafter(1, 0))
        else:
            assert not accepted(ratio)
            assert ratio == 0 or accepted(ratio * (1 - 1e-12))


shares = st.lists(st.integers(0, 9), min_size=6, max_size=6).filter(any)


@given(p=shares, q=shares, order=st.permutations(range(6)))
def test_the_residual_is_what_p_has_over_q(p: list[int], q: list[int], order: list[int]) -> None:
    p_exact = {t: Fraction(p[t], sum(p)) for t in order}
    q_exact = {t: Fraction(n, sum(q)) for t, n in enumerate(q)}
    over = {t: max(p_exact[t] - q_exact[t], Fraction(0)) for t in order}
    total = sum(over.values())
    expected = {t: w / total for t, w in over.items()} if total else p_exact

    def as_distribution(exact: dict[int, Fraction]) -> Distribution:
        return Distribution(np.array(list(exact)), np.array([float(w) for w in exact.values()]))

    got = residual(as_distribution(p_exact), as_distribution(q_exact))
    assert got.ids.tolist() == order
    if total:
        assert got.probs.tolist() == pytest.approx([float(w) for w in expected.values()])


def test_a_residual_without_mass_is_p() -> None:
    p = made({0: 2, 1: 3})
    assert residual(p, p) is p
    q = Distribution(np.array([0, 1, 2]), np.array([0.4 + 4e-9, 0.6 + 4e-9, 1e-9]))
    assert residual(p, q).probs.tolist() == p.probs.tolist()


def certain_rows(tokens: list[int]) -> list[Distribution]:
    return [Distribution.point(t) for t in tokens]


@pytest.mark.parametrize("right", range(8))
def test_a_walk_ends_at_the_first_mismatch_or_with_one_token_more(right: int) -> None:
    answers = [10, 11, 12, 13, 14, 15, 16, 17]
    drafts = [t if i < right else t + 50 for i, t in enumerate(answers[:7])]
    never = scripted([np.nextafter(1, 0)] * 8, [0.5] * 8)
    verdict = judge(Proposal.certain(drafts), certain_rows(answers), never)
    assert verdict.tokens == answers[: right + 1]
    assert verdict.accepted == right
    assert verdict.tested == min(right + 1, 7)
    assert verdict.overlap == [1.0] * right + [0.0] * (verdict.tested - right)


def test_without_a_proposal_the_token_is_a_plain_draw() -> None:
    p = made({4: 2, 2: 3})
    for r, token in ((0.1, 4), (0.39, 4), (0.41, 2), (0.9, 2)):
        verdict = judge(Proposal([], []), [p], scripted([0.5], [r]))
        assert (verdict.tokens, verdict.accepted, verdict.tested) == ([token], 0, 0)


def test_full_acceptance_draws_the_extra_token_from_the_last_row() -> None:
    last = made({4: 2, 2: 3})
    rows = [*certain_rows([7, 8]), last]
    verdict = judge(Proposal.certain([7, 8]), rows, scripted([0.9] * 3, [0.0, 0.0, 0.41]))
    assert verdict.tokens == [7, 8, 2]


def test_the_overlap_is_the_mass_in_common() -> None:
    p, q = made({0: 1, 1: 3, 2: 1}), made({1: 1, 2: 2, 5: 2})
    rows = [p, p, Distribution.point(0)]
    verdict = judge(Proposal([1, 1], [q, q]), rows, scripted([0.0] * 3, [0.5] * 3))
    assert verdict.overlap == pytest.approx([2 / 5, 2 / 5])


@pytest.mark.parametrize("right", range(4))
def test_every_row_walked_takes_one_uniform_of_each_stream(right: int) -> None:
    taken: Counter[str] = Counter()

    def stream(name: str) -> Callable[[], float]:
        def uniform() -> float:
            taken[name] += 1
            return 0.5

        return uniform

    answers = [10, 11, 12, 13]
    drafts = [t if i < right else t + 50 for i, t in enumerate(answers[:3])]
    streams = Streams(stream("draft"), stream("accept"), stream("residual"))
    judge(Proposal.certain(drafts), certain_rows(answers), streams)
    assert taken == {"accept": right + 1, "residual": right + 1}


def test_rows_behind_a_rejection_are_not_looked_at() -> None:
    class Rows:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, row: int, /) -> Distribution:
            assert row == 0
            return Distribution.point(3)

    verdict = judge(Proposal.certain([4, 5, 6]), Rows(), scripted([0.5], [0.5]))
    assert verdict.tokens == [3]


@pytest.mark.parametrize(
    ("ids", "probs", "named"),
    [
        ([1, 2, 1], [0.5, 0.25, 0.25], "repeat a token"),
        ([1, 2], [1.5, -0.5], "not a distribution"),
        ([1, 2], [0.5, np.nan], "not a distribution"),
        ([1, 2], [0.5, np.inf], "not a distribution"),
        ([1, 2], [0.5, 0.5 - 2e-6], "not a distribution"),
        ([1, 2], [0.5, 0.5 + 2e-6], "not a distribution"),
        ([1, 2], [0.0, 1.0], "proposed token 1"),
        ([2, 3], [0.5, 0.5], "proposed token 1"),
    ],
)
def test_a_q_that_the_draft_cannot_come_from_is_refused(
    ids: list[int], probs: list[float], named: str
) -> None:
    q = Distribution(np.array(ids), np.array(probs))
    with pytest.raises(DraftError, match=rf"^[^:]*{named}[^:]*: [^:]*[^.]\.$"):
        check_proposal(Proposal([1], [q]), 7, 10)
    with pytest.raises(DraftError):  # wherever it stands in the proposal
        check_proposal(Proposal([4, 1], [*certain_rows([4]), q]), 7, 10)


def test_a_q_within_rounding_is_taken() -> None:
    q = Distribution(np.array([1, 2]), np.array([0.5, 0.5 - 5e-7]))
    check_proposal(Proposal([1], [q]), 7, 10)
    rows = certain_rows([1, 2])
    assert judge(Proposal([1], [q]), rows, scripted([0.5] * 2, [0.5] * 2)).tokens == [1, 2]


def test_drafts_without_their_distribution_are_refused() -> None:
    for tokens, q in (([1, 2], certain_rows([1])), ([1], certain_rows([1, 2]))):
        with pytest.raises(DraftError, match=f"{len(q)} distributions for {len(tokens)} tokens"):
            check_proposal(Proposal(tokens, q), 7, 10)


@pytest.mark.parametrize("right", range(4))
def test_without_a_row_of_its_own_the_target_adds_no_token(right: int) -> None:
    """Near a limit there are as many rows as proposals; what is decided is what it would be."""
    answers = [10, 11, 12, 13]
    drafts = [t if i < right else t + 50 for i, t in enumerate(answers[:3])]
    short, whole = (
        judge(
            Proposal.certain(drafts), certain_rows(answers[:rows]), scripted([0.5] * 4, [0.5] * 4)
        )
        for rows in (3, 4)
    )
    assert short.tokens == whole.tokens[:3] == answers[: min(right + 1, 3)]
    assert short.accepted == whole.accepted == right
    assert short.overlap == whole.overlap


def test_a_shorter_proposal_keeps_tokens_and_distributions_together() -> None:
    proposal = Proposal.certain([4, 5, 6])
    for k, (fewer, more) in enumerate(pairwise(proposal.first(n) for n in range(5))):
        assert fewer.tokens == [4, 5, 6][:k]
        assert len(fewer.q) == len(fewer.tokens)
        assert len(more.tokens) == min(k + 1, 3)
