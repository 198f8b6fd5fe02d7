"""What a request measured. Times are in milliseconds; the names are those of the HTTP API."""

from dataclasses import dataclass, field
from typing import Any

from lse_mlx.decode.acceptance import Verdict
from lse_mlx.decode.stopping import Cut
from lse_mlx.kernels.registry import KernelCounts


@dataclass
class Timings:
    """Filled in by the loop as it runs; `as_dict` is what users see.

    depth: how many tokens a proposal can hold; 0 where the request does not speculate
    passes, passes_n: verify passes with a proposal, and the tokens they emitted
    tested, accepted, overlap: sums by position of the proposal, `depth` long
    draft_failures, draft_failure: how often the drafter failed, after which the target decodes
    alone, and what it said
    kernels, kernels_total: of this request, and of its engine since it was loaded
    """

    method: str = "none"
    depth: int = 0
    prompt_n: int = 0
    prompt_cached_n: int = 0
    prompt_ms: float = 0.0
    generated_n: int = 0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    proposed: int = 0
    passes: int = 0
    passes_n: int = 0
    plain_steps: int = 0
    draft_failures: int = 0
    draft_failure: str | None = None
    tested: list[int] = field(init=False)
    accepted: list[int] = field(init=False)
    overlap: list[float] = field(init=False)
    kernels: KernelCounts = field(default_factory=KernelCounts, init=False)
    kernels_total: KernelCounts = field(default_factory=KernelCounts, init=False)

    def __post_init__(self) -> None:
        self.tested = [0] * self.depth
        self.accepted = [0] * self.depth
        self.overlap = [0.0] * self.depth

    def count(
        self,
        proposed: int,
        verdict: Verdict,
        cut: Cut,
        started: float,
        drafted: float,
        ended: float,
    ) -> None:
        """Count one cycle: what was proposed, judged and emitted, and its three moments (seconds).

        Proposals behind the row where the reply ended were not looked at: they count as proposed,
        and neither as tested nor as accepted.
        """
        rows = cut.rows
        self.generated_n += len(cut.emitted)
        self.draft_ms += 1000 * (drafted - started)
        self.verify_ms += 1000 * (ended - drafted)
        self.decode_ms += 1000 * (ended - started)
        if not proposed:
            self.plain_steps += 1
            return
        self.passes += 1
        self.passes_n += len(cut.emitted)
        self.proposed += proposed
        for i in range(min(verdict.tested, rows)):
            self.tested[i] += 1
            self.overlap[i] += verdict.overlap[i]
        for i in range(min(verdict.accepted, rows)):
            self.accepted[i] += 1

    def count_draft_failure(self, why: str) -> None:
        """Count a failure of the drafter, with what it said in one sentence."""
        self.draft_failures += 1
        self.draft_failure = why

    def count_kernels(self, before: KernelCounts, after: KernelCounts) -> None:
        """Count what kernels did for this request between two moments of its engine."""
        self.kernels += after.since(before)
        self.kernels_total = after

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, ready for JSON."""
        decoded = max(self.generated_n - 1, 0)  # the first token came with the prompt
        out: dict[str, Any] = {
            "prompt_n": self.prompt_n,
            "prompt_cached_n": self.prompt_cached_n,
            "prompt_ms": self.prompt_ms,
            "prompt_per_second": _rate(self.prompt_n, self.prompt_ms),
            "generated_n": self.generated_n,
            "decode_n": decoded,
            "decode_ms": self.decode_ms,
            "decode_per_second": _rate(decoded, self.decode_ms),
            "jit_compiles": self.kernels.jit_compiles,
            "jit_compiles_total": self.kernels_total.jit_compiles,
            "jit_compile_ms_total": self.kernels_total.jit_compile_ms,
            "device_kernel_calls": self.kernels.device_kernel_calls,
            "reference_calls": self.kernels.reference_calls,
            "spec_method": self.method,
        }
        failures = {"spec_failures": self.draft_failures, "spec_failure": self.draft_failure}
        if not self.depth:
            # Where nothing is asked of the drafter, it can still fail to follow.
            return out | (failures if self.draft_failures else {})
        tested, accepted = sum(self.tested), sum(self.accepted)
        out |= {
            "spec_steps": self.passes,
            "spec_steps_n": self.passes_n,
            "spec_plain_steps": self.plain_steps,
            "spec_proposed": self.proposed,
            "spec_tested": tested,
            "spec_accepted": accepted,
            "spec_tested_by_position": list(self.tested),
            "spec_accepted_by_position": list(self.accepted),
            "spec_overlap_sum": list(self.overlap),
            "spec_draft_ms": self.draft_ms,
            "spec_verify_ms": self.verify_ms,
            **failures,
        }
        if self.passes:
            out["spec_mean_width"] = (self.proposed + self.passes) / self.passes
            out["acceptance_rate"] = accepted / tested
            out["tokens_per_pass"] = self.passes_n / self.passes
        return out


def _rate(count: int, milliseconds: float) -> float:
    return 1000 * count / milliseconds if milliseconds > 0 else 0.0
