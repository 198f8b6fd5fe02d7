"""The climb: in order, no further than the first failure; and what a pair's ladder loads for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.gate.gate import inspect_pair
from lse_mlx.checkpoints.progress import Silent
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.drafters.base import Drafter
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.engine import Engine
from lse_mlx.errors import CheckpointError, RequestError, TargetError
from lse_mlx.loading import load_pair
from lse_mlx.qualify import decoding, replay
from lse_mlx.qualify.ladder import NOT_HERE, Ladder, Report, climb
from lse_mlx.qualify.rung import CannotRun, Finding, Rung
from lse_mlx.traces.identity import TargetIdentity, identify
from tests.checkpoints.gate.sparse_checkpoints import hollow, read_json, write_json
from tests.dice_pair import Heard

DEMO = Pair(demo_pair.TARGET, demo_pair.DRAFTER)
NAMES = [
    "gate",
    "schema validation",
    "golden replay",
    "held-out acceptance",
    "greedy equality",
    "sampling distribution",
    *(name for name, _, _ in NOT_HERE),
]

Loaded = tuple[Engine, TargetIdentity]


def rung(name: str, climbed: Callable[[], Finding]) -> Rung:
    return Rung(name, f"{name} holds", climbed)


def good() -> Finding:
    return Finding("all of it", {"number": 3})


def bad() -> Finding:
    return Finding("", {"number": 4}, "It does not.")


def broken() -> Finding:
    raise TargetError("The target broke.")


def absent() -> Finding:
    raise CannotRun("nothing is here")


def never() -> Finding:
    raise AssertionError("reached")


def test_every_status() -> None:
    outcomes = climb(
        [rung("a", good), rung("b", absent), rung("c", bad), rung("d", never), rung("e", never)],
        Silent(),
    )
    assert [(o.name, o.status, o.says) for o in outcomes] == [
        ("a", "passed", "all of it"),
        ("b", "not run", "nothing is here"),
        ("c", "failed", "It does not."),
        ("d", "not reached", "c failed"),
        ("e", "not reached", "c failed"),
    ]
    assert outcomes[2].figures == {"number": 4}


def test_an_error_of_the_package_is_a_failure_with_its_sentence() -> None:
    first, second = climb([rung("a", broken), rung("b", never)], Silent())
    assert (first.status, first.says) == ("failed", "The target broke.")
    assert second.status == "not reached"


def test_an_outcome_has_all_of_it_for_json() -> None:
    [outcome] = climb([rung("a", good)], Silent())
    said = outcome.as_dict()
    assert said.pop("seconds") >= 0
    assert said == {
        "name": "a",
        "status": "passed",
        "criterion": "a holds",
        "says": "all of it",
        "figures": {"number": 3},
    }


def test_progress_counts_the_rungs() -> None:
    heard = Heard()
    climb([rung("a", good), rung("b", good)], heard)
    assert heard.steps == [("qualify", 0, 2), ("qualify", 1, 2), ("qualify", 2, 2)]


def climbed(
    load: Callable[[], Loaded], pair: Pair = DEMO, held_out: list[str] | None = None
) -> Report:
    assert pair.drafter is not None
    gate = inspect_pair(pair.target, pair.drafter)
    return Ladder(pair, gate, load, held_out, Silent()).climb()


def test_a_drafter_of_another_target_ends_at_the_gate(tmp_path: Path) -> None:
    drafter = hollow(demo_pair.DRAFTER, tmp_path / "drafter")
    config = read_json(drafter / "config.json")
    write_json(drafter / "config.json", config | {"hidden_size": 640})

    def nothing_is_loaded() -> Loaded:
        raise AssertionError("the pair was loaded")

    report = climbed(nothing_is_loaded, Pair(demo_pair.TARGET, drafter))
    assert report.failed
    assert [outcome.name for outcome in report.outcomes] == NAMES
    statuses = [outcome.status for outcome in report.outcomes]
    assert statuses == ["failed", *["not reached"] * (len(NAMES) - 1)]
    assert "hidden_size" in report.outcomes[0].says
    assert report.outcomes[0].figures["mismatches"]
    assert report.as_dict()["qualified"] is False


def test_a_pair_that_does_not_load_ends_at_the_gate() -> None:
    def damaged() -> Loaded:
        raise CheckpointError("The drafter's weights are damaged.")

    first, second, *_ = climbed(damaged).outcomes
    assert (first.status, second.status) == ("failed", "not reached")
    assert first.says == "The drafter's weights are damaged."


def loading(drafter: Drafter, loaded: list[Engine]) -> Callable[[], Loaded]:
    """Loads the demo's target with another drafter, and tells of it."""

    def load() -> Loaded:
        alone = load_pair(Pair(demo_pair.TARGET, None), warm=False)
        engine = Engine(alone.target, alone.tokenizer, drafter, strict_draft=True)
        loaded.append(engine)
        return engine, identify(demo_pair.TARGET)

    return load


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "TOKENS", 8)
    monkeypatch.setattr(replay, "TOKENS", 8)


@pytest.mark.usefixtures("short")
def test_a_useless_drafter_ends_at_acceptance_and_both_are_loaded_once_and_closed() -> None:
    loaded: list[Engine] = []
    useless = ScriptedDrafter(lambda position, draft: [5] * 7)
    report = climbed(loading(useless, loaded), held_out=["A moon?"])
    statuses = [outcome.status for outcome in report.outcomes]
    assert statuses == ["passed"] * 3 + ["failed"] + ["not reached"] * 6
    assert report.outcomes[3].name == "held-out acceptance"
    [engine] = loaded
    with pytest.raises(RequestError, match="closed"):
        engine.session()


@pytest.mark.usefixtures("short")
def test_a_drafter_that_dies_is_a_failure_whether_or_not_prompts_are_held_out() -> None:
    """Greedy replies without it would be equal, and nobody would ask for its acceptance."""
    dead = ScriptedDrafter.listed([])
    report = climbed(loading(dead, []))
    assert [outcome.status for outcome in report.outcomes[:3]] == ["passed", "passed", "failed"]
    assert "not in the script" in report.outcomes[2].says
