"""Whatever the drafter draws, the emitted tokens are distributed as the target's own.

Thousands of replies of the real loop against exact probabilities, by chi-square; and the same test
must see it when acceptance is wrong.
"""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from lse_mlx.decode import acceptance
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from tests.decode.definition import probabilities
from tests.decode.runs import run
from tests.decode.tables import TOKENS, TableDrafter, TableTarget

PROMPT = [2, 1]
EMITTED = 4
"""The first token comes with the prompt; behind it a pass of two drafts and the target's own token,
or after a rejection further ones, of which the last ends without the target's own."""
THRESHOLD = 1e-4

RULES = {"": {}, ", top-k": {"top_k": 3}, ", top-p": {"top_p": 0.85}, ", min-p": {"min_p": 0.2}}
SETTINGS = {
    f"temperature {temperature}{name}": Sampling(temperature, **rule)
    for temperature in (0.6, 1.0)
    for name, rule in RULES.items()
}

Replies = Counter[tuple[int, ...]]


def two_drafts() -> TableDrafter:
    return replace(TableDrafter.random(2), depth=2)


def expected(target: TableTarget, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The exact probability of every reply."""
    chances = {}
    for reply in product(range(TOKENS), repeat=EMITTED):
        chance, behind = 1.0, [*PROMPT, *reply]
        for i, token in enumerate(reply):
            logits = target.table[behind[i], behind[i + 1]].tolist()
            chance *= probabilities(logits, sampling).get(token, 0.0)
        chances[reply] = chance
    return chances


def observed(target: TableTarget, drafter: Any, sampling: Sampling, runs: int) -> Replies:
    session = Session(target, drafter)
    return Counter(
        tuple(run(session, PROMPT, max_tokens=EMITTED, sampling=sampling, seed=seed).tokens)
        for seed in range(runs)
    )


def p_value(counts: Replies, chances: dict[tuple[int, ...], float]) -> float:
    """Of the chi-square test; replies that are expected fewer than five times count as one cell."""
    runs = counts.total()
    if any(chances[reply] == 0 for reply in counts):
        return 0.0
    rare = [r for r, c in chances.items() if c * runs < 5]
    cells = [(counts[r], c * runs) for r, c in chances.items() if c * runs >= 5]
    if rare and (mass := sum(chances[r] for r in rare) * runs) > 0:
        cells.append((sum(counts[r] for r in rare), mass))
    seen, wanted = np.array(cells).T
    return float(chisquare(seen, wanted * (runs / wanted.sum())).pvalue)


@pytest.mark.parametrize("setting", SETTINGS)
def test_replies_are_distributed_as_the_targets_own(setting: str) -> None:
    target, drafter, sampling = TableTarget.random(1), two_drafts(), SETTINGS[setting]
    counts = observed(target, drafter, sampling, 20_000)
    assert p_value(counts, expected(target, sampling)) > THRESHOLD


def test_plain_replies_pass_the_same_test() -> None:
    target, sampling = TableTarget.random(1), Sampling(1.0)
    assert p_value(observed(target, None, sampling, 4000), expected(target, sampling)) > THRESHOLD


def judge_with(old: str, new: str) -> Any:
    """`judge` from the text of its module with `old` replaced by `new`."""
    source = Path(acceptance.__file__).read_text("utf-8")
    assert source.count(old) == 1
    names: dict[str, Any] = {"__name__": acceptance.__name__}
    exec(compile(source.replace(old, new), acceptance.__file__, "exec"), names)
    return names["judge"]


KEPT = "p_x >= q_x or u < p_x / q_x"
MUTANTS = {
    "accepts always": (KEPT, "True"),
    "accepts by the inverse ratio": (KEPT, "q_x >= p_x or u < q_x / p_x"),
    "accepts half of what it may": (KEPT, "u < 0.5 * min(1.0, p_x / q_x)"),
    "draws again from p": ("residual(p, q).draw(r)", "p.draw(r)"),
    "draws again from q": ("residual(p, q).draw(r)", "q.draw(r)"),
    "leaves the residual negative": (
        "np.maximum(p.probs - q.of(p.ids), 0.0)",
        "p.probs - q.of(p.ids)",
    ),
    "uses one uniform twice": (
        "u, r = streams.accept(), streams.residual()",
        "u = r = streams.accept()",
    ),
    "draws the last token from the first row": ("p_rows[accepted]", "p_rows[0]"),
}
POWER_RUNS = 2000


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_acceptance_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lse_mlx.decode.loop.judge", judge_with(*MUTANTS[mutant]))
    target, drafter, sampling = TableTarget.random(1), two_drafts(), Sampling(1.0)
    counts = observed(target, drafter, sampling, POWER_RUNS)
    assert p_value(counts, expected(target, sampling)) < THRESHOLD


def test_right_acceptance_read_the_same_way_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lse_mlx.decode.loop.judge", judge_with(KEPT, f"({KEPT})"))
    target, drafter, sampling = TableTarget.random(1), two_drafts(), Sampling(1.0)
    counts = observed(target, drafter, sampling, POWER_RUNS)
    assert p_value(counts, expected(target, sampling)) > THRESHOLD


def test_drafts_are_accepted_as_often_as_they_overlap() -> None:
    target, drafter, sampling = TableTarget.random(1), two_drafts(), Sampling(1.0)
    session, accepted, overlap, tested = Session(target, drafter), 0, 0.0, 0
    for seed in range(POWER_RUNS):
        timings = run(session, PROMPT, max_tokens=EMITTED, sampling=sampling, seed=seed).timings
        tested += timings.tested[0]
        accepted += timings.accepted[0]
        overlap += timings.overlap[0]
    # The share accepted lies within five standard deviations of the chance to be accepted.
    chance = overlap / tested
    assert 0.2 < chance < 0.9
    assert abs(accepted - overlap) < 5 * (tested * chance * (1 - chance)) ** 0.5
