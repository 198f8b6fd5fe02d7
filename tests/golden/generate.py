"""Writes the golden traces. Run as `python -m tests.golden.generate`; a test holds the files to it."""

import shutil
from pathlib import Path

import numpy as np

from lse_mlx.protocol.records import RouteRecord, StepRecord, TraceHeader
from lse_mlx.protocol.trace import Trace, payload_name, rows_digest
from lse_mlx.protocol.trace_files import write_trace
from tests.golden import table
from tests.golden.cases import CASES, Case, Pass

FOLDER = Path(__file__).parent
REVISION, TOKENIZER = "table:1", "table:digits"
OWNER, GENERATION = "golden", 3


def trace_of(case: Case) -> Trace:
    """The trace of `case`: its numbers by table.py, its outcomes as they stand in cases.py."""
    read, anchor = list(case.prompt), case.first
    steps, payloads = [], {}
    for number, one in enumerate(case.passes, 1):
        name = payload_name(number) if case.payloads else None
        record, rows = step_of(one, read, anchor, name)
        steps.append(record)
        if name is not None:
            payloads[name] = rows
        answer = [*one.path[: one.accepted], *([] if one.bonus is None else [one.bonus])]
        read += [anchor, *answer[: one.committed - 1]]
        anchor = answer[-1]
    routes = tuple(route_of(*place, predicted) for place, predicted in case.predicted.items())
    return Trace(header_of(case), tuple(steps), routes, payloads)


def header_of(case: Case) -> TraceHeader:
    """What holds for all of the case."""
    return TraceHeader(
        target_model_revision=REVISION,
        tokenizer_revision=TOKENIZER,
        vocab_size=table.VOCAB,
        layer_count=table.LAYERS,
        hidden_size=table.HIDDEN,
        captured_stage="block_output",
        captured_layer_ids=table.CAPTURED,
        hidden_dtype="float32",
        request_owner=OWNER,
        request_generation=GENERATION,
        prompt_token_ids=case.prompt,
        first_token=case.first,
        temperature=case.temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=case.max_tokens,
        stop_token_ids=case.stop_tokens,
        stop_reason=case.stop_reason,
        step_count=len(case.passes),
        route_count=len(case.predicted),
        drafter="scripted",
        device="table",
        package_version="golden",
    )


def step_of(
    one: Pass, read: list[int], anchor: int, payload: str | None
) -> tuple[StepRecord, np.ndarray]:
    """The record of a pass behind the tokens `read`, and its hidden rows."""
    tokens = [anchor, *one.path][: len(one.path) + one.last_row]
    prefixes = [[*read, *tokens[: n + 1]] for n in range(len(tokens))]
    hidden = np.stack([table.hidden(prefix) for prefix in prefixes])
    likeliest = [table.likeliest(prefix) for prefix in prefixes]
    record = StepRecord(
        target_model_revision=REVISION,
        tokenizer_revision=TOKENIZER,
        request_owner=OWNER,
        request_generation=GENERATION,
        sequence_position=len(read),
        captured_stage="block_output",
        captured_layer_ids=table.CAPTURED,
        hidden_dtype="float32",
        hidden_shape=(len(tokens), hidden.shape[1]),
        hidden_payload=payload,
        hidden_digest=rows_digest(hidden),
        anchor_token=anchor,
        candidate_token_ids=tuple(tuple(held) for held in one.candidates),
        candidate_probabilities=tuple(tuple(held.values()) for held in one.candidates),
        selected_candidate_path=one.path,
        target_token_ids=tuple(tuple(t for t, _ in row) for row in likeliest),
        target_token_probabilities=tuple(tuple(p for _, p in row) for row in likeliest),
        target_rows_digest=rows_digest(np.stack([table.row(prefix) for prefix in prefixes])),
        accepted_prefix_length=one.accepted,
        bonus_token=one.bonus,
        committed_rows=one.committed,
    )
    return record, hidden


def route_of(position: int, layer: int, predicted: tuple[int, ...]) -> RouteRecord:
    """What was predicted there beside what the router took."""
    return RouteRecord(
        request_owner=OWNER,
        request_generation=GENERATION,
        sequence_position=position,
        target_route_layer=layer,
        target_top_k=table.TOP_K,
        target_expert_ids_in_native_rank_order=table.experts(position, layer),
        predicted_expert_ids=predicted,
        prediction_confidence=tuple(1 / (1 + place) for place in range(len(predicted))),
        prefetch_ticket_owner=OWNER if predicted else None,
        prefetch_ticket_generation=GENERATION if predicted else None,
    )


def main() -> None:
    """Write every trace anew."""
    for case in CASES:
        folder = FOLDER / case.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_trace(folder, trace_of(case))


if __name__ == "__main__":
    main()
