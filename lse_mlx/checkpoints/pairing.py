"""Which drafter belongs to which target: the records in pairs.json and the demo pair's own."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from lse_mlx import demo_pair
from lse_mlx.checkpoints.checks import Words, shown
from lse_mlx.checkpoints.hashing import SHA256
from lse_mlx.checkpoints.json_object import read_json_object
from lse_mlx.errors import CheckpointError

PAIRS = Path(__file__).with_name("pairs.json")
DEMO_PAIR = demo_pair.TARGET.parent / "pair.json"
REINSTALL = "install lse-mlx again"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class TargetRecord:
    """What is known of a target.

    repository, revision: where a build of it is published, or None
    bytes: of that build's weights, or None
    hidden_size, num_hidden_layers, vocab_size: as in its config.json
    tokenizer_sha256: the identity of its tokenizer, or None where it is not known
    """

    repository: str | None
    revision: str | None
    bytes: int | None
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    tokenizer_sha256: str | None


@dataclass(frozen=True)
class DrafterRecord:
    """What is known of a drafter; None where something is not.

    bytes, sha256: of its model.safetensors as published
    q8_bytes, q8_sha256, q8_config_sha256: of its conversion to 8 bits
    config: the part of its config.json that must hold, nested as there
    """

    repository: str | None
    revision: str | None
    bytes: int | None
    sha256: str | None
    q8_bytes: int | None
    q8_sha256: str | None
    q8_config_sha256: str | None
    config: dict[str, Any]


@dataclass(frozen=True)
class PairRecord:
    """A drafter and the target it was trained for.

    name: what a user calls the pair
    targets: patterns of a target's name, matched by `fits` whatever their case; `*` stands for
    anything. One without "/" is for the last part of a repository or folder name.
    """

    name: str
    targets: tuple[str, ...]
    target: TargetRecord
    drafter: DrafterRecord

    @classmethod
    def parse(cls, values: object, where: str = "The pair record") -> "PairRecord":
        """The record in parsed JSON.

        `where` begins the errors about it. Raises CheckpointError for a field that is missing, unknown,
        of the wrong kind, or that contradicts another.
        """
        top = _Fields(values, where, "")
        record = cls(
            name=top.text("name", _NAME),
            targets=tuple(top.patterns("targets")),
            target=_target(_Fields(top.take("target"), where, "target.")),
            drafter=_drafter(_Fields(top.take("drafter"), where, "drafter.")),
        )
        top.done()
        _check_agreement(record, where)
        return record

    @classmethod
    def read(cls, path: Path, way_out: str = REINSTALL) -> "PairRecord":
        """The record that the file `path` holds; raises CheckpointError as `parse` does.

        way_out: what to do about a file that is no JSON object
        """
        return cls.parse(read_json_object(path, way_out), str(path))

    def fits(self, target_name: str) -> bool:
        """Whether a pattern covers `target_name`: a repository, or a folder's name."""
        whole = target_name.lower()
        last = whole.rsplit("/", 1)[-1]
        return any(
            fnmatchcase(whole if "/" in pattern else last, pattern.lower())
            for pattern in self.targets
        )


def registered() -> tuple[PairRecord, ...]:
    """Every known pair: those of pairs.json, then the demo pair.

    Raises CheckpointError if a file of the package is damaged.
    """
    return (*read_pairs(PAIRS), PairRecord.read(DEMO_PAIR))


def read_pairs(path: Path) -> tuple[PairRecord, ...]:
    """The records in a file like pairs.json.

    Raises CheckpointError for a malformed one, and for two of one name.
    """
    held = read_json_object(path, REINSTALL)
    if not isinstance(held, dict) or set(held) != {"pairs"} or not isinstance(held["pairs"], list):
        raise CheckpointError(f'{path} is no JSON object with one list "pairs": install again.')
    records = tuple(
        PairRecord.parse(values, f"{path}, pair {place}")
        for place, values in enumerate(held["pairs"], 1)
    )
    names = [record.name for record in records]
    if twice := {name for name in names if names.count(name) > 1}:
        raise CheckpointError(f"{path} names the pair {min(twice)!r} twice: name each pair once.")
    return records


def by_name(name: str) -> PairRecord | None:
    """The pair called `name`, whatever its case, or None."""
    return _first(lambda record: record.name == name.lower())


def by_target_name(name: str) -> PairRecord | None:
    """The pair whose target may be called `name` (a repository or a folder's name), or None."""
    return _first(lambda record: record.fits(name))


def by_drafter(repository: str) -> PairRecord | None:
    """The pair whose drafter is published in `repository`, whatever its case, or None."""
    return _first(
        lambda record: (
            record.drafter.repository is not None
            and record.drafter.repository.lower() == repository.lower()
        )
    )


def _first(holds: Callable[[PairRecord], bool]) -> PairRecord | None:
    return next((record for record in registered() if holds(record)), None)


def _target(fields: "_Fields") -> TargetRecord:
    record = TargetRecord(
        repository=fields.optional_text("repository", _REPOSITORY),
        revision=fields.optional_text("revision", _REVISION),
        bytes=fields.optional_count("bytes"),
        hidden_size=fields.count("hidden_size"),
        num_hidden_layers=fields.count("num_hidden_layers"),
        vocab_size=fields.count("vocab_size"),
        tokenizer_sha256=fields.optional_text("tokenizer_sha256", SHA256),
    )
    fields.done()
    return record


def _drafter(fields: "_Fields") -> DrafterRecord:
    record = DrafterRecord(
        repository=fields.optional_text("repository", _REPOSITORY),
        revision=fields.optional_text("revision", _REVISION),
        bytes=fields.optional_count("bytes"),
        sha256=fields.optional_text("sha256", SHA256),
        q8_bytes=fields.optional_count("q8_bytes"),
        q8_sha256=fields.optional_text("q8_sha256", SHA256),
        q8_config_sha256=fields.optional_text("q8_config_sha256", SHA256),
        config=fields.config("config"),
    )
    fields.done()
    return record


def _check_agreement(record: PairRecord, where: str) -> None:
    config, target = record.drafter.config, record.target
    for of_drafter, of_target, value in (
        ("hidden_size", "hidden_size", target.hidden_size),
        ("vocab_size", "vocab_size", target.vocab_size),
        ("num_target_layers", "num_hidden_layers", target.num_hidden_layers),
    ):
        if of_drafter in config and config[of_drafter] != value:
            raise CheckpointError(
                f"{where} gives drafter.config.{of_drafter} as {shown(config[of_drafter])}, but "
                f"target.{of_target} as {value}: make them one."
            )
    for side, held in (("target", record.target), ("drafter", record.drafter)):
        if (held.repository is None) != (held.revision is None):
            raise CheckpointError(
                f"{where} gives only one of {side}.repository and {side}.revision: "
                "give both or neither."
            )


class _Fields:
    """The fields of one JSON object; each is taken once, and `done` refuses what is left."""

    def __init__(self, values: object, where: str, path: str):
        self._where, self._path = where, path
        if not isinstance(values, dict):
            label = path.rstrip(".") or "itself"
            raise CheckpointError(f"{where} gives {label} as {shown(values)}: give a JSON object.")
        self._values: dict[str, Any] = dict(values)

    def take(self, name: str) -> object:
        return self._values.pop(name, None)

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            self._refuse(name, value, f"text like {pattern.pattern}")
        return value

    def optional_text(self, name: str, pattern: re.Pattern[str]) -> str | None:
        return None if self._values.get(name) is None else self.text(name, pattern)

    def count(self, name: str) -> int:
        value = self.take(name)
        if type(value) is not int or value < 1:
            self._refuse(name, value, "a positive whole number")
        return value

    def optional_count(self, name: str) -> int | None:
        return None if self._values.get(name) is None else self.count(name)

    def patterns(self, name: str) -> list[str]:
        value = self.take(name)
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(one, str) and one.strip("*/") for one in value)
        ):
            self._refuse(name, value, "a list of name patterns that each say something")
        return value

    def config(self, name: str) -> dict[str, Any]:
        value = self.take(name)
        if not isinstance(value, dict) or not value or not _plain(value):
            self._refuse(name, value, "a JSON object of the fields that must hold")
        return value

    def done(self) -> None:
        if self._values:
            name = min(self._values)
            raise CheckpointError(
                f"{self._where} has an unknown field {shown(Words(self._path + name))}: remove it."
            )

    def _refuse(self, name: str, value: object, wanted: str) -> NoReturn:
        raise CheckpointError(
            f"{self._where} gives {self._path}{name} as {shown(value)}: give {wanted}."
        )


def _plain(value: object) -> bool:
    """Whether `value` is JSON with finite numbers and no empty object."""
    if isinstance(value, dict):
        return bool(value) and all(_plain(one) for one in value.values())
    if isinstance(value, list):
        return all(_plain(one) for one in value)
    return not isinstance(value, float) or math.isfinite(value)
