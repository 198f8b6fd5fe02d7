"""The rung that looks at sampling: with the drafter, tokens are distributed as the target's own.

Thousands of passes over few beginnings would be the same work again and again, so each is run once,
from a fresh state. A state that sampling spoils is therefore seen by golden replay, not here.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any, cast

import mlx.core as mx

from lse_mlx.decode.loop import Request, decode
from lse_mlx.decode.sampling import Sampling, TargetRows
from lse_mlx.decode.session import Session
from lse_mlx.decode.stopping import Limits
from lse_mlx.decode.timings import Timings
from lse_mlx.drafters.base import DraftContext, Drafter, Proposal, Uniform
from lse_mlx.qualify.chi_square import p_value
from lse_mlx.qualify.rung import Finding
from lse_mlx.target.model import Pass, Target

EMITTED = 3
"""The first token comes with the prompt. Of a draft of two, both are judged behind it; every other
draft is cut to one, and behind that the target adds a token of its own."""
LENGTHS = (1, 2)
DRAWS = 600
LEAST_P = 0.001
SETTINGS = (Sampling(temperature=1.5, top_k=4), Sampling(temperature=0.8, top_k=3, top_p=0.95))

CRITERION = (
    f"{DRAWS} seeded speculative replies of {EMITTED} tokens are distributed as the target's plain "
    f"passes say, at each of {len(SETTINGS)} settings: chi-square with p above {LEAST_P}"
)

Reply = tuple[int, ...]


def sampling_distribution(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], draws: int = DRAWS
) -> Finding:
    """Compare speculative replies with the exact law of the target's own, at every setting.

    prompts: token ids; of them each setting takes the one whose replies are the least certain
    """
    figures: list[dict[str, Any]] = []
    failure = None
    remembered = RememberedTarget(target)
    for sampling in SETTINGS:
        laws = [(law(remembered, prompt, sampling), prompt) for prompt in prompts]
        exact, prompt = max(laws, key=lambda found: entropy(found[0]))
        counts, timings = draw(remembered, drafter, prompt, sampling, draws)
        p = p_value(counts, exact)
        figures.append(_figures(sampling, exact, counts, timings, p))
        if not p > LEAST_P and failure is None:
            failure = (
                f"At temperature {sampling.temperature} the replies are not distributed as the "
                f"target's own: p is {p:.2g}."
            )
    values = ", ".join(f"{setting['p']:.2g}" for setting in figures)
    kept, tested = (sum(setting[name] for setting in figures) for name in ("accepted", "tested"))
    says = f"p is {values}; {kept} of {tested} drafts were kept"
    return Finding(says, {"settings": figures}, failure)


def law(target: "RememberedTarget", prompt: list[int], sampling: Sampling) -> dict[Reply, float]:
    """The probability of every reply of `EMITTED` tokens, from a plain pass after each beginning."""
    chances: dict[Reply, float] = {(): 1.0}
    for _ in range(EMITTED):
        longer: dict[Reply, float] = {}
        for reply, chance in chances.items():
            logits = target.advance([*prompt, *reply], target.new_state(), ()).logits
            answer = TargetRows(logits, sampling)[0]
            for token, share in zip(answer.ids.tolist(), answer.probs.tolist(), strict=True):
                if share > 0:
                    longer[*reply, token] = chance * share
        chances = longer
    return chances


def entropy(chances: dict[Reply, float]) -> float:
    """How uncertain a reply is, in nats."""
    return -sum(c * log(c) for c in chances.values())


def draw(
    target: "RememberedTarget", drafter: Drafter, prompt: list[int], sampling: Sampling, draws: int
) -> tuple[Counter[Reply], Timings]:
    """The replies of the decode cycle for seeds 0, 1, ...; no token ends one."""
    counts: Counter[Reply] = Counter()
    timings = Timings(drafter.name, drafter.depth)
    limits = Limits(frozenset(), EMITTED, EMITTED)
    for seed in range(draws):
        # All that the cycle asks of a target.
        session = Session(cast(Target, target), ShortDrafter(drafter, LENGTHS[seed % len(LENGTHS)]))
        request = Request(prompt, sampling, limits, seed, speculate=True, strict_draft=True)
        steps = decode(session, request, timings)
        counts[tuple(token for step in steps for token in step.tokens)] += 1
    return counts, timings


@dataclass(frozen=True)
class ShortDrafter:
    """A drafter whose proposals are cut to their first `depth` tokens."""

    whole: Drafter
    depth: int

    @property
    def name(self) -> str:
        """As the drafter's."""
        return self.whole.name

    @property
    def taps(self) -> tuple[int, ...]:
        """As the drafter's."""
        return self.whole.taps

    def new_context(self) -> "ShortContext":
        """An empty context, at position 0."""
        return ShortContext(self.whole.new_context(), self.depth)


@dataclass(frozen=True)
class ShortContext:
    """One session's side: the drafter's own context, asked for less."""

    whole: DraftContext
    depth: int

    @property
    def position(self) -> int:
        """As the drafter's."""
        return self.whole.position

    def append(self, features: mx.array, first: int) -> None:
        """As the drafter's."""
        self.whole.append(features, first)

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        """The first tokens of what the drafter proposes."""
        return self.whole.propose(anchor, temperature, uniform).first(self.depth)


@dataclass
class RememberedState:
    """The tokens of a sequence, in place of its state."""

    committed: Reply = ()
    open: Reply = ()

    def commit(self, n: int) -> None:
        """Keep the first `n` tokens of the open pass."""
        self.committed, self.open = self.committed + self.open[:n], ()


@dataclass
class RememberedTarget:
    """A target that runs each pass once: what it answers is fixed by the tokens alone.

    A thousand replies to one prompt share few passes, so that most of their time is the drafter's.
    """

    target: Target
    _answers: dict[tuple[Reply, Reply, tuple[int, ...], bool], Pass] = field(
        default_factory=dict, repr=False
    )

    @property
    def vocab_size(self) -> int:
        """As the target's."""
        return self.target.vocab_size

    def new_state(self) -> RememberedState:
        """Of an empty sequence."""
        return RememberedState()

    def advance(self, tokens: list[int], state: RememberedState, taps: tuple[int, ...]) -> Pass:
        """As `Target.advance`."""
        answer = self._answer(tokens, state, taps, open_pass=False)
        state.commit(len(tokens))
        return answer

    def verify(self, tokens: list[int], state: RememberedState, taps: tuple[int, ...]) -> Pass:
        """As `Target.verify`."""
        return self._answer(tokens, state, taps, open_pass=True)

    def _answer(
        self, tokens: list[int], state: RememberedState, taps: tuple[int, ...], open_pass: bool
    ) -> Pass:
        state.open = tuple(tokens)
        key = (state.committed, state.open, taps, open_pass)
        if key not in self._answers:
            fresh = self.target.new_state()
            if state.committed:
                self.target.advance(list(state.committed), fresh, ())
            run = self.target.verify if open_pass else self.target.advance
            answer = run(tokens, fresh, taps)
            mx.eval(answer.logits, answer.features)
            self._answers[key] = answer
        return self._answers[key]


def _figures(
    sampling: Sampling,
    exact: dict[Reply, float],
    counts: Counter[Reply],
    timings: Timings,
    p: float,
) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "draws": counts.total(),
        "possible_replies": len(exact),
        "seen_replies": len(counts),
        "entropy_nats": entropy(exact),
        "tested": sum(timings.tested),
        "accepted": sum(timings.accepted),
        "p": p,
    }
