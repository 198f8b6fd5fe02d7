"""The ladder of a pair: where it ends when something is wrong, and which models it loads for that."""

from pathlib import Path

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.progress import Silent
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.drafters.base import Drafter
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.engine import Engine
from lse_mlx.errors import CheckpointError, RequestError
from lse_mlx.loading import load_pair
from lse_mlx.qualify import measures, records
from lse_mlx.qualify.pair import NOT_HERE, Ladder, Opened
from tests.checkpoints.gate.sparse_checkpoints import hollow, read_json, write_json

DEMO = Pair(demo_pair.TARGET, demo_pair.DRAFTER)
ALONE = Pair(demo_pair.TARGET, None)
NAMES = [
    "schema validation",
    "gate",
    "golden replay",
    "held-out acceptance",
    "greedy equality",
    "sampling distribution",
    *(name for name, _, _ in NOT_HERE),
]


def open_target() -> Opened:
    return ALONE, load_pair(ALONE, warm=False)


def open_nothing() -> Opened:
    raise AssertionError("the pair was loaded")


def opening(drafter: Drafter, opened: list[Engine]) -> Opened:
    folders, alone = open_target()
    opened.append(Engine(alone.target, alone.tokenizer, drafter))
    return folders, opened[-1]


def test_a_drafter_of_another_target_ends_at_the_gate(tmp_path: Path) -> None:
    drafter = hollow(demo_pair.DRAFTER, tmp_path / "drafter")
    config = read_json(drafter / "config.json")
    write_json(drafter / "config.json", config | {"hidden_size": 640})
    ladder = Ladder(Pair(demo_pair.TARGET, drafter), open_target, open_nothing, None, Silent())
    report = ladder.climb()
    assert report.failed
    assert [outcome.name for outcome in report.outcomes] == NAMES
    statuses = [outcome.status for outcome in report.outcomes]
    assert statuses == ["passed", "failed", *["not reached"] * (len(NAMES) - 2)]
    assert "hidden_size" in report.outcomes[1].says
    assert report.outcomes[1].figures["mismatches"]
    assert report.as_dict()["qualified"] is False


def test_a_useless_drafter_ends_at_acceptance_and_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measures, "TOKENS", 8)
    monkeypatch.setattr(records, "TOKENS", 8)
    opened: list[Engine] = []
    useless = ScriptedDrafter(lambda position, draft: [5] * 7)
    ladder = Ladder(DEMO, open_target, lambda: opening(useless, opened), ["A moon?"], Silent())
    statuses = {outcome.name: outcome.status for outcome in ladder.climb().outcomes}
    assert list(statuses.values()) == ["passed"] * 3 + ["failed"] + ["not reached"] * 6
    assert statuses["held-out acceptance"] == "failed"
    [engine] = opened
    with pytest.raises(RequestError, match="closed"):
        engine.session()


def test_a_drafter_that_does_not_load_fails_the_next_rung() -> None:
    def broken() -> Opened:
        raise CheckpointError("The drafter's weights are damaged.")

    outcomes = Ladder(DEMO, open_target, broken, None, Silent()).climb().outcomes
    assert [outcome.status for outcome in outcomes[:4]] == [
        "passed",
        "passed",
        "failed",
        "not reached",
    ]
    assert outcomes[2].says == "The drafter's weights are damaged."
