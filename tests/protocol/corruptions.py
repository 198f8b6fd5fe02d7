"""Single fields of a trace changed, and the field that the refusal has to name.

With the digests of its fields, each record tells by itself which field was changed. `CORRUPTIONS` are
for records without, where a rule or the target has to find what is wrong.

For any greedy trace of at least three steps of which one in the middle has a path, whose target names
at least two tokens a row. Where the trace has payloads or routes, theirs are changed too.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from lse_mlx.errors import ProtocolError
from lse_mlx.protocol.native import Native
from lse_mlx.protocol.replay import replay
from lse_mlx.protocol.trace_files import read_trace

Values = dict[str, Any]


@dataclass
class Files:
    """What the files of a trace hold, to be changed in place."""

    header: Values
    steps: list[Values]
    routes: list[Values]
    payloads: dict[str, NDArray[Any]]

    @classmethod
    def read(cls, folder: Path) -> "Files":
        [header] = _lines(folder / "trace.json")
        routes, payloads = folder / "routes.jsonl", folder / "payloads.safetensors"
        return cls(
            header,
            _lines(folder / "steps.jsonl"),
            _lines(routes) if routes.exists() else [],
            load_file(payloads) if payloads.exists() else {},
        )

    def write(self, folder: Path, digests: bool = False) -> None:
        """digests: with the digests of the fields as they were; null in their place otherwise."""
        if not digests:
            for record in (self.header, *self.steps, *self.routes):
                record["field_digests"] = None
        _write(folder / "trace.json", [self.header])
        _write(folder / "steps.jsonl", self.steps)
        if self.routes:
            _write(folder / "routes.jsonl", self.routes)
        if self.payloads:
            save_file(self.payloads, folder / "payloads.safetensors")

    @property
    def step(self) -> Values:
        """A step in the middle that has a path; the first where none is in the middle."""
        return next(s for s in (self.steps[1:-1] or self.steps) if s["selected_candidate_path"])

    @property
    def route(self) -> Values:
        """A route with a ticket."""
        return next(route for route in self.routes if route["prefetch_ticket_owner"] is not None)

    @property
    def rows(self) -> str:
        """The name of that step's payload."""
        return self.step["hidden_payload"]


def _lines(path: Path) -> list[Values]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _write(path: Path, records: list[Values]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


@dataclass(frozen=True)
class Corruption:
    """One change.

    where: what is changed; named: the field in the refusal or in the first difference
    """

    where: str
    named: str
    change: Callable[[Files], object]

    @property
    def part(self) -> str:
        """The part of the trace that it needs: header, step, payloads or routes."""
        return self.where.split(".", maxsplit=1)[0]


def set_to(part: str, field: str, make: Callable[[Any], Any], named: str = "") -> Corruption:
    """`field` of the header, of the step or of the route set to `make(old value)`."""

    def change(files: Files) -> None:
        held = getattr(files, part.removesuffix("s"))
        held[field] = make(held[field])

    return Corruption(f"{part}.{field}", named or field, change)


def changed(
    part: str, field: str, change: Callable[[Files], object], named: str = ""
) -> Corruption:
    """A change that looks at more than the old value."""
    return Corruption(f"{part}.{field}", named or field, change)


def more(value: int) -> int:
    return value + 1


def other_digest(value: str) -> str:
    return ("0" if value[0] != "0" else "1") + value[1:]


def marked(value: str) -> str:
    return f"{value}x"


def last_of_first_row(change: Callable[[Any, Files], Any], field: str) -> Callable[[Files], None]:
    """The least likely token that is named of the first row."""

    def apply(files: Files) -> None:
        row = files.step[field][0]
        row[-1] = change(row[-1], files)

    return apply


def _unlisted(_: int, files: Files) -> int:
    listed = files.step["target_token_ids"][0]
    return next(t for t in range(files.header["vocab_size"]) if t not in listed)


def _other_token(field: str) -> Callable[[Files], None]:
    def apply(files: Files) -> None:
        files.step[field] = (files.step[field] + 1) % files.header["vocab_size"]

    return apply


def _leave_the_candidates(files: Files) -> None:
    ids, path = files.step["candidate_token_ids"][0], files.step["selected_candidate_path"]
    path[0] = next(t for t in range(files.header["vocab_size"]) if t not in ids)


def _outside_the_vocabulary(field: str) -> Callable[[Files], None]:
    def apply(files: Files) -> None:
        row = files.step[field][-1]
        row[-1] = files.header["vocab_size"]
        if field == "candidate_token_ids":
            files.step["selected_candidate_path"][-1] = row[-1]

    return apply


def _reverse_layers(files: Files) -> None:
    layers = files.header["captured_layer_ids"]
    left = [n for n in range(files.header["layer_count"]) if n not in layers]
    files.header["captured_layer_ids"] = layers[::-1] if len(layers) > 1 else left[:1]


def _other_first_token(files: Files) -> None:
    taken = [files.header["first_token"], *files.header["stop_token_ids"]]
    files.header["first_token"] = next(t for t in range(len(taken) + 1) if t not in taken)


def _first_ends_it(files: Files) -> None:
    files.header["stop_token_ids"] = [files.header["first_token"]]


def _first_route(field: str, make: Callable[[Any], Any]) -> Callable[[Files], None]:
    """The first route that has no ticket."""

    def apply(files: Files) -> None:
        route = next(held for held in files.routes if held["prefetch_ticket_owner"] is None)
        route[field] = make(route[field])

    return apply


def _change_rows(make: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Files], None]:
    def apply(files: Files) -> None:
        files.payloads[files.rows] = make(files.payloads[files.rows])

    return apply


def _one_bit(rows: NDArray[Any]) -> NDArray[Any]:
    bits = rows.copy().view(np.uint32)
    bits[-1, -1] ^= 1
    return bits.view(np.float32)


HEADER = [
    set_to("header", "schema_version", more),
    set_to("header", "target_model_revision", marked),
    set_to("header", "tokenizer_revision", marked),
    set_to("header", "vocab_size", more),
    set_to("header", "layer_count", more),
    set_to("header", "hidden_size", lambda value: 2 * value),
    set_to("header", "captured_stage", marked),
    changed("header", "captured_layer_ids", _reverse_layers),
    set_to("header", "hidden_dtype", lambda _: "float16"),
    set_to("header", "request_owner", marked),
    set_to("header", "request_generation", more),
    set_to("header", "prompt_token_ids", lambda value: [*value, 0], named="sequence_position"),
    changed("header", "first_token", _other_first_token, named="anchor_token"),
    set_to("header", "temperature", lambda _: -1.0),
    set_to("header", "top_k", lambda _: 1.5),
    set_to("header", "top_p", lambda _: 0),
    set_to("header", "min_p", lambda _: 2),
    set_to("header", "seed", lambda _: True),
    set_to("header", "max_tokens", lambda _: 1),
    changed("header", "stop_token_ids", _first_ends_it, named="first_token"),
    set_to("header", "stop_reason", lambda _: "bored"),
    set_to("header", "step_count", more),
    set_to("header", "route_count", more),
    set_to("header", "drafter", lambda _: ""),
    set_to("header", "device", lambda _: 7),
    changed("header", "package_version", lambda files: files.header.pop("package_version")),
    changed("header", "note", lambda files: files.header.update(note="hello")),
]
STEP = [
    set_to("step", "schema_version", lambda _: 0),
    set_to("step", "target_model_revision", marked),
    set_to("step", "tokenizer_revision", marked),
    set_to("step", "request_owner", marked),
    set_to("step", "request_generation", more),
    set_to("step", "sequence_position", more),
    set_to("step", "captured_stage", marked),
    set_to("step", "captured_layer_ids", lambda value: value + value[:1]),
    set_to("step", "hidden_dtype", lambda _: "bfloat16"),
    set_to("step", "hidden_shape", lambda value: [value[0] + 1, value[1]]),
    set_to("step", "hidden_digest", other_digest),
    changed("step", "anchor_token", _other_token("anchor_token")),
    set_to("step", "candidate_token_ids", lambda rows: [rows[0] + rows[0][:1], *rows[1:]]),
    changed("step", "candidate_token_ids out of the vocabulary",
            _outside_the_vocabulary("candidate_token_ids"), named="candidate_token_ids"),
    set_to("step", "candidate_probabilities", lambda rows: [[1.5, *rows[0][1:]], *rows[1:]]),
    set_to("step", "candidate_probabilities", lambda rows: [[math.nan, *rows[0][1:]], *rows[1:]]),
    set_to("step", "candidate_probabilities", lambda rows: rows[1:]),
    changed("step", "selected_candidate_path", _leave_the_candidates),
    changed("step", "target_token_ids", last_of_first_row(_unlisted, "target_token_ids")),
    changed("step", "target_token_ids out of the vocabulary",
            _outside_the_vocabulary("target_token_ids"), named="target_token_ids"),
    changed("step", "target_token_probabilities",
            last_of_first_row(lambda p, _: p / 2, "target_token_probabilities")),
    set_to("step", "target_rows_digest", other_digest),
    set_to("step", "accepted_prefix_length", more),
    changed("step", "bonus_token", _other_token("bonus_token")),
    set_to("step", "bonus_token", lambda _: None),
    set_to("step", "committed_rows", lambda value: value - 1),
    changed("step", "committed_rows left out", lambda f: f.step.pop("committed_rows"),
            named="committed_rows"),
]  # fmt: skip
PAYLOADS = [
    changed("payloads", "one bit", _change_rows(_one_bit), named="hidden_digest"),
    changed("payloads", "fp16", _change_rows(lambda rows: rows.astype(np.float16)),
            named="hidden_payload"),
    changed("payloads", "a row less", _change_rows(lambda rows: rows[:-1].copy()),
            named="hidden_payload"),
    changed("payloads", "lost", lambda files: files.payloads.pop(files.rows),
            named="hidden_payload"),
    changed("payloads", "a name too many", lambda f: f.payloads.update(x=np.zeros(1, np.float32)),
            named="hidden_payload"),
    changed("payloads", "none named", lambda files: files.step.update(hidden_payload=None),
            named="hidden_payload"),
    changed("payloads", "another's named", lambda files: files.step.update(
            hidden_payload=files.steps[0]["hidden_payload"]), named="hidden_payload"),
]  # fmt: skip
ROUTES = [
    set_to("routes", "schema_version", more),
    # The ticket beside it is the request's own, so the two contradict each other.
    set_to("routes", "request_owner", marked, named="prefetch_ticket_owner"),
    set_to("routes", "request_generation", more, named="prefetch_ticket_generation"),
    changed("routes", "request_owner without a ticket", _first_route("request_owner", marked),
            named="request_owner"),
    changed("routes", "request_generation without a ticket", _first_route("request_generation", more),
            named="request_generation"),
    set_to("routes", "sequence_position", lambda _: 1 << 20),
    set_to("routes", "target_route_layer", lambda _: 1 << 20),
    set_to("routes", "target_top_k", more, named="target_expert_ids_in_native_rank_order"),
    set_to("routes", "target_expert_ids_in_native_rank_order", lambda ids: ids[:1] * len(ids)),
    set_to("routes", "predicted_expert_ids", lambda _: [-1]),
    set_to("routes", "prediction_confidence", lambda held: [*held, 0.5]),
    set_to("routes", "prefetch_ticket_owner", lambda _: "somebody else"),
    set_to("routes", "prefetch_ticket_generation", lambda _: 1 << 20),
]  # fmt: skip
CORRUPTIONS = [*HEADER, *STEP, *PAYLOADS, *ROUTES]


def other(value: Any) -> Any:
    """A different value of the same kind."""
    match value:
        case None:
            return "x"
        case str():
            return marked(value)
        case list():
            return [*value, value[-1] if value else 0]
        case float():
            return 0.5 if value != 0.5 else 0.25
    return more(value)


def changed_alone(source: Path, folder: Path, part: str, field: str) -> str | None:
    """The field that reading names where only `field` of a header, step or route is another.

    source: of a trace; folder: where the changed one goes
    """
    files = Files.read(source)
    held = getattr(files, part)
    held[field] = other(held[field])
    files.write(folder, digests=True)
    try:
        read_trace(folder)
    except ProtocolError as refused:
        return refused.field if f"{refused.field} is " in str(refused) else str(refused)
    return None


def corrupt(source: Path, folder: Path, corruption: Corruption) -> None:
    """Write the trace in `source` into the empty `folder`, with one corruption."""
    files = Files.read(source)
    corruption.change(files)
    files.write(folder)


def named_by(folder: Path, native: Callable[[], Native]) -> str | None:
    """The field that reading or replaying the trace in `folder` names; None if all is well.

    native: makes a target that has not replayed anything yet
    """
    try:
        report = replay(read_trace(folder), native())
    except ProtocolError as refused:
        return refused.field if refused.field in str(refused) else f"{refused} names nothing"
    return None if report.first is None else report.first.field
