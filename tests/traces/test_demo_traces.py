"""Traces of the demo pair: they say what happened, replay without a difference, and no change passes."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from lse_mlx.decode.sampling import Sampling
from lse_mlx.engine import Engine
from lse_mlx.errors import CheckpointError, ProtocolError
from lse_mlx.protocol.records import StepRecord, TraceHeader
from lse_mlx.protocol.replay import replay
from lse_mlx.protocol.trace import Trace
from lse_mlx.protocol.trace_files import read_trace
from lse_mlx.traces.identity import TargetIdentity
from lse_mlx.traces.native import LoopNative, replay_on
from lse_mlx.traces.recording import record, write
from tests.protocol.corruptions import CORRUPTIONS, Corruption, changed_alone, corrupt, named_by
from tests.traces.conftest import OWNER, PROMPT, SAMPLINGS

BOTH = pytest.mark.parametrize("kind", SAMPLINGS)


@pytest.fixture(scope="module")
def written(traces: dict[str, Trace], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The greedy trace with its payloads, on disk."""
    folder = tmp_path_factory.mktemp("traces") / "greedy"
    write(traces["greedy"], folder)
    return folder


def native(engine: Engine, identity: TargetIdentity, trace: Trace) -> LoopNative:
    header = trace.header
    return LoopNative(
        engine.target,
        identity,
        depth=7,
        layers=header.captured_layer_ids,
        owner=OWNER,
        generation=header.request_generation,
    )


@BOTH
def test_a_trace_on_disk_replays_without_a_difference(
    kind: str, engine: Engine, identity: TargetIdentity, traces: dict[str, Trace], tmp_path: Path
) -> None:
    write(traces[kind], tmp_path / "trace")
    trace = read_trace(tmp_path / "trace")
    assert len(trace.payloads) == len(trace.steps)
    report = replay_on(engine.target, identity, trace)
    assert report.differences == ()
    assert report.steps == len(trace.steps) > 3
    assert report.compared == "every field"
    assert report.state_compared


@BOTH
def test_digests_alone_are_enough(
    kind: str, engine: Engine, identity: TargetIdentity, traces: dict[str, Trace], tmp_path: Path
) -> None:
    whole = traces[kind]
    slim = record(
        engine.session(),
        identity,
        list(whole.header.prompt_token_ids),
        stop_tokens=whole.header.stop_token_ids,
        sampling=SAMPLINGS[kind],
        seed=11,
        max_tokens=32,
        owner=OWNER,
        keep_hidden=False,
    )
    assert slim.payloads == {}
    assert slim.steps == tuple(replace(step, hidden_payload=None) for step in whole.steps)
    write(slim, tmp_path / "trace")
    assert not (tmp_path / "trace" / "payloads.safetensors").exists()
    assert replay_on(engine.target, identity, read_trace(tmp_path / "trace")).first is None


@BOTH
def test_the_recorded_reply_is_that_of_generate(
    kind: str, engine: Engine, traces: dict[str, Trace]
) -> None:
    chosen = SAMPLINGS[kind]
    reply = engine.generate(
        PROMPT,
        max_tokens=32,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        min_p=chosen.min_p,
        seed=11,
    )
    assert traces[kind].tokens == reply.token_ids
    assert traces[kind].header.stop_reason == reply.stop_reason


def test_hidden_rows_and_probabilities_are_those_of_a_plain_reading(
    engine: Engine, traces: dict[str, Trace]
) -> None:
    """The tokens read one at a time, by the target alone, without a record or a drafter."""
    trace = traces["sampled"]
    read = [*trace.header.prompt_token_ids, *trace.tokens]
    state, taps = engine.target.new_state(), trace.header.captured_layer_ids
    hidden, likeliest = [], []
    for token in read[: trace.end]:
        answer = engine.target.advance([token], state, taps)
        hidden.append(np.array(answer.features[0]))
        logits = np.array(answer.logits[0]).astype(np.float64)
        shares = np.exp(logits - logits.max())
        best = np.lexsort((np.arange(len(logits)), -logits))[:4]
        likeliest.append((best.tolist(), (shares / shares.sum())[best]))
    for step in trace.steps:
        rows = trace.payloads[step.hidden_payload or ""]
        for row in range(step.committed_rows):
            at = step.sequence_position + row
            assert np.array_equal(rows[row], hidden[at])
            ids, shares = likeliest[at]
            assert list(step.target_token_ids[row]) == ids
            assert step.target_token_probabilities[row] == pytest.approx(shares, rel=1e-12)


def test_candidates_of_a_greedy_draft_are_those_it_was_chosen_from(
    traces: dict[str, Trace],
) -> None:
    """Every path is the likeliest candidate at each position, of sixteen that sum to one."""
    for step in traces["greedy"].steps:
        places = zip(
            step.selected_candidate_path,
            step.candidate_token_ids,
            step.candidate_probabilities,
            strict=True,
        )
        for token, ids, shares in places:
            assert len(ids) == 16
            assert sum(shares) == pytest.approx(1)
            assert shares[ids.index(token)] == max(shares)


@pytest.mark.parametrize(
    "corruption", [c for c in CORRUPTIONS if c.part != "routes"], ids=lambda c: c.where
)
def test_a_changed_field_is_named(
    corruption: Corruption, engine: Engine, identity: TargetIdentity, written: Path, tmp_path: Path
) -> None:
    corrupt(written, tmp_path, corruption)
    trace = read_trace(written)
    assert named_by(tmp_path, lambda: native(engine, identity, trace)) == corruption.named


@BOTH
def test_every_field_that_is_changed_alone_is_refused_by_its_name(
    kind: str, traces: dict[str, Trace], tmp_path: Path
) -> None:
    write(traces[kind], tmp_path / "whole")
    for part, held in (("header", TraceHeader), ("step", StepRecord)):
        for field in fields(held):
            (place := tmp_path / f"{part}.{field.name}").mkdir()
            assert changed_alone(tmp_path / "whole", place, part, field.name) == field.name


REFUSED = {
    "target_model_revision": {"identity": TargetIdentity("sha256:other", "sha256:same")},
    "captured_layer_ids": {"layers": (1, 3, 5, 6)},
    "request_owner": {"owner": "somebody else"},
    "request_generation": {"generation": 99},
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_trace_of_something_else_is_refused_by_the_field(
    field: str, engine: Engine, identity: TargetIdentity, traces: dict[str, Trace]
) -> None:
    asked = {"identity": identity} | REFUSED[field]
    with pytest.raises(ProtocolError, match=field) as refused:
        replay_on(engine.target, trace=traces["greedy"], **asked)
    assert refused.value.field == field


def test_a_trace_for_another_tokenizer_is_refused(
    engine: Engine, identity: TargetIdentity, traces: dict[str, Trace]
) -> None:
    other = replace(identity, tokenizer_revision="sha256:other")
    with pytest.raises(ProtocolError) as refused:
        replay_on(engine.target, other, traces["greedy"])
    assert refused.value.field == "tokenizer_revision"


def test_a_rejected_row_that_stays_in_the_state_is_a_difference(
    engine: Engine, identity: TargetIdentity, traces: dict[str, Trace]
) -> None:
    class Leaking(LoopNative):
        """After the last step, one more token is in the state than was committed."""

        def cold_digest(self) -> str | None:
            engine.target.advance([7], self._session.state, ())
            return super().cold_digest()

    trace = traces["greedy"]
    header = trace.header
    leaking = Leaking(
        engine.target,
        identity,
        depth=7,
        layers=header.captured_layer_ids,
        owner=OWNER,
        generation=header.request_generation,
    )
    report = replay(trace, leaking)
    assert report.first is not None
    assert report.first.field == "state_digest"


def test_the_owner_is_the_session_and_generations_count_its_replies(
    engine: Engine, identity: TargetIdentity
) -> None:
    session, other = engine.session(), engine.session()
    headers = [
        record(one, identity, [5, 6, 7], stop_tokens=(), max_tokens=2).header
        for one in (session, session, other)
    ]
    mine, again, others = (header.request_owner for header in headers)
    assert mine == again != others
    assert [header.request_generation for header in headers] == [1, 2, 1]


@pytest.mark.parametrize("owner", ["", "two\nlines", "x" * 201])
def test_an_owner_that_no_record_takes_is_refused_before_decoding(
    owner: str, engine: Engine, identity: TargetIdentity
) -> None:
    session = engine.session()
    with pytest.raises(ProtocolError) as refused:
        record(session, identity, [5, 6, 7], stop_tokens=(), max_tokens=2, owner=owner)
    assert refused.value.field == "request_owner"
    assert session.tokens == []


def test_without_a_seed_a_sampled_trace_has_a_fresh_one(
    engine: Engine, identity: TargetIdentity
) -> None:
    def seed(sampling: Sampling) -> int:
        session = engine.session()
        return record(
            session, identity, [5, 6, 7], stop_tokens=(), max_tokens=1, sampling=sampling
        ).header.seed

    assert seed(Sampling(1.0)) != seed(Sampling(1.0))
    assert seed(Sampling()) == 0


def test_a_folder_that_is_there_stays_as_it_is(traces: dict[str, Trace], tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        write(traces["greedy"], tmp_path / "trace")
    assert list((tmp_path / "trace").iterdir()) == []


def test_a_trace_that_cannot_be_written_leaves_nothing(
    traces: dict[str, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise ProtocolError("folder", "The disk is full.")

    monkeypatch.setattr("lse_mlx.traces.recording.write_trace", full)
    with pytest.raises(ProtocolError):
        write(traces["greedy"], tmp_path / "trace")
    assert list(tmp_path.iterdir()) == []
