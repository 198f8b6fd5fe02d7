"""The demo pair: requests through the public interface, and what one-token decoding gives for them."""

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import lse_mlx
from lse_mlx.decode.session import Session
from tests.boundaries.asked import Asked
from tests.boundaries.one_token import Answer, plain
from tests.boundaries.stepwise import Stepwise
from tests.test_pair_state import ring_of

Ring = tuple[NDArray[np.int64], list[NDArray[np.float32]]]

COUNT = 40
TURN = "Write a story about a shy fox."


@dataclass
class Bench:
    """The engine, one-token decoding of the same target, and a prompt with its long greedy reply."""

    engine: lse_mlx.Engine
    prompt: list[int]
    stepwise: Stepwise = field(init=False)
    said: list[int] = field(init=False)
    _rings: dict[tuple[int, ...], Ring] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.engine.drafter is not None
        self.stepwise = Stepwise(self.engine.target, self.engine.drafter.taps)
        self.said = [c.token for c in islice(plain(self.stepwise.logits, self.asked()), COUNT)]
        assert not self.asked().stop_tokens & set(self.said)

    def asked(self, **changed: Any) -> Asked:
        room = self.engine.target.context_length - len(self.prompt)
        stop_tokens = self.engine.tokenizer.stop_tokens | changed.pop("stop_tokens", frozenset())
        return Asked(self.prompt, room=room, stop_tokens=stop_tokens, **changed)

    def text_of(self, ids: list[int]) -> str:
        return self.engine.tokenizer.decode(ids)

    def run(
        self, asked: Asked, speculate: bool = True, session: Session | None = None, **more: Any
    ) -> lse_mlx.Result:
        """The request through the public options; the text of its pieces is that of the result."""
        at = asked.cancel_at
        if at is not None:
            more["cancelled"] = lambda emitted: emitted >= at
        pieces = list(
            self.engine.stream(
                asked.prompt,
                max_tokens=asked.max_tokens,
                temperature=asked.sampling.temperature,
                top_k=asked.sampling.top_k,
                top_p=asked.sampling.top_p,
                min_p=asked.sampling.min_p,
                seed=asked.seed,
                repetition_penalty=asked.repetition,
                repetition_window=asked.repetition_window,
                presence_penalty=asked.presence,
                presence_window=asked.presence_window,
                frequency_penalty=asked.frequency,
                frequency_window=asked.frequency_window,
                logit_bias=asked.logit_bias,
                stop=asked.stops,
                stop_token_ids=sorted(asked.stop_tokens),
                min_tokens=asked.min_tokens,
                end_tokens=asked.end_tokens,
                top_logprobs=asked.top_logprobs,
                speculate=speculate,
                session=session,
                **more,
            )
        )
        result = pieces[-1].result
        assert result is not None
        assert "".join(p.text for p in pieces) == result.text
        assert [t for p in pieces for t in p.token_ids] == result.token_ids
        assert result.timings["generated_n"] == len(result.token_ids)
        return result

    def assert_holds(self, session: Session, tokens: list[int]) -> None:
        """The session holds what taking in `tokens` one at a time leaves, in the drafter too."""
        assert session.tokens == tokens
        self.stepwise.assert_state(session.state, tokens)
        held, layers = ring_of(session)
        held_expected, layers_expected = self._ring_after(tokens)
        assert np.array_equal(held, held_expected)
        for mine, theirs in zip(layers, layers_expected, strict=True):
            assert np.array_equal(mine, theirs)

    def _ring_after(self, tokens: list[int]) -> Ring:
        """The drafter's context after `tokens`, one row at a time."""
        if tuple(tokens) not in self._rings:
            assert self.engine.drafter is not None
            singly, context = self.engine.session(), self.engine.drafter.new_context()
            singly.context = context
            for at in range(len(tokens)):
                row = self.stepwise.features(tokens[: at + 1])
                context.append(mx.array(row[None]), first=at)
                self._rings[tuple(tokens[: at + 1])] = ring_of(singly)
        return self._rings[tuple(tokens)]

    def check(
        self, asked: Asked, answer: Answer, session: Session | None = None, alone: bool = True
    ) -> None:
        """With the drafter and, if asked for, without: what one-token decoding gives, to the bit."""
        fast = self.run(asked, session=session)
        plain = self.run(asked, speculate=False) if alone else fast
        for result in (fast, plain):
            assert result.token_ids == answer.ids
            assert (result.stop_reason, result.finish_reason) == (answer.reason, answer.finish)
            assert result.stop_string == answer.stop_string
        assert fast.text == plain.text
        assert fast.logprobs == plain.logprobs
        if answer.stop_string is None:
            assert fast.text == self.text_of(answer.ids)
        else:
            whole = self.text_of(answer.ids)
            assert whole.startswith(fast.text + answer.stop_string)
        if asked.top_logprobs is not None:
            for told, one in zip(fast.logprobs or [], answer.chosen, strict=True):
                logprob, top = one.logprob(asked.top_logprobs)
                assert told.token == one.token
                assert told.logprob == pytest.approx(logprob, rel=0, abs=1e-12)
                assert [t for t, _ in told.top] == [t for t, _ in top]
