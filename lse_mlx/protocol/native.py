"""What a replay asks of a runtime: the interface to implement for another one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lse_mlx.protocol.fields import SCHEMA_VERSION
from lse_mlx.protocol.records import Ids, Probabilities, StepRecord, TraceHeader


@dataclass(frozen=True, kw_only=True)
class NativeIdentity:
    """What the native target is and whom it serves: fields as in a header, and held to them."""

    schema_version: int = SCHEMA_VERSION
    target_model_revision: str
    tokenizer_revision: str
    vocab_size: int
    layer_count: int
    hidden_size: int
    captured_stage: str
    captured_layer_ids: Ids
    hidden_dtype: str
    request_owner: str
    request_generation: int
    device: str


@dataclass(frozen=True, kw_only=True)
class NativeStart:
    """What the target makes of the prompt: the first token, and why the reply ends if it does."""

    first_token: int
    stop_reason: str | None


@dataclass(frozen=True, kw_only=True)
class NativeStep:
    """One verify pass of the native target: the fields of a StepRecord, by its own reckoning.

    target_token_ids and target_token_probabilities list as many tokens a row as the record does
    routes: for each sparse layer, the experts of every row of the pass, the highest score first; empty
        for a target without such layers
    stop_reason: why the reply ends in this step; None if it goes on
    """

    sequence_position: int
    anchor_token: int
    hidden_shape: tuple[int, int]
    hidden_digest: str
    target_token_ids: tuple[Ids, ...]
    target_token_probabilities: tuple[Probabilities, ...]
    target_rows_digest: str
    accepted_prefix_length: int
    bonus_token: int | None
    committed_rows: int
    routes: Mapping[int, tuple[Ids, ...]]
    stop_reason: str | None


class Native(Protocol):
    """A target, with acceptance, limits and state of its own, as `replay` drives it."""

    def identity(self) -> NativeIdentity:
        """What it is; asked first, and nothing else is called if a trace does not belong to it."""
        ...

    def start(self, header: TraceHeader) -> NativeStart:
        """Read the prompt into an empty state and choose the first token."""
        ...

    def verify(self, record: StepRecord) -> NativeStep:
        """Verify the record's path behind the native anchor, decide, and commit.

        Only what was proposed may be taken from the record, the path and its probabilities, and how
        many of the likeliest tokens each row lists.
        """
        ...

    def state_digest(self) -> str:
        """A digest of all that the target keeps of the sequence it has read."""
        ...

    def cold_digest(self) -> str | None:
        """The same digest after reading that sequence afresh, without any proposal.

        None where the device does not promise the same bits for both.
        """
        ...
