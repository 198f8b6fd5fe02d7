"""The table of tests/golden/table.py as a runtime: its own cache, acceptance and limits, all slow.

Acceptance is written down from Leviathan et al. 2023 with fractions, where nothing is rounded, and
shares no code with the engine.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import sha256

import numpy as np

from lse_mlx.protocol.native import NativeIdentity, NativeStart, NativeStep
from lse_mlx.protocol.records import StepRecord, TraceHeader
from tests.golden import table
from tests.golden.cases import Case

IDENTITY = NativeIdentity(
    target_model_revision="table:1",
    tokenizer_revision="table:digits",
    vocab_size=table.VOCAB,
    layer_count=table.LAYERS,
    hidden_size=table.HIDDEN,
    captured_stage="block_output",
    captured_layer_ids=table.CAPTURED,
    hidden_dtype="float32",
    request_owner="golden",
    request_generation=3,
    device="table",
)


@dataclass
class TableState:
    """What is kept of a sequence: a cache entry and a hidden row for each token read."""

    cache: list[tuple[int, int]]
    hidden: list[list[float]]

    def read(self, token: int) -> list[int]:
        """Take a token in; the tokens read so far, it included."""
        self.cache.append((len(self.cache), token))
        tokens = [held for _, held in self.cache]
        self.hidden.append(table.hidden(tokens).tolist())
        return tokens

    def cut(self, length: int) -> None:
        """Forget everything from position `length` on."""
        del self.cache[length:]
        del self.hidden[length:]

    def digest(self) -> str:
        return sha256(json.dumps([self.cache, self.hidden]).encode()).hexdigest()


class NativeTable:
    """`lse_mlx.protocol.native.Native` for the table.

    accept, residual: the uniforms of a sampled request in order; both are consumed once a row
    sparse: the layers that have experts
    """

    def __init__(
        self,
        accept: Iterable[float] = (),
        residual: Iterable[float] = (),
        identity: NativeIdentity = IDENTITY,
        sparse: Sequence[int] = (),
    ):
        self._identity = identity
        self.sparse = sparse
        self.uniforms = iter(accept), iter(residual)
        self.state = TableState([], [])
        self.calls: list[str] = []

    @classmethod
    def of(cls, case: Case, **changed: object) -> "NativeTable":
        """The table as it serves `case`, with some of its identity `changed`."""
        sparse = table.SPARSE if case.predicted else ()
        return cls(case.accept, case.residual, replace(IDENTITY, **changed), sparse)

    def identity(self) -> NativeIdentity:
        self.calls.append("identity")
        return self._identity

    def start(self, header: TraceHeader) -> NativeStart:
        self.calls.append("start")
        self.header = header
        read: list[int] = []
        for token in header.prompt_token_ids:
            read = self.state.read(token)
        self.anchor = self.own_token(read)
        self.emitted, self.sequence = 0, list(read)
        return NativeStart(first_token=self.anchor, stop_reason=self.ends([self.anchor])[1])

    def verify(self, record: StepRecord) -> NativeStep:
        self.calls.append("verify")
        path, begin, anchor = record.selected_candidate_path, len(self.state.cache), self.anchor
        left = len(path) + 1
        if self.header.max_tokens is not None:
            left = min(left, self.header.max_tokens - self.emitted)
        prefixes = [self.state.read(token) for token in [anchor, *path][:left]]
        hidden = np.array(self.state.hidden[begin:], np.float32)
        q = [
            dict(zip(ids, shares, strict=True))
            for ids, shares in zip(
                record.candidate_token_ids, record.candidate_probabilities, strict=True
            )
        ]
        accepted, bonus = self.judge(path, q, prefixes)
        answer = [*path[:accepted], *([] if bonus is None else [bonus])]
        committed, reason = self.ends(answer)
        self.roll_back(begin + committed)
        self.sequence += [anchor, *answer[: committed - 1]]
        self.anchor = answer[committed - 1]
        likeliest = [table.likeliest(prefix) for prefix in prefixes]
        return NativeStep(
            sequence_position=begin,
            anchor_token=anchor,
            hidden_shape=(hidden.shape[0], hidden.shape[1]),
            hidden_digest=sha256(hidden.astype("<f4").tobytes()).hexdigest(),
            target_token_ids=tuple(tuple(token for token, _ in row) for row in likeliest),
            target_token_probabilities=tuple(tuple(share for _, share in row) for row in likeliest),
            target_rows_digest=sha256(b"".join(self.row_bytes(p) for p in prefixes)).hexdigest(),
            accepted_prefix_length=accepted,
            bonus_token=bonus,
            committed_rows=committed,
            routes={
                layer: tuple(self.experts(begin + row, layer) for row in range(len(prefixes)))
                for layer in self.sparse
            },
            stop_reason=reason,
        )

    def experts(self, position: int, layer: int) -> tuple[int, ...]:
        return table.experts(position, layer)

    def roll_back(self, length: int) -> None:
        self.state.cut(length)

    def state_digest(self) -> str:
        return self.state.digest()

    def cold_digest(self) -> str | None:
        fresh = TableState([], [])
        for token in self.sequence:
            fresh.read(token)
        return fresh.digest()

    def ends(self, answer: Sequence[int]) -> tuple[int, str | None]:
        """How many tokens are looked at, and why the reply ends with the last; counts the emitted."""
        for looked_at, token in enumerate(answer, 1):
            if token in self.header.stop_token_ids:
                return looked_at, "stop_token"
            self.emitted += 1
            if self.emitted == self.header.max_tokens:
                return looked_at, "max_tokens"
        return len(answer), None

    def judge(
        self, path: Sequence[int], q: list[dict[int, float]], prefixes: list[list[int]]
    ) -> tuple[int, int | None]:
        """How much of the path stays, and the token after it; None without a row for that."""
        for place, drafted in enumerate(path):
            p = chances(prefixes[place])
            if self.header.greedy:
                if drafted != most_likely(p):
                    return place, most_likely(p)
                continue
            accept, residual = (next(stream) for stream in self.uniforms)
            drawn_with = {token: Fraction(share) for token, share in q[place].items()}
            if Fraction(accept) >= min(Fraction(1), p.get(drafted, 0) / drawn_with[drafted]):
                left = {t: max(p[t] - drawn_with.get(t, Fraction(0)), Fraction(0)) for t in p}
                return place, quantile(left, residual)
        return len(path), self.own_token(prefixes[-1]) if len(prefixes) > len(path) else None

    def own_token(self, prefix: list[int]) -> int:
        """The target's choice where nothing was proposed."""
        p = chances(prefix)
        if self.header.greedy:
            return most_likely(p)
        if len(prefix) > len(self.header.prompt_token_ids):
            next(self.uniforms[0])  # a row consumes both, needed or not; the prompt's has no draft
        return quantile(p, next(self.uniforms[1]))

    @staticmethod
    def row_bytes(prefix: list[int]) -> bytes:
        return np.array(
            [table.weights(prefix).get(token, 0) for token in range(table.VOCAB)], "<f4"
        ).tobytes()


def chances(prefix: list[int]) -> dict[int, Fraction]:
    """The target's probabilities, exactly, by ascending token."""
    return {token: Fraction(n, 64) for token, n in sorted(table.weights(prefix).items())}


def most_likely(p: Mapping[int, Fraction]) -> int:
    """The lowest token of the greatest probability."""
    return min(token for token, share in p.items() if share == max(p.values()))


def quantile(shares: Mapping[int, Fraction], u: float) -> int:
    """The first token whose running sum exceeds `u` of the whole."""
    running, mass = Fraction(0), sum(shares.values(), Fraction(0))
    for token, share in shares.items():
        running += share
        if running > Fraction(u) * mass:
            return token
    raise AssertionError("u is below 1, so the whole exceeds it")
