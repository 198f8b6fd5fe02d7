"""One conversation: its committed tokens, its state in the target, its context in the drafter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from threading import Lock

from lse_mlx.drafters.base import DraftContext, Drafter
from lse_mlx.errors import RequestError
from lse_mlx.target.model import Target
from lse_mlx.target.state import TargetState


@dataclass
class Session:
    """Owned by one caller at a time. `tokens` are exactly those committed in `state`.

    `turn` grows with every reply that begins and every reset, so that a reply which was left
    unfinished notices that it cannot go on. `owner` is a random name of the session's own, which
    tells records of its replies from those of others.

    `context` follows the target, also through plain replies; None before the first one, without a
    drafter, and after the drafter failed, until the session starts cold again. A drafter that fails
    in two replies, one after the other, is left out of the session for good, so that it does not
    cost every reply a cold start.
    """

    target: Target
    drafter: Drafter | None
    tokens: list[int] = field(default_factory=list, repr=False)
    state: TargetState = field(init=False, repr=False)
    context: DraftContext | None = field(default=None, init=False, repr=False)
    turn: int = field(default=0, init=False)
    owner: str = field(default_factory=lambda: token_hex(16), init=False, repr=False)
    _draft_failures: int = field(default=0, init=False, repr=False)
    _stepping: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._clear()

    def reset(self) -> None:
        """Forget everything: what follows is a cold start."""
        self.turn += 1
        self._clear()

    def _clear(self) -> None:
        self.tokens = []
        self.state = self.target.new_state()
        self.context = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Have the session to oneself; RequestError where somebody has it, in whatever thread."""
        if not self._stepping.acquire(blocking=False):
            raise RequestError(
                "The session is at work on another reply: begin this one when that has ended, or take "
                "a session for each."
            )
        try:
            yield
        finally:
            self._stepping.release()

    def drop_context(self) -> None:
        """The drafter failed: go on without it, and at the second time in a row for good."""
        self.context = None
        self._draft_failures += 1
        if self._draft_failures > 1:
            self.drafter = None

    def resume(self, prompt: list[int], speculate: bool) -> list[int]:
        """Begin a reply: the part of `prompt` still to be taken in.

        The session continues when its tokens are a proper prefix of the prompt and its drafter has
        seen them all; after a failure of the drafter, as long as replies do not speculate. Otherwise
        it starts cold. One token is always left: the reply begins from the logits of the last one.
        """
        self.turn += 1
        held = len(self.tokens)
        fits = held < len(prompt) and prompt[:held] == self.tokens
        if self.context is None:
            followed = self.drafter is None or not speculate
        else:
            followed = self.context.position == held
            self._draft_failures = 0  # the reply before went well
        if held and not (fits and followed):
            self._clear()
        return prompt[len(self.tokens) :]
