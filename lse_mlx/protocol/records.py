"""Version 1 of the drafting contract: one record a verify pass, and the header of their trace.

docs/protocol.md says what each field means. A record is checked when it is made, whoever makes it.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from lse_mlx.errors import shown
from lse_mlx.protocol.fields import (
    LARGEST_SEED,
    Record,
    check_digest,
    check_id,
    check_ids,
    check_integer,
    check_number,
    check_one_of,
    check_shares,
    check_text,
    check_tuple,
    refuse,
)

HiddenDtype = Literal["float32"]
"""How hidden rows are stored and hashed: row-major, little endian."""

StopReason = Literal["stop_token", "stop_string", "max_tokens", "context_full", "cancelled"]

CANDIDATES = ("candidate_token_ids", "candidate_probabilities")
TARGETS = ("target_token_ids", "target_token_probabilities")

Ids = tuple[int, ...]
Probabilities = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TraceHeader(Record):
    """What holds for a whole trace: one request to one target.

    Raises ProtocolError, which names the field, for a value out of range.
    """

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
    prompt_token_ids: Ids
    first_token: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int | None
    stop_token_ids: Ids
    stop_reason: str
    step_count: int
    route_count: int
    drafter: str | None
    device: str
    package_version: str

    number_fields: ClassVar[frozenset[str]] = frozenset({"temperature", "top_p", "min_p"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocab_size", "layer_count", "hidden_size"):
            check_integer(name, getattr(self, name), 1, (1 << 31) - 1)
        _check_origin(self)
        layers, count = self.captured_layer_ids, self.layer_count
        if any(layer >= count for layer in layers):
            wanted = f"the target has {count} layers, so give ids from 0 to {count - 1}"
            refuse("captured_layer_ids", layers, wanted)
        self._check_request()
        for name in ("step_count", "route_count"):
            check_integer(name, getattr(self, name), 0)
        if self.drafter is not None:
            check_text("drafter", self.drafter)
        check_text("device", self.device)
        check_text("package_version", self.package_version)

    @property
    def greedy(self) -> bool:
        """Whether every distribution is one token."""
        return self.temperature == 0

    def _check_request(self) -> None:
        check_ids("prompt_token_ids", self.prompt_token_ids, distinct=False)
        if not self.prompt_token_ids:
            refuse("prompt_token_ids", self.prompt_token_ids, "give at least one token")
        check_id("first_token", self.first_token)
        check_ids("stop_token_ids", self.stop_token_ids)
        for name in ("prompt_token_ids", "first_token", "stop_token_ids"):
            check_in_vocabulary(name, getattr(self, name), self.vocab_size)
        check_number("temperature", self.temperature, 0)
        check_integer("top_k", self.top_k, 0)
        check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            refuse("top_p", self.top_p, "give a number above 0 and at most 1")
        check_number("min_p", self.min_p, 0, 1)
        if type(self.seed) is not int or not 0 <= self.seed < LARGEST_SEED:
            refuse("seed", self.seed, "give an integer from 0 up, below 2 to the power of 1024")
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
        check_one_of("stop_reason", self.stop_reason, get_args(StopReason))


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    """One verify pass: what was proposed, what the target said of each row, and what stayed.

    k is the length of the path, rows the number of rows of the pass: k + 1, the anchor first, or k
    where no row was left to answer the whole path.

    hidden_shape: rows, and captured layers * hidden size
    hidden_payload: the tensor of the payload file that holds the rows; None for the digest alone
    hidden_digest: SHA-256 of the rows' bytes
    candidate_token_ids, candidate_probabilities: k lists, what could have stood at each position
    target_token_ids, target_token_probabilities: `rows` lists, the likeliest first, at least one
    bonus_token: the target's own token after the accepted ones; None without a row for it
    committed_rows: the rows that became part of the state: as many as tokens were looked at

    Raises ProtocolError, which names the field, for a value out of range and for fields that
    contradict each other.
    """

    target_model_revision: str
    tokenizer_revision: str
    request_owner: str
    request_generation: int
    sequence_position: int
    captured_stage: str
    captured_layer_ids: Ids
    hidden_dtype: str
    hidden_shape: tuple[int, int]
    hidden_payload: str | None
    hidden_digest: str
    anchor_token: int
    candidate_token_ids: tuple[Ids, ...]
    candidate_probabilities: tuple[Probabilities, ...]
    selected_candidate_path: Ids
    target_token_ids: tuple[Ids, ...]
    target_token_probabilities: tuple[Probabilities, ...]
    target_rows_digest: str
    accepted_prefix_length: int
    bonus_token: int | None
    committed_rows: int

    number_fields: ClassVar[frozenset[str]] = frozenset(
        {"candidate_probabilities", "target_token_probabilities"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_origin(self)
        check_integer("sequence_position", self.sequence_position, 1)
        check_id("anchor_token", self.anchor_token)
        self._check_proposal()
        self._check_hidden()
        self._check_target()
        self._check_outcome()

    @property
    def rows(self) -> int:
        """The rows of the pass."""
        return self.hidden_shape[0]

    @property
    def answer(self) -> Ids:
        """The accepted tokens and the bonus token: what the pass would emit without any limit."""
        accepted = self.selected_candidate_path[: self.accepted_prefix_length]
        return accepted if self.bonus_token is None else (*accepted, self.bonus_token)

    def _check_proposal(self) -> None:
        check_ids("selected_candidate_path", self.selected_candidate_path, distinct=False)
        path = self.selected_candidate_path
        check_tuple("candidate_token_ids", self.candidate_token_ids, check_ids)
        check_tuple("candidate_probabilities", self.candidate_probabilities, check_shares)
        _check_pairs(CANDIDATES, self.candidate_token_ids, self.candidate_probabilities)
        if len(self.candidate_token_ids) != len(path):
            refuse(
                "selected_candidate_path",
                path,
                f"give one token for each of the {len(self.candidate_token_ids)} positions",
            )
        for place, (token, ids) in enumerate(zip(path, self.candidate_token_ids, strict=True)):
            if token not in ids:
                refuse(
                    "selected_candidate_path",
                    path,
                    f"token {token} is no candidate at position {place}, so choose among those",
                )

    def _check_hidden(self) -> None:
        check_tuple("hidden_shape", self.hidden_shape, lambda n, held: check_integer(n, held, 0))
        path, layers = len(self.selected_candidate_path), len(self.captured_layer_ids)
        if len(self.hidden_shape) != 2 or self.rows not in (path + 1, path) or not self.rows:
            refuse(
                "hidden_shape",
                self.hidden_shape,
                f"a path of {path} takes {path + 1} rows, so give those and the width",
            )
        width = self.hidden_shape[1]
        if (width % layers or not width) if layers else width:
            refuse(
                "hidden_shape", self.hidden_shape, f"the width is of {layers} captured layers alike"
            )
        if self.hidden_payload is not None:
            check_text("hidden_payload", self.hidden_payload)
        check_digest("hidden_digest", self.hidden_digest)

    def _check_target(self) -> None:
        check_tuple("target_token_ids", self.target_token_ids, check_ids)
        check_tuple("target_token_probabilities", self.target_token_probabilities, check_shares)
        _check_pairs(TARGETS, self.target_token_ids, self.target_token_probabilities)
        if len(self.target_token_ids) != self.rows:
            refuse("target_token_ids", self.target_token_ids, f"give a list for {self.rows} rows")
        for shares in self.target_token_probabilities:
            if list(shares) != sorted(shares, reverse=True):
                refuse("target_token_probabilities", shares, "give the likeliest first")
        check_digest("target_rows_digest", self.target_rows_digest)

    def _check_outcome(self) -> None:
        path = len(self.selected_candidate_path)
        check_integer("accepted_prefix_length", self.accepted_prefix_length, 0, path)
        if self.bonus_token is not None:
            check_id("bonus_token", self.bonus_token)
        none_left = self.rows == path and self.accepted_prefix_length == path
        if none_left != (self.bonus_token is None):
            wanted = "no row answers it, so give null" if none_left else "give the target's token"
            refuse("bonus_token", self.bonus_token, wanted)
        check_integer("committed_rows", self.committed_rows, 1)
        if self.committed_rows > (most := len(self.answer)):
            refuse(
                "committed_rows",
                self.committed_rows,
                f"the answer has {most} tokens, so give at most that",
            )


@dataclass(frozen=True, kw_only=True)
class RouteRecord(Record):
    """The experts of one token in one sparse layer.

    sequence_position: of the token, from 0
    target_route_layer: the layer, zero-based among all layers of the target
    target_expert_ids_in_native_rank_order: the `target_top_k` experts that the target's own router
        chose, the highest score first, of equal scores the lowest id
    predicted_expert_ids: what was predicted, the likeliest first; may be empty
    prediction_confidence: one number from 0 to 1 for each of those
    prefetch_ticket_owner, prefetch_ticket_generation: of the ticket that the prediction was given,
        which is the request's own; both None where no ticket was issued

    Raises ProtocolError, which names the field, for a value out of range and for fields that
    contradict each other.
    """

    request_owner: str
    request_generation: int
    sequence_position: int
    target_route_layer: int
    target_top_k: int
    target_expert_ids_in_native_rank_order: Ids
    predicted_expert_ids: Ids
    prediction_confidence: Probabilities
    prefetch_ticket_owner: str | None
    prefetch_ticket_generation: int | None

    number_fields: ClassVar[frozenset[str]] = frozenset({"prediction_confidence"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text("request_owner", self.request_owner)
        check_integer("request_generation", self.request_generation, 0)
        check_integer("sequence_position", self.sequence_position, 0)
        check_id("target_route_layer", self.target_route_layer)
        check_integer("target_top_k", self.target_top_k, 1)
        self._check_experts()
        self._check_ticket()

    def _check_experts(self) -> None:
        native = self.target_expert_ids_in_native_rank_order
        check_ids("target_expert_ids_in_native_rank_order", native)
        if len(native) != self.target_top_k:
            refuse(
                "target_expert_ids_in_native_rank_order",
                native,
                f"target_top_k is {self.target_top_k}, so give as many",
            )
        check_ids("predicted_expert_ids", self.predicted_expert_ids)
        confidence, predicted = self.prediction_confidence, len(self.predicted_expert_ids)
        check_tuple(
            "prediction_confidence", confidence, lambda n, held: check_number(n, held, 0, 1)
        )
        if len(confidence) != predicted:
            refuse(
                "prediction_confidence",
                confidence,
                f"give one number for each of the {predicted} predicted experts",
            )

    def _check_ticket(self) -> None:
        owner, generation = self.prefetch_ticket_owner, self.prefetch_ticket_generation
        if owner is None and generation is None:
            return
        if owner != self.request_owner:
            refuse(
                "prefetch_ticket_owner",
                owner,
                f"request_owner is {shown(self.request_owner)}, so give that or no ticket",
            )
        if type(generation) is not int or generation != self.request_generation:
            refuse(
                "prefetch_ticket_generation",
                generation,
                f"request_generation is {self.request_generation}, so give that or no ticket",
            )
        if not self.predicted_expert_ids:
            refuse("prefetch_ticket_owner", owner, "nothing was predicted, so give no ticket")


def check_in_vocabulary(field: str, tokens: int | Ids, vocab_size: int) -> None:
    """Raise ProtocolError unless all of `tokens` are below `vocab_size`."""
    held = tokens if isinstance(tokens, tuple) else (tokens,)
    outside = [token for token in held if token >= vocab_size]
    if outside:
        refuse(
            field, outside[0], f"the vocabulary has {vocab_size} tokens, so give an id below that"
        )


def _check_origin(record: TraceHeader | StepRecord) -> None:
    """The fields that a header and its steps share."""
    check_text("target_model_revision", record.target_model_revision)
    check_text("tokenizer_revision", record.tokenizer_revision)
    check_text("request_owner", record.request_owner)
    check_integer("request_generation", record.request_generation, 0)
    check_text("captured_stage", record.captured_stage)
    check_ids("captured_layer_ids", record.captured_layer_ids)
    check_one_of("hidden_dtype", record.hidden_dtype, get_args(HiddenDtype))


def _check_pairs(
    names: tuple[str, str], ids: tuple[Ids, ...], shares: tuple[Probabilities, ...]
) -> None:
    """One probability for every id, and at least one id a position."""
    for place, held in enumerate(ids):
        if not held:
            refuse(names[0], ids, f"position {place} has none, so give at least one")
    sizes = [len(held) for held in ids]
    if [len(held) for held in shares] != sizes:
        refuse(names[1], shares, f"give one for each id of {names[0]}, so {shown(sizes)} of them")
