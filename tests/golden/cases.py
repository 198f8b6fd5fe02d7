"""The golden traces, with every outcome written by hand from the rules at the top of table.py."""

from dataclasses import dataclass, field

Candidates = list[dict[int, float]]
"""For each position: what could have stood there, and the drafter's probability for it."""


@dataclass(frozen=True)
class Pass:
    """A verify pass: what is proposed, and by hand what becomes of it.

    last_row: whether there is a row behind the last proposal
    """

    path: tuple[int, ...]
    candidates: Candidates
    accepted: int
    bonus: int | None
    committed: int
    last_row: bool = True


@dataclass(frozen=True)
class Case:
    """One golden trace.

    accept, residual: the uniforms that the sampled request consumes, in order, one pair a row
    predicted: for (position, layer) the experts that were predicted; no entry, no record. Of the prompt
        some have one, of the rows that a pass commits all
    """

    name: str
    prompt: tuple[int, ...]
    first: int
    passes: tuple[Pass, ...]
    stop_reason: str
    max_tokens: int | None = None
    stop_tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    accept: tuple[float, ...] = ()
    residual: tuple[float, ...] = ()
    payloads: bool = True
    predicted: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


def three(*path: int) -> Candidates:
    """Three candidates at each position, the one on the path not always the likeliest."""
    return [
        {token: 0.5, (token + 5) % 16: 0.25, (token + 9) % 16: 0.125}
        if place % 2 == 0
        else {(token + 2) % 16: 0.5, token: 0.375, (token + 11) % 16: 0.0625}
        for place, token in enumerate(path)
    ]


def greedy(
    path: tuple[int, ...], accepted: int, bonus: int | None, committed: int, last_row: bool = True
) -> Pass:
    """A pass over three candidates a position."""
    return Pass(path, three(*path), accepted, bonus, committed, last_row)


CASES = [
    Case(
        "greedy",
        prompt=(3, 4, 5),
        first=6,
        passes=(
            greedy((15, 0, 1), 0, 7, 1),  # zero: 7 follows 6, and the 15 is taken back
            greedy((9, 10, 11), 0, 8, 1),  # 8 and 9 are equally likely after 7: the lower id
            greedy((9, 10, 15), 2, 11, 3),  # partial
            greedy((12, 13, 14), 3, 15, 4),  # the whole block
            greedy((14, 13, 0), 2, 12, 3),  # a 15 was read, so it counts down
            greedy((), 0, 11, 1),  # a plain step
            greedy((10, 9, 8), 3, 7, 4),
            greedy((6, 5, 4), 3, 3, 2),  # 5 is the stop token, inside the accepted block
        ),
        stop_reason="stop_token",
        stop_tokens=(5,),
    ),
    Case(
        "limit",
        prompt=(0,),
        first=1,
        passes=(greedy((2, 3), 2, 4, 3),),
        stop_reason="max_tokens",
        max_tokens=4,
        payloads=False,
    ),
    Case(
        "no-bonus-row",  # three tokens are left and three are proposed
        prompt=(0,),
        first=1,
        passes=(greedy((2, 3, 4), 3, None, 3, last_row=False),),
        stop_reason="max_tokens",
        max_tokens=4,
    ),
    Case(
        "no-bonus-row-needed",  # the same, and the last proposal is wrong
        prompt=(0,),
        first=1,
        passes=(greedy((2, 3, 15), 2, 4, 3, last_row=False),),
        stop_reason="max_tokens",
        max_tokens=4,
    ),
    Case(
        "one-token",
        prompt=(1,),
        first=2,
        passes=(),
        stop_reason="stop_token",
        stop_tokens=(2, 9),
    ),
    Case(
        "cancelled",  # from outside, after two of the four tokens
        prompt=(9, 8),
        first=9,
        passes=(greedy((10, 11, 12), 3, 13, 2),),
        stop_reason="cancelled",
        payloads=False,
    ),
    Case(
        "sampled",
        prompt=(3, 4, 5),
        first=7,  # 6, 7, 8 at 0.625, 0.25, 0.125: 0.7 of the way lies in 7
        passes=(
            # 9 is as likely as not to be kept up to 0.375 / 0.5; 11 at 0.25 / 0.5 is not, by a hair,
            # and only 10 is left over where the drafter gave too little.
            Pass((9, 11), [{8: 0.5, 9: 0.5}, {10: 0.25, 11: 0.5, 12: 0.25}], 1, 10, 2),
            # 12 goes; 11 and 13 are left with 0.125 each, and half the way is the second.
            Pass((12,), [{11: 0.5, 12: 0.5}], 0, 13, 1),
            # 15 is as likely as the drafter says, so it always stays; then it counts down. 14 stays at
            # 0.6 < 0.625. The bonus: 11, 12, 13 at 0.125, 0.25, 0.625.
            Pass((15, 14), [{14: 0.75, 15: 0.25}, {14: 1.0}], 2, 13, 3),
        ),
        stop_reason="max_tokens",
        max_tokens=7,
        temperature=1.0,
        accept=(0.74, 0.5, 0.6, 0.999, 0.6, 0.0),
        residual=(0.7, 0.1, 0.3, 0.5, 0.0, 0.0, 0.9),
    ),
    Case(
        "routes",
        prompt=(3, 4, 5),
        first=6,
        passes=(greedy((7, 15), 1, 8, 2), greedy((9,), 1, 10, 2)),
        stop_reason="max_tokens",
        max_tokens=5,
        predicted={
            (0, 1): (),  # nothing was predicted
            (0, 3): (3, 6),  # right, in the router's order
            (1, 1): (5, 2),  # right, in another order
            (1, 3): (4, 0),  # one of two
            (3, 1): (0, 1, 2, 6),  # none, and more than the router takes
            (3, 3): (),
            (4, 1): (5, 0),  # right again
            (4, 3): (),
            (5, 1): (),
            (5, 3): (),
            (6, 1): (),
            (6, 3): (1,),  # one, and nothing else
        },
    ),
]
