"""What can be asked of a recording: all that a reply takes, and nothing that no record holds."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lse_mlx.distribution import Distribution
from lse_mlx.drafters.base import Proposal
from lse_mlx.engine import Engine
from lse_mlx.errors import DraftError, RequestError
from lse_mlx.traces.identity import TargetIdentity
from lse_mlx.traces.recording import record
from lse_mlx.traces.steps import candidates_of


def test_a_stop_token_that_never_comes_and_a_count_of_numpy_are_recorded(
    engine: Engine, identity: TargetIdentity
) -> None:
    most: Any = np.int64(2)
    size = engine.target.vocab_size
    ends = [size - 1, size, 9 * size]
    trace = record(engine.session(), identity, [5, 6, 7], stop_tokens=ends, max_tokens=most)
    assert trace.header.stop_token_ids == (size - 1,)
    assert trace.header.max_tokens == 2
    assert type(trace.header.max_tokens) is int


def test_a_seed_that_no_record_holds_is_refused_before_decoding(
    engine: Engine, identity: TargetIdentity
) -> None:
    session = engine.session()
    with pytest.raises(RequestError, match="seed is an integer of 1025 bits"):
        record(session, identity, [5, 6, 7], stop_tokens=(), max_tokens=2, seed=1 << 1024)
    assert session.turn == 0


def test_a_generation_counts_replies_that_nobody_recorded(
    engine: Engine, identity: TargetIdentity
) -> None:
    session = engine.session()
    engine.generate([5, 6, 7], max_tokens=1, session=session)
    header = record(session, identity, [5, 6, 7], stop_tokens=(), max_tokens=2).header
    assert (header.request_owner, header.request_generation) == (session.owner, 2)


def test_a_drafter_that_does_not_tell_its_candidates_fails_the_recording() -> None:
    def fail() -> list[Distribution]:
        raise KeyError("gone")

    with pytest.raises(DraftError, match=r"does not tell its candidates \('gone'\): mend it"):
        candidates_of(replace(Proposal.certain([3]), candidates=fail))
