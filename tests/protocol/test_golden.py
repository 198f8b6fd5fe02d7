"""The golden traces: the files are those of the cases, and a target of its own confirms every step."""

import filecmp
from dataclasses import replace
from pathlib import Path

import pytest

from lse_mlx.errors import ProtocolError
from lse_mlx.protocol.replay import ReplayReport, replay
from lse_mlx.protocol.trace import Trace, rows_digest
from lse_mlx.protocol.trace_files import read_trace, write_trace
from tests.golden import table
from tests.golden.cases import CASES, Case
from tests.golden.generate import FOLDER, trace_of
from tests.protocol.native_table import NativeTable

BY_NAME = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=BY_NAME)


def golden(name: str) -> Trace:
    return read_trace(FOLDER / name)


def replayed(name: str, native: NativeTable | None = None) -> ReplayReport:
    return replay(golden(name), native or NativeTable.of(BY_NAME[name]))


@every_case
def test_the_files_are_those_of_the_case(case: Case, tmp_path: Path) -> None:
    write_trace(tmp_path, trace_of(case))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in (FOLDER / case.name).iterdir())
    assert filecmp.cmpfiles(tmp_path, FOLDER / case.name, names, shallow=False)[0] == names


def test_no_folder_is_without_a_case() -> None:
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == set(BY_NAME)


@every_case
def test_the_table_confirms_every_step(case: Case) -> None:
    report = replayed(case.name)
    assert report.first is None
    assert report.steps == len(case.passes)
    assert report.compared == "every field"
    assert report.state_compared


# The replies by hand, from the rules of the table.
REPLIES = {
    "greedy": [6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6],
    "limit": [1, 2, 3, 4],
    "no-bonus-row": [1, 2, 3, 4],
    "no-bonus-row-needed": [1, 2, 3, 4],
    "one-token": [],
    "cancelled": [9, 10, 11],
    "sampled": [7, 9, 10, 13, 15, 14, 13],
    "routes": [6, 7, 8, 9, 10],
}


@every_case
def test_the_reply_is_what_counting_gives(case: Case) -> None:
    assert golden(case.name).tokens == REPLIES[case.name]


def test_several_candidates_stand_at_every_position() -> None:
    trace = golden("greedy")
    assert all(len(ids) == 3 for step in trace.steps for ids in step.candidate_token_ids)
    assert sum(len(step.candidate_token_ids) for step in trace.steps) == 21


def test_one_coherent_path_is_selected() -> None:
    for step in golden("greedy").steps:
        pairs = zip(step.selected_candidate_path, step.candidate_token_ids, strict=True)
        assert all(token in ids for token, ids in pairs)


def test_the_whole_block_is_verified() -> None:
    """Rejected rows too: the record has an answer and a hidden row for each, as the table gives."""
    trace, read = golden("greedy"), [3, 4, 5]
    for step in trace.steps:
        block = [step.anchor_token, *step.selected_candidate_path]
        assert len(step.target_token_ids) == step.hidden_shape[0] == len(block)
        rows = trace.payloads[step.hidden_payload or ""]
        for place in range(len(block)):
            prefix = [*read, *block[: place + 1]]
            assert rows[place].tolist() == table.hidden(prefix).tolist()
        read += block[: step.committed_rows]


def test_zero_partial_and_full_acceptance_occur() -> None:
    steps = golden("greedy").steps
    outcomes = [(s.accepted_prefix_length, len(s.selected_candidate_path)) for s in steps]
    assert outcomes[:5] == [(0, 3), (0, 3), (2, 3), (3, 3), (2, 3)]
    sampled = golden("sampled").steps
    outcomes = [(s.accepted_prefix_length, len(s.selected_candidate_path)) for s in sampled]
    assert outcomes == [(1, 2), (0, 1), (2, 2)]


class KeepsRejectedCache(NativeTable):
    """Rolls back the hidden rows and leaves the cache entries of rejected tokens."""

    def roll_back(self, length: int) -> None:
        del self.state.hidden[length:]


class KeepsRejectedHidden(NativeTable):
    """Rolls back the cache and leaves the hidden rows of rejected tokens."""

    def roll_back(self, length: int) -> None:
        del self.state.cache[length:]


class KeepsOneRow(NativeTable):
    """Commits the first rejected row too."""

    def roll_back(self, length: int) -> None:
        self.state.cut(length + 1)


@pytest.mark.parametrize("broken", [KeepsRejectedCache, KeepsRejectedHidden, KeepsOneRow])
def test_a_rejected_suffix_that_stays_behind_is_found(broken: type[NativeTable]) -> None:
    report = replayed("greedy", broken())
    assert report.first is not None
    assert report.first.step == 2  # the first pass after one that rejected


@pytest.mark.parametrize("broken", [KeepsRejectedCache, KeepsRejectedHidden, KeepsOneRow])
def test_a_suffix_that_the_last_step_leaves_is_found_in_the_state(
    broken: type[NativeTable],
) -> None:
    """The reply ends inside a block, no pass follows, and nothing but the state can tell."""
    trace = golden("greedy")

    class AtTheEnd(broken):
        def roll_back(self, length: int) -> None:
            if length == trace.end:
                super().roll_back(length)
            else:
                self.state.cut(length)

    report = replay(trace, AtTheEnd())
    assert report.first is not None
    assert (report.first.field, report.first.step, report.steps) == ("state_digest", 8, 8)


class AcceptsOneMore(NativeTable):
    def judge(self, path, q, prefixes):
        accepted, bonus = super().judge(path, q, prefixes)
        return min(accepted + 1, len(path)), bonus


class AcceptsOneLess(NativeTable):
    def judge(self, path, q, prefixes):
        accepted, bonus = super().judge(path, q, prefixes)
        return max(accepted - 1, 0), bonus


class BonusOfTheRowBefore(NativeTable):
    def judge(self, path, q, prefixes):
        accepted, _ = super().judge(path, q, prefixes)
        return accepted, table.likeliest(prefixes[max(accepted - 1, 0)])[0][0]


class ResidualForgotten(NativeTable):
    """Draws from p after a rejection, as if nothing had been proposed."""

    def judge(self, path, q, prefixes):
        nothing = [dict.fromkeys(row, 0.0) | {x: row[x]} for x, row in zip(path, q, strict=True)]
        return super().judge(path, nothing, prefixes)


@pytest.mark.parametrize(
    ("broken", "name", "step", "field"),
    [
        (AcceptsOneMore, "greedy", 1, "accepted_prefix_length"),
        (AcceptsOneLess, "greedy", 3, "accepted_prefix_length"),
        (BonusOfTheRowBefore, "greedy", 3, "bonus_token"),
        (AcceptsOneMore, "sampled", 1, "accepted_prefix_length"),
        (AcceptsOneLess, "sampled", 1, "accepted_prefix_length"),
        (ResidualForgotten, "sampled", 2, "bonus_token"),
    ],
)
def test_another_acceptance_is_found_where_it_shows(
    broken: type[NativeTable], name: str, step: int, field: str
) -> None:
    case = BY_NAME[name]
    report = replayed(name, broken(case.accept, case.residual))
    assert report.first is not None
    assert (report.first.step, report.first.field) == (step, field)
    assert report.steps == step - 1


FOREIGN = {
    "schema_version": 2,
    "target_model_revision": "table:2",
    "tokenizer_revision": "table:letters",
    "vocab_size": 17,
    "layer_count": 5,
    "hidden_size": 8,
    "captured_stage": "block_input",
    "captured_layer_ids": (3, 1),
    "hidden_dtype": "float16",
    "request_owner": "silver",
    "request_generation": 4,
}


@pytest.mark.parametrize("field", FOREIGN)
def test_a_foreign_trace_is_refused_before_any_step(field: str) -> None:
    native = NativeTable.of(BY_NAME["greedy"], **{field: FOREIGN[field]})
    with pytest.raises(ProtocolError, match=f"^{field} is ") as refused:
        replay(golden("greedy"), native)
    assert refused.value.field == field
    assert native.calls == ["identity"]


@every_case
def test_on_another_device_tokens_are_compared_and_nothing_else(case: Case) -> None:
    class OtherBits(NativeTable):
        def verify(self, record):
            step = super().verify(record)
            shares = tuple(tuple(p / 2 for p in row) for row in step.target_token_probabilities)
            other = rows_digest(table.row([0]))
            return replace(
                step, target_token_probabilities=shares, hidden_digest=other,
                target_rows_digest=other,
            )  # fmt: skip

    native = OtherBits(case.accept, case.residual, NativeTable.of(case, device="abacus").identity())
    report = replay(golden(case.name), native)
    assert (report.first, report.compared) == (None, "tokens")
    if case.passes:
        same_device = replay(golden(case.name), OtherBits(case.accept, case.residual))
        assert same_device.first is not None
        assert same_device.first.field == "hidden_digest"


def test_on_another_device_other_tokens_are_found() -> None:
    native = AcceptsOneLess(identity=NativeTable.of(BY_NAME["greedy"], device="abacus").identity())
    report = replayed("greedy", native)
    assert report.first is not None
    assert report.first.field == "accepted_prefix_length"
