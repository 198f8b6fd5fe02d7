"""What a test asks of a reply, as plain values that the slow reference and the product both read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lse_mlx.decode.loop import Request
from lse_mlx.decode.rules import Penalties, Rules
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.stopping import Limits


@dataclass(frozen=True)
class Asked:
    """One request. `stops` are its stop strings; `cancel_at` says after how many tokens the caller
    cancels, 0 before anything is read."""

    prompt: list[int]
    max_tokens: int | None = None
    room: int = 400
    stop_tokens: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    cancel_at: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    repetition: float = 1.0
    repetition_window: int = 64
    presence: float = 0.0
    presence_window: int = 64
    frequency: float = 0.0
    frequency_window: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    end_tokens: Literal["allowed", "banned", "required"] = "allowed"
    top_logprobs: int | None = None

    @property
    def most(self) -> int:
        """The most tokens that can be emitted."""
        return self.room if self.max_tokens is None else min(self.room, self.max_tokens)

    def request(
        self,
        speculate: bool = True,
        prefill_rows: int = 512,
        strict_draft: bool = False,
        cancelled: Callable[[int], bool] | None = None,
    ) -> Request:
        """The same for the code under test; `cancelled` in place of `cancel_at`."""
        at = self.cancel_at
        if at is not None:
            assert cancelled is None
            cancelled = lambda emitted: emitted >= at  # noqa: E731
        penalties = Penalties(
            self.repetition,
            self.repetition_window,
            self.presence,
            self.presence_window,
            self.frequency,
            self.frequency_window,
            self.logit_bias,
        )
        return Request(
            prompt=self.prompt,
            sampling=self.sampling,
            limits=Limits(self.stop_tokens, self.max_tokens, self.room, cancelled),
            seed=self.seed,
            speculate=speculate,
            prefill_rows=prefill_rows,
            rules=Rules(penalties, self.stop_tokens, self.min_tokens, self.end_tokens, self.most),
            top_logprobs=self.top_logprobs,
            strict_draft=strict_draft,
        )
