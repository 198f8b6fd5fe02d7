"""The climb: in order, and no further than the first failure."""

from collections.abc import Callable

from lse_mlx.checkpoints.progress import Silent
from lse_mlx.errors import TargetError
from lse_mlx.qualify.ladder import CannotRun, Finding, Rung, climb
from tests.dice_pair import Heard


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
