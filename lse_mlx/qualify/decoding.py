"""Rungs that decode prompts with a loaded pair: how often drafts are kept, and that nothing changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np

from lse_mlx.engine import Engine
from lse_mlx.errors import counted
from lse_mlx.qualify.rung import CannotRun, Finding
from lse_mlx.replies import Result

PROMPTS = 12
TOKENS = 32
LEAST_TOKENS_PER_PASS = 1.5
"""Below it a drafter is of little use: a draft and a wide pass cost more time than a plain one."""
TEMPERATURE = 1.0
DEVIATIONS = 5.0
"""How far chance may take a count from its expectation: about once in two million."""
NEAR_TIE = 0.25
"""How near two logits are that a device's rounding may swap, where rows depend on their number."""

ACCEPTANCE = (
    f"greedy replies to held-out prompts take at least {LEAST_TOKENS_PER_PASS} tokens a pass, and "
    "under sampling drafts are kept as often as p and q overlap, within "
    f"{DEVIATIONS:g} standard deviations"
)
EQUALITY = (
    "greedy token ids with and without the drafter are the same; on a device without --exact, "
    f"where they part, the target's two best logits are within {NEAR_TIE}"
)


@dataclass
class Decoding:
    """A pair and the prompts it answers.

    engine: strict, so that a drafter that fails is an error and not a reply of the target alone
    held_out: prompts on which the drafter was not trained; None where nobody named any
    general: prompts for what needs no held-out ones
    Greedy replies are kept: two rungs look at them.
    """

    engine: Engine
    held_out: Sequence[str] | None
    general: Sequence[str]
    _greedy: dict[str, Result] = field(default_factory=dict, init=False, repr=False)

    @property
    def prompts(self) -> list[str]:
        """The first held-out prompts, or else general ones."""
        return list((self.held_out or self.general)[:PROMPTS])

    def acceptance(self) -> Finding:
        """Tokens a pass on held-out prompts, and whether overlap foretells acceptance."""
        if self.held_out is None:
            raise CannotRun("no held-out prompts are known for this pair: give --prompts FILE")
        greedy = [self._reply(prompt) for prompt in self.prompts]
        sampled = [
            self.engine.generate(prompt, max_tokens=TOKENS, temperature=TEMPERATURE, seed=seed)
            for seed, prompt in enumerate(self.prompts)
        ]
        figures: dict[str, Any] = {"prompts": len(self.prompts), "tokens": TOKENS}
        figures |= {"greedy": _drafted(greedy), "sampled": _drafted(sampled)}
        return Finding(_said(figures), figures, _unlike(figures))

    def equality(self) -> Finding:
        """Greedy replies with and without the drafter."""
        parted, tokens = [], 0
        for number, prompt in enumerate(self.prompts, 1):
            fast = self._reply(prompt).token_ids
            alone = self.engine.generate(prompt, max_tokens=TOKENS, speculate=False).token_ids
            tokens += len(alone)
            if fast != alone:
                parted.append({"prompt": number, **self._parting(prompt, fast, alone)})
        exact = self._exact()
        figures = {
            "prompts": len(self.prompts),
            "tokens": tokens,
            "exact": exact,
            "differences": parted,
        }
        if not parted:
            said = f"{tokens} tokens of replies to {counted(len(self.prompts), 'prompt')}"
            return Finding(f"{said} are the same with and without the drafter", figures)
        first = parted[0]
        says = (
            f"replies to {counted(len(parted), 'prompt')} of {len(self.prompts)} differ; the first "
            f"parts at token {first['at']}, where the two best logits are {first['gap']:.3g} apart"
        )
        failed = exact or not all(p["gap"] <= NEAR_TIE for p in parted)
        return Finding(says, figures, f"{says}." if failed else None)

    def _reply(self, prompt: str) -> Result:
        if prompt not in self._greedy:
            self._greedy[prompt] = self.engine.generate(prompt, max_tokens=TOKENS)
        return self._greedy[prompt]

    def _exact(self) -> bool:
        """Whether rows are promised not to depend on how many are in a pass."""
        registry = self.engine.target.registry
        return not registry.on_device or registry.choices.exact

    def _parting(self, prompt: str, fast: list[int], alone: list[int]) -> dict[str, Any]:
        """Where two replies part, counted from 0, and how far apart the two best logits are there."""
        same = [a == b for a, b in zip(fast, alone, strict=False)]
        at = same.index(False) if False in same else len(same)
        target = self.engine.target
        read = [*self.engine.tokenizer.encode(prompt), *alone[:at]]
        logits = np.array(target.advance(read, target.new_state(), ()).logits[0])
        second, best = np.sort(logits)[-2:].tolist()
        return {"at": at, "gap": best - second}


def _drafted(replies: list[Result]) -> dict[str, Any]:
    """What became of the drafts in `replies`, by position of the draft and in sum."""
    timings = [reply.timings for reply in replies]
    tested, accepted, overlap = (
        [sum(column) for column in zip(*(t[name] for t in timings), strict=True)]
        for name in ("spec_tested_by_position", "spec_accepted_by_position", "spec_overlap_sum")
    )
    passes = sum(t["spec_steps"] for t in timings)
    return {
        "passes": passes,
        "tokens_per_pass": sum(t["spec_steps_n"] for t in timings) / passes if passes else 0.0,
        "tested": sum(tested),
        "accepted": sum(accepted),
        "expected": sum(overlap),
        "deviation": _deviation(tested, overlap),
        "acceptance_by_position": [
            a / t if t else None for a, t in zip(accepted, tested, strict=True)
        ],
        "overlap_by_position": [o / t if t else None for o, t in zip(overlap, tested, strict=True)],
    }


def _deviation(tested: Sequence[int], overlap: Sequence[float]) -> float:
    """An upper bound of the standard deviation of how many drafts are kept.

    Each is kept with the chance of its overlap; of chances with one sum, equal ones vary the most.
    """
    return sqrt(sum(o * (1 - o / t) for o, t in zip(overlap, tested, strict=True) if t))


def _unlike(figures: dict[str, Any]) -> str | None:
    greedy, sampled = figures["greedy"], figures["sampled"]
    if greedy["tokens_per_pass"] < LEAST_TOKENS_PER_PASS:
        return (
            f"A pass takes {greedy['tokens_per_pass']:.2f} tokens, fewer than "
            f"{LEAST_TOKENS_PER_PASS}."
        )
    if abs(sampled["accepted"] - sampled["expected"]) > DEVIATIONS * sampled["deviation"]:
        return (
            f"Of {sampled['tested']} sampled drafts {sampled['accepted']} were kept and "
            f"{sampled['expected']:.1f} were to be expected."
        )
    return None


def _said(figures: dict[str, Any]) -> str:
    greedy, sampled = figures["greedy"], figures["sampled"]
    return (
        f"replies to {counted(figures['prompts'], 'prompt')}: "
        f"{greedy['tokens_per_pass']:.2f} tokens a pass greedy and "
        f"{sampled['tokens_per_pass']:.2f} sampled; of {sampled['tested']} sampled drafts "
        f"{sampled['accepted']} were kept, {sampled['expected']:.1f} to be expected"
    )
