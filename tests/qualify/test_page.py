"""docs/qualify.md names every rung, in order, with the criterion that the code has."""

import re
from pathlib import Path

from lse_mlx import demo_pair
from lse_mlx.checkpoints.gate.gate import inspect_pair
from lse_mlx.checkpoints.progress import Silent
from lse_mlx.checkpoints.resolve import Pair
from lse_mlx.qualify.ladder import NOT_HERE, Ladder

PAGE = Path(__file__).parents[2] / "docs" / "qualify.md"


def test_the_table_is_the_ladder() -> None:
    gate = inspect_pair(demo_pair.TARGET, demo_pair.DRAFTER)
    pair = Pair(demo_pair.TARGET, demo_pair.DRAFTER)

    def load() -> None:
        raise AssertionError("the pair was loaded")

    rungs = Ladder(pair, gate, load, None, Silent()).rungs()  # type: ignore[arg-type]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE.read_text("utf-8"), re.M)
    assert [name for name, _ in rows] == ["rung", *(rung.name for rung in rungs)]
    said = dict(rows)
    not_here = {name for name, _, _ in NOT_HERE}
    for rung in rungs:
        if rung.name in not_here:
            assert said[rung.name].startswith("not run: ")
        else:
            assert said[rung.name] == rung.criterion
