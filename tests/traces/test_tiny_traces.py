"""A tiny random hybrid and scripted drafters: every acceptance, every end, and what is refused."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from lse_mlx.decode import stopping
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import DraftError, ProtocolError, RequestError
from lse_mlx.protocol import records
from lse_mlx.protocol.trace import Trace
from lse_mlx.protocol.trace_files import read_trace
from lse_mlx.target.model import Target
from lse_mlx.traces.identity import TargetIdentity, identify
from lse_mlx.traces.native import replay_on
from lse_mlx.traces.recording import record, write
from tests.decode.runs import TAPS, known_sequence
from tests.tiny_models import (
    VOCAB,
    load_tiny,
    on_cpu,
    random_prompt,
    save_checkpoint,
    save_tokenizer,
)

COUNT = 26
PROMPT = random_prompt(9, 33)  # the first seventeen tokens of its reply are all different


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_tiny(folder)


@pytest.fixture(scope="module")
def identity(folder: Path) -> TargetIdentity:
    return identify(folder)


@pytest.fixture(scope="module")
def known(target: Target) -> Iterator[list[int]]:
    """The prompt and the target's own greedy tokens after it."""
    with on_cpu():
        yield known_sequence(target, PROMPT, COUNT + 8).tokens


def scripted(known: list[int], right: int) -> ScriptedDrafter:
    return ScriptedDrafter.right_for(known, right, VOCAB, taps=TAPS)


def test_a_header_takes_every_reason_that_a_reply_can_end_for() -> None:
    """Neither package imports the other's word for it."""
    assert get_args(records.StopReason) == get_args(stopping.StopReason)


@pytest.mark.parametrize("accepted", range(8))
def test_every_acceptance_replays(
    accepted: int, target: Target, identity: TargetIdentity, known: list[int], tmp_path: Path
) -> None:
    session = Session(target, scripted(known, accepted))
    trace = record(session, identity, PROMPT, stop_tokens=(), max_tokens=COUNT)
    assert trace.tokens == known[len(PROMPT) : len(PROMPT) + COUNT]
    assert {step.accepted_prefix_length for step in trace.steps[:-1]} == {accepted}
    write(trace, tmp_path / "trace")
    report = replay_on(target, identity, read_trace(tmp_path / "trace"))
    assert report.first is None
    assert report.steps == len(trace.steps)


@pytest.mark.parametrize("offset", range(1, 17))
def test_a_stop_token_at_every_offset_replays(
    offset: int, target: Target, identity: TargetIdentity, known: list[int]
) -> None:
    reply = known[len(PROMPT) :]
    stop = reply[offset]
    assert stop not in reply[:offset]
    session = Session(target, scripted(known, 7))
    trace = record(session, identity, PROMPT, stop_tokens=[stop], max_tokens=COUNT)
    assert trace.tokens == reply[:offset]
    assert trace.header.stop_reason == "stop_token"
    assert trace.end == len(session.tokens)
    assert replay_on(target, identity, trace).first is None


def test_a_reply_that_is_a_stop_token_alone_has_no_steps(
    target: Target, identity: TargetIdentity, known: list[int]
) -> None:
    first = known[len(PROMPT)]
    session = Session(target, scripted(known, 7))
    trace = record(session, identity, PROMPT, stop_tokens=[first], max_tokens=COUNT)
    assert (trace.header.first_token, trace.tokens, trace.steps) == (first, [], ())
    assert replay_on(target, identity, trace).first is None


def test_a_sampled_first_token_is_told_when_it_is_a_stop_token(
    target: Target, identity: TargetIdentity
) -> None:
    """Only the pass that drew it can tell: it is emitted nowhere."""
    sampling = Sampling(1.3)

    def first(seed: int, stop_tokens: Iterable[int]) -> Trace:
        return record(
            Session(target, None), identity, PROMPT, stop_tokens=stop_tokens, sampling=sampling,
            seed=seed, max_tokens=1,
        )  # fmt: skip

    for seed in range(8):
        [token] = first(seed, ()).tokens
        trace = first(seed, range(VOCAB))
        assert (trace.header.first_token, trace.tokens, trace.steps) == (token, [], ())
        assert trace.header.stop_reason == "stop_token"
        assert replay_on(target, identity, trace).first is None


@pytest.mark.parametrize("most", range(1, 10))
def test_a_limit_at_every_offset_replays(
    most: int, target: Target, identity: TargetIdentity, known: list[int]
) -> None:
    session = Session(target, scripted(known, 7))
    trace = record(session, identity, PROMPT, stop_tokens=(), max_tokens=most)
    assert trace.tokens == known[len(PROMPT) : len(PROMPT) + most]
    assert replay_on(target, identity, trace).first is None


def test_the_target_alone_is_traced_without_hidden_rows(
    target: Target, identity: TargetIdentity, known: list[int], tmp_path: Path
) -> None:
    trace = record(Session(target, None), identity, PROMPT, stop_tokens=(), max_tokens=6)
    assert trace.header.drafter is None
    assert {step.hidden_shape for step in trace.steps} == {(1, 0)}
    write(trace, tmp_path / "trace")
    assert replay_on(target, identity, read_trace(tmp_path / "trace")).first is None


def test_a_context_that_fills_up_replays(folder: Path, identity: TargetIdentity) -> None:
    small = load_tiny(folder, context_length=len(PROMPT) + 5)
    trace = record(Session(small, None), identity, PROMPT, stop_tokens=())
    assert (trace.header.stop_reason, len(trace.tokens)) == ("context_full", 5)
    assert replay_on(small, identity, trace).first is None


def test_a_prompt_that_fills_the_context_is_no_request(
    folder: Path, identity: TargetIdentity
) -> None:
    small = load_tiny(folder, context_length=len(PROMPT))
    with pytest.raises(RequestError, match="shorten"):
        record(Session(small, None), identity, PROMPT, stop_tokens=())


def test_a_trace_longer_than_the_context_is_refused(
    target: Target, folder: Path, identity: TargetIdentity
) -> None:
    trace = record(Session(target, None), identity, PROMPT, stop_tokens=(), max_tokens=2)
    small = load_tiny(folder, context_length=len(PROMPT))
    with pytest.raises(ProtocolError) as refused:
        replay_on(small, identity, trace)
    assert refused.value.field == "prompt_token_ids"


def test_the_second_turn_of_a_session_replays(
    target: Target, identity: TargetIdentity, known: list[int]
) -> None:
    """What the session held before is part of the prompt; the replay reads it afresh."""
    session = Session(target, scripted(known, 3))
    first = record(session, identity, PROMPT, stop_tokens=(), max_tokens=8)
    longer = [*PROMPT, *first.tokens, 5, 6]
    second = record(session, identity, longer, stop_tokens=(), max_tokens=8)
    assert second.header.request_generation == session.turn
    assert replay_on(target, identity, second).first is None


def test_a_failing_drafter_makes_no_trace(target: Target, identity: TargetIdentity) -> None:
    session = Session(target, ScriptedDrafter.listed([[1, 2]], taps=TAPS))
    with pytest.raises(DraftError, match="not in the script"):
        record(session, identity, PROMPT, stop_tokens=(), max_tokens=12)


def test_another_targets_trace_is_refused_by_its_revision(
    target: Target, identity: TargetIdentity, tmp_path: Path
) -> None:
    other = save_tokenizer(save_checkpoint(tmp_path / "other", seed=1))
    trace = record(
        Session(load_tiny(other), None), identify(other), PROMPT, stop_tokens=(), max_tokens=3
    )
    with pytest.raises(ProtocolError, match="target_model_revision") as refused:
        replay_on(target, identity, trace)
    assert refused.value.field == "target_model_revision"


SIZES = {"vocab_size": VOCAB + 1, "layer_count": 6, "hidden_size": 32}


@pytest.mark.parametrize("field", SIZES)
def test_another_size_is_refused_by_its_field(
    field: str, target: Target, identity: TargetIdentity
) -> None:
    """Of a trace without captured layers, where nothing else tells."""
    trace = record(Session(target, None), identity, PROMPT, stop_tokens=(), max_tokens=3)
    other = Trace(replace(trace.header, **{field: SIZES[field]}), trace.steps)
    with pytest.raises(ProtocolError) as refused:
        replay_on(target, identity, other)
    assert refused.value.field == field


def test_a_trace_of_another_device_is_held_to_its_tokens(
    target: Target, identity: TargetIdentity, known: list[int]
) -> None:
    session = Session(target, scripted(known, 7))
    trace = record(session, identity, PROMPT, stop_tokens=(), max_tokens=12, keep_hidden=False)
    elsewhere = Trace(
        replace(trace.header, device="another"),
        tuple(replace(step, hidden_digest="0" * 64) for step in trace.steps),
    )
    report = replay_on(target, identity, elsewhere)
    assert (report.first, report.compared) == (None, "tokens")


def test_sampled_drafts_are_judged_by_their_recorded_q(
    target: Target, identity: TargetIdentity
) -> None:
    """By certain proposals the same uniforms would accept others."""
    session = Session(target, scripted([*PROMPT, *range(10, 40)], 7))
    sampling = Sampling(1.3)
    trace = record(
        session, identity, PROMPT, stop_tokens=(), max_tokens=12, sampling=sampling, seed=4
    )
    assert replay_on(target, identity, trace).first is None


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, TargetIdentity]:
    folder = save_checkpoint(tmp_path_factory.mktemp("experts"), "moe")
    return load_tiny(folder), identify(save_tokenizer(folder))


def test_routes_of_every_committed_row_are_recorded(
    experts: tuple[Target, TargetIdentity], tmp_path: Path
) -> None:
    target, identity = experts
    with on_cpu():
        known = known_sequence(target, PROMPT, 12).tokens
    session = Session(target, scripted(known, 2))
    trace = record(session, identity, PROMPT, stop_tokens=(), max_tokens=10)
    layers = sorted(target.expert_sizes)
    places = [(r.sequence_position, r.target_route_layer) for r in trace.routes]
    assert places == [(at, layer) for at in range(len(PROMPT), trace.end) for layer in layers]
    write(trace, tmp_path / "trace")
    trace = read_trace(tmp_path / "trace")
    assert replay_on(target, identity, trace).first is None
    last = trace.steps[-1]
    for place, step, position in (
        (0, 1, len(PROMPT)),
        (-1, len(trace.steps), last.sequence_position + last.committed_rows - 1),
    ):
        route = trace.routes[place]
        native = route.target_expert_ids_in_native_rank_order
        routes = list(trace.routes)
        routes[place] = replace(route, target_expert_ids_in_native_rank_order=native[::-1])
        changed = Trace(trace.header, trace.steps, tuple(routes), trace.payloads)
        report = replay_on(target, identity, changed)
        [found] = report.differences
        assert found.field == "target_expert_ids_in_native_rank_order"
        assert (found.step, found.sequence_position, report.steps) == (step, position, step - 1)
        layer = route.target_route_layer
        assert (found.recorded, found.native) == ({layer: [*native[::-1]]}, {layer: [*native]})
