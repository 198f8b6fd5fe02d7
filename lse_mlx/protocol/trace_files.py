"""A trace as a folder of files: JSON, JSON Lines, and hidden rows in safetensors.

Equal traces are equal files to the byte: keys sorted, no spaces, floats in their shortest form that
reads back as the same float.
"""

import errno
import json
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lse_mlx.errors import ProtocolError, printable, reason, shown
from lse_mlx.protocol.fields import DIGESTS, Record, field_digests, refuse
from lse_mlx.protocol.records import RouteRecord, StepRecord, TraceHeader
from lse_mlx.protocol.trace import HEADER, PAYLOADS, ROUTES, STEPS, Trace, check_tensor, within

LONGEST_LINE = 64 << 20
"""Bytes of a JSON object, a header with its prompt included."""

DTYPE_NAMES = {"F32": "float32"}
"""How safetensors calls what `hidden_dtype` names."""

WAY_OUT = "copy the whole folder again or record it anew"


R = TypeVar("R", bound=Record)


def write_trace(folder: Path, trace: Trace) -> None:
    """Write `trace` into the existing, empty `folder`; the header comes last.

    Raises ProtocolError, with the field "folder", if the folder is no empty one or cannot be written;
    then it holds no file of the trace.
    """
    try:
        held = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise _folder_error(folder, "read", error) from error
    if held:
        raise ProtocolError("folder", f"{folder} is not empty: give an empty folder for a trace.")
    begun: list[Path] = []
    try:
        for name, content in _contents(trace):
            begun.append(folder / name)
            begun[-1].write_bytes(content)
    except BaseException as error:
        for path in begun:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _folder_error(folder, "written", error) from error
        raise


def read_trace(folder: Path | str) -> Trace:
    """The trace in `folder`, checked whole.

    Raises ProtocolError, which names the file, the line and the field, if a file is missing, damaged,
    too short or too long, or holds a record that is refused.
    """
    folder = Path(folder)
    with within(printable(str(folder))):
        [header] = _records(folder, HEADER, TraceHeader, 1)
        steps = _records(folder, STEPS, StepRecord, header.step_count, "step_count")
        routes: Sequence[RouteRecord] = ()
        present = (folder / ROUTES).exists()
        if header.route_count and not present:
            refuse("route_count", header.route_count, f"there is no {ROUTES}, so {WAY_OUT}")
        if present:
            routes = _records(folder, ROUTES, RouteRecord, header.route_count, "route_count")
        return Trace(header, tuple(steps), tuple(routes), _payloads(folder, steps))


def _contents(trace: Trace) -> Iterator[tuple[str, bytes]]:
    yield STEPS, b"".join(map(_line, trace.steps))
    if trace.routes:
        yield ROUTES, b"".join(map(_line, trace.routes))
    if trace.payloads:
        # safetensors writes the bytes as they lie in memory.
        yield PAYLOADS, save({n: np.ascontiguousarray(rows) for n, rows in trace.payloads.items()})
    yield HEADER, _line(trace.header)


def _line(record: Record) -> bytes:
    held = record.as_dict()
    held[DIGESTS] = field_digests(held)
    text = json.dumps(held, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def _records(
    folder: Path, name: str, kind: type[R], count: int, counted_by: str | None = None
) -> list[R]:
    """Exactly `count` records, one a line."""
    records: list[R] = []
    field = counted_by or name
    said = f"{counted_by} of {HEADER} is {count}" if counted_by else "one line is all it has"
    for line in _lines(folder / name):
        with within(f"{name}, line {len(records) + 1}"):
            if len(records) == count:
                raise ProtocolError(field, f"This line is one too many, {said}: {WAY_OUT}.")
            held = _object(line, name)
            records.append(kind.from_dict(held))
            if DIGESTS not in held:
                raise ProtocolError(DIGESTS, f"{DIGESTS} is missing: {WAY_OUT}.")
    if len(records) < count:
        ends = f"{name} ends after {len(records)} lines, and {said}"
        raise ProtocolError(field, f"{ends}: {WAY_OUT}.")
    return records


def _object(line: bytes, name: str) -> dict[str, Any]:
    """The JSON object that is all of `line`."""
    if len(line) > LONGEST_LINE:
        raise ProtocolError(name, f"It has more than {LONGEST_LINE} bytes: {WAY_OUT}.")
    if not line.endswith(b"\n"):
        raise ProtocolError(name, f"It is cut short, without a line end: {WAY_OUT}.")
    if not line.strip():
        raise ProtocolError(name, f"It is blank: {WAY_OUT}.")
    try:
        held = json.loads(line.decode("utf-8"), object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(name, f"It is not JSON ({reason(error)}): {WAY_OUT}.") from error
    if not isinstance(held, dict):
        raise ProtocolError(name, f"It holds {shown(held)}, no JSON object: {WAY_OUT}.")
    return held


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ProtocolError(twin, f"{shown(twin)} stands there twice: {WAY_OUT}.")
    return held


def _payloads(folder: Path, steps: Sequence[StepRecord]) -> dict[str, NDArray[np.float32]]:
    """The tensors of the payload file, loaded only if they are what the steps say."""
    numbered = enumerate(steps, 1)
    named = {
        step.hidden_payload: (number, step) for number, step in numbered if step.hidden_payload
    }
    path = folder / PAYLOADS
    if not named and not path.exists():
        return {}
    _check_regular(path)
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name not in named:
                    unnamed = f"hidden_payload is {shown(name)} in no step, yet {PAYLOADS} has it"
                    raise ProtocolError("hidden_payload", f"{unnamed}: {WAY_OUT}.")
                rows = file.get_slice(name)
                stored = str(rows.get_dtype())
                dtype, shape = DTYPE_NAMES.get(stored, stored), tuple(rows.get_shape())
                number, step = named[name]
                with within(f"{STEPS}, line {number}"):
                    check_tensor(step, dtype, shape)
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _file_error(path, error) from error


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, one cut where it is longer than any may be."""
    _check_regular(path)
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                yield line
    except OSError as error:
        raise _file_error(path, error) from error


def _check_regular(path: Path) -> None:
    """Refuse what is missing and what is no regular file: a pipe would wait for a writer."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
    except OSError as error:
        raise _file_error(path, error) from error


def _file_error(path: Path, error: Exception) -> ProtocolError:
    why = (error.strerror if isinstance(error, OSError) else None) or reason(error)
    return ProtocolError(path.name, f"{path.name} cannot be read ({why}): {WAY_OUT}.")


def _folder_error(folder: Path, done: str, error: OSError) -> ProtocolError:
    why = error.strerror or reason(error)
    sentence = f"{folder} cannot be {done} ({why}): give an empty folder that can be written."
    return ProtocolError("folder", printable(sentence))
