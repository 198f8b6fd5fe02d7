"""The rungs about traces: the demo pair passes, and what a replay does not see or a target spoils fails."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lse_mlx import demo_pair
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.engine import Engine
from lse_mlx.protocol.replay import ReplayReport
from lse_mlx.protocol.trace import Trace
from lse_mlx.qualify import replay
from lse_mlx.qualify.prompts import demo_prompts
from lse_mlx.qualify.replay import altered, golden_replay, schema
from lse_mlx.target.model import Target
from lse_mlx.target.state import DeltaState
from lse_mlx.traces.identity import TargetIdentity, identify
from lse_mlx.traces.native import replay_on
from lse_mlx.traces.recording import record
from tests.decode.runs import TAPS, known_sequence
from tests.tiny_models import VOCAB, load_tiny, random_prompt, save_checkpoint, save_tokenizer

ROWS = ["hidden_digest", "target_rows_digest", "target_token_ids"]
KEPT = {  # where a draft was kept
    "greedy": ["first_token", *ROWS, "committed_rows"],
    "sampled": ["first_token", *ROWS, "accepted_prefix_length", "bonus_token", "committed_rows"],
}
PROMPTS = demo_prompts()[:1]


@pytest.fixture(scope="session")
def identity() -> TargetIdentity:
    return identify(demo_pair.TARGET)


def test_the_demo_pair_passes_both(
    engine: Engine, identity: TargetIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "TOKENS", 12)
    found = schema(engine, identity, PROMPTS[0])
    assert (found.failure, found.figures["traces"]) == (None, 4)
    found = golden_replay(engine, identity, PROMPTS)
    assert found.failure is None
    assert found.figures["changes"] == sum(map(len, KEPT.values()))


def test_records_that_change_on_their_way_fail(
    engine: Engine, identity: TargetIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = replay.read_trace

    def changed(folder: Path) -> Trace:
        trace = read(folder)
        return replace(trace, header=replace(trace.header, package_version="another"))

    monkeypatch.setattr(replay, "TOKENS", 6)
    monkeypatch.setattr(replay, "read_trace", changed)
    found = schema(engine, identity, PROMPTS[0])
    assert found.failure == "trace.json changed when it was read and written again."


Reported = Callable[[ReplayReport], ReplayReport]


def nothing(report: ReplayReport) -> ReplayReport:
    return replace(report, differences=())


def something_else(report: ReplayReport) -> ReplayReport:
    found = (replace(one, field="seed") for one in report.differences)
    return replace(report, differences=tuple(found))


@pytest.mark.parametrize(
    ("reported", "said"),
    [(nothing, "was not reported."), (something_else, "was reported as one of seed.")],
)
def test_a_replay_that_does_not_name_the_field_fails(
    reported: Reported,
    said: str,
    engine: Engine,
    identity: TargetIdentity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "replay_on", lambda *asked: reported(replay_on(*asked)))
    found = golden_replay(engine, identity, PROMPTS)
    assert found.failure is not None
    assert found.failure.endswith(said)


def test_rejected_rows_that_stay_in_the_state_fail(
    engine: Engine, identity: TargetIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording and replay spoil it alike, so no step differs: the end has to show it."""
    commit = DeltaState.commit

    def all_rows(self: DeltaState, n: int) -> None:
        commit(self, n if self.inputs is None else self.inputs.shape[1] - self.tail.shape[1])

    monkeypatch.setattr(DeltaState, "commit", all_rows)
    found = golden_replay(engine, identity, PROMPTS)
    assert found.failure is not None
    assert "state_digest" in found.failure


@pytest.fixture(scope="module", params=["bf16", "moe"])
def tiny(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, TargetIdentity]:
    folder = save_tokenizer(save_checkpoint(tmp_path_factory.mktemp("tiny"), request.param))
    return load_tiny(folder), identify(folder)


@pytest.mark.parametrize("right", [0, 3, 7])
@pytest.mark.parametrize("kind", KEPT)
def test_another_value_is_the_targets_to_report(
    kind: str, right: int, tiny: tuple[Target, TargetIdentity]
) -> None:
    """Whatever is accepted, with routes or without: the records of each fit together."""
    target, identity = tiny
    prompt = random_prompt(9, 33)
    known = known_sequence(target, prompt, 24).tokens
    # Of one token a row the sampled reply is the greedy one, so that it is known what is accepted.
    sampling = Sampling(1.0, top_k=1) if kind == "sampled" else Sampling()
    trace = record(
        Session(target, ScriptedDrafter.right_for(known, right, VOCAB, taps=TAPS)),
        identity,
        prompt,
        stop_tokens=(),
        sampling=sampling,
        seed=0,
        max_tokens=20,
        keep_hidden=False,
    )
    changed = list(altered(trace))
    assert [name for name, _ in changed] == (KEPT[kind] if right else ["first_token", *ROWS])
    for name, one in changed:
        first = replay_on(target, identity, one).first
        assert first is not None
        assert first.field == name


def test_of_a_reply_of_one_step_nothing_is_changed(tiny: tuple[Target, TargetIdentity]) -> None:
    target, identity = tiny
    trace = record(Session(target, None), identity, [5, 6, 7], stop_tokens=(), max_tokens=2)
    assert len(trace.steps) == 1
    assert list(altered(trace)) == []
