"""The drafter's part in one reply: proposals while it works, and none once it failed.

Whatever a drafter raises is a failure of it, counted and told, and never the request's: a drafter can
be anybody's code. Only a kernel that was required and does not run ends the reply, because going on
without it is what the caller ruled out.
"""

from dataclasses import dataclass, field, replace

import mlx.core as mx

from lse_mlx.decode.acceptance import check_proposal
from lse_mlx.decode.session import Session
from lse_mlx.decode.timings import Timings
from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.errors import DraftError, KernelError, counted, reason


@dataclass
class Drafting:
    """Stands between the cycle and a session's drafter.

    The drafter's context takes in what the target reads, also while a reply does not speculate, so
    that the next one can. A failure of the drafter costs its proposals for the rest of the reply
    and its context, no more: the target goes on alone, and `timings` say what happened. The next
    reply that speculates starts cold, with a new context, or without the drafter if it failed before.

    speculate: whether the reply asks for proposals
    strict:    a failure while it does ends the reply with DraftError instead
    """

    session: Session
    speculate: bool
    strict: bool
    timings: Timings = field(repr=False)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's blocks whose outputs `append` wants now."""
        drafter = self.session.drafter
        return () if drafter is None or self.session.context is None else drafter.taps

    def begin(self) -> None:
        """Give an empty session its context."""
        drafter = self.session.drafter
        if drafter is None or self.session.context is not None or self.session.tokens:
            return
        try:
            self.session.context = drafter.new_context()
        except Exception as error:
            self._failed(error)

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        """A proposal that the target can judge; an empty one where there is no drafter to ask."""
        drafter, context = self.session.drafter, self.session.context
        if not self.speculate or drafter is None or context is None:
            return Proposal([], [])
        try:
            proposal = context.propose(anchor, temperature, uniform)
            check_proposal(proposal, drafter.depth, self.session.target.vocab_size)
            # Plain numbers: the tokens are emitted, and NumPy's are no JSON.
            proposal = replace(proposal, tokens=[int(token) for token in proposal.tokens])
        except Exception as error:
            self._failed(error)
            return Proposal([], [])
        return proposal

    def append(self, features: mx.array, first: int) -> None:
        """Hand the features of committed rows (fp32 [rows, taps * hidden]) to the context."""
        if self.session.context is None:
            return
        try:
            self.session.context.append(features, first)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, KernelError):
            raise error
        self.timings.count_draft_failure(reason(error))
        if not (self.strict and self.speculate):
            self.session.drop_context()
            mx.clear_cache()  # it may be memory that was missing
            return
        if isinstance(error, DraftError):
            raise error
        told = counted(self.timings.generated_n, "token")
        raise DraftError(
            f"The drafter failed after {told} ({reason(error)}): try again, or decode without it."
        ) from error
