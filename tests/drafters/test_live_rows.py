"""The rules of append and rewind, against a plain list of positions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lse_mlx.drafters.live_rows import LiveRows
from lse_mlx.errors import DraftError


@given(
    capacity=st.integers(1, 12),
    block=st.integers(2, 8),
    steps=st.lists(st.tuples(st.sampled_from("ar"), st.integers(0, 40), st.integers(0, 15))),
)
def test_every_sequence_of_steps_keeps_the_rules(
    capacity: int, block: int, steps: list[tuple[str, int, int]]
) -> None:
    rows, held, position = LiveRows(capacity, block), [], 0
    for kind, to, count in steps:
        dropped = position - to
        may_rewind = 0 <= dropped <= min(block, len(held))
        if kind == "r":
            allowed = may_rewind
        else:
            allowed = count > 0 and (may_rewind or (dropped < 0 and not held))
        if not allowed:
            with pytest.raises(DraftError):
                rows.rewind(to) if kind == "r" else rows.append(to, count)
        else:
            rows.rewind(to) if kind == "r" else rows.append(to, count)
            added = count if kind == "a" else 0
            held = [p for p in held if p < to] + list(range(to, to + added))
            # What fell out of the ring does not come back by a rewind.
            held, position = held[-capacity:], to + added
        assert (rows.position, rows.live) == (position, len(held))


def test_refusals_name_the_positions() -> None:
    rows = LiveRows(capacity=19, longest_rewind=8)
    rows.append(0, 30)
    with pytest.raises(DraftError, match="position 31 leaves a gap after position 30"):
        rows.append(31, 1)
    with pytest.raises(DraftError, match="drops 9 rows, more than the 8"):
        rows.rewind(21)
    with pytest.raises(DraftError, match=r"outside 0\.\.30"):
        rows.rewind(31)
    with pytest.raises(DraftError, match="position -1"):
        rows.append(-1, 1)
    with pytest.raises(DraftError, match="0 rows at position 30"):
        rows.append(30, 0)
    rows.reset()
    rows.append(100, 2)
    with pytest.raises(DraftError, match="only 2 are held"):
        rows.rewind(97)
