"""Drafters that say what a script tells them: for tests of decoding and for replays of a recording.

    ScriptedDrafter.right(sequence)             drafts the known continuation
    ScriptedDrafter.right_for(sequence, k, vocab_size)
                                                the same for k tokens, then wrong ones
    ScriptedDrafter.listed(drafts)              drafts[0], then drafts[1], ...

They read no features. Their contexts keep the position under the same rules as a real drafter's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.drafters.live_rows import LiveRows
from lse_mlx.errors import DraftError

Script = Callable[[int, int], list[int] | Proposal]
"""(position of the anchor, how many proposals this context made before) -> what to propose.

Tokens are proposed with all of each q on them; a proposal goes out as it is."""


@dataclass
class ScriptedContext:
    """One session's side: where it stands, and how many drafts it has made."""

    script: Script
    rows: LiveRows
    drafts_made: int = 0

    @property
    def position(self) -> int:
        """Absolute position after the last appended row."""
        return self.rows.position

    def append(self, features: mx.array, first: int) -> None:
        """Count `features.shape[0]` rows from `first` on; their values are not looked at.

        Raises DraftError for no rows, a gap, or a rewind of more than one block.
        """
        self.rows.append(first, features.shape[0])

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        """What the script says; draws no uniform, which leaves the request's other draws alone.

        Raises DraftError if nothing was appended yet or the script has no draft left.
        """
        if not self.rows.live:
            raise DraftError("A draft needs context: append the prompt's rows before proposing.")
        said = self.script(self.position, self.drafts_made)
        self.drafts_made += 1
        return said if isinstance(said, Proposal) else Proposal.certain(said)


@dataclass(frozen=True)
class ScriptedDrafter:
    """A drafter that follows `script`; `depth` tokens at most, `taps` as asked for.

    Right and partly right scripts know the sequence by absolute position: the anchor at position p
    is `sequence[p]`. Where the sequence ends they draft fewer tokens, at its end none.
    """

    script: Script
    depth: int = 7
    taps: tuple[int, ...] = ()
    name: str = "scripted"

    def new_context(self) -> ScriptedContext:
        """An empty context, at position 0, with the script at its first draft."""
        # A scripted context forgets nothing: the span it holds is as long as the sequence.
        return ScriptedContext(self.script, LiveRows(1 << 40, self.depth + 1))

    @classmethod
    def right(
        cls, sequence: Sequence[int], depth: int = 7, taps: tuple[int, ...] = ()
    ) -> "ScriptedDrafter":
        """Always drafts what comes next in `sequence` (prompt and continuation)."""

        def script(position: int, draft: int) -> list[int]:
            return list(sequence[position + 1 : position + 1 + depth])

        return cls(script, depth, taps)

    @classmethod
    def right_for(
        cls,
        sequence: Sequence[int],
        k: int,
        vocab_size: int,
        depth: int = 7,
        taps: tuple[int, ...] = (),
    ) -> "ScriptedDrafter":
        """Drafts the first `k` tokens right, and every later one as some other id."""

        def script(position: int, draft: int) -> list[int]:
            known = sequence[position + 1 : position + 1 + depth]
            return [t if i < k else (t + 1) % vocab_size for i, t in enumerate(known)]

        return cls(script, depth, taps)

    @classmethod
    def listed(
        cls, drafts: Sequence[Sequence[int]], depth: int = 7, taps: tuple[int, ...] = ()
    ) -> "ScriptedDrafter":
        """Each context's n-th proposal is `drafts[n]`; one proposal more raises DraftError."""

        def script(position: int, draft: int) -> list[int]:
            if draft >= len(drafts):
                raise DraftError(
                    f"Draft {draft} at position {position} is not in the script of {len(drafts)}: "
                    "list one draft for every pass."
                )
            return list(drafts[draft][:depth])

        return cls(script, depth, taps)
