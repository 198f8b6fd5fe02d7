"""The record that a target and a drafter are held to: which one it is, and whether it is kept."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.checks import NOTHING, Check, Kind, Words
from lse_mlx.checkpoints.conversion.manifest import Manifest
from lse_mlx.checkpoints.conversion.plan import converted_config
from lse_mlx.checkpoints.drafter_config import (
    DFlash2Config,
    Quantization,
    in_place,
    inspect_config,
    look_up,
)
from lse_mlx.checkpoints.gate.pair_record import PAIR_FILE
from lse_mlx.checkpoints.gate.target_facts import TargetFacts
from lse_mlx.checkpoints.hashing import SHA256
from lse_mlx.checkpoints.names import CONFIG, MANIFEST, QUANTIZATION, WEIGHTS
from lse_mlx.checkpoints.origin import Origin, find_origin
from lse_mlx.checkpoints.pairing import PairRecord

REGISTERED = Quantization(group_size=64, bits=8)
"""The conversion that a record gives hashes of."""
THE_RECORD = "the record of "
"""Begins what a comparison with a record says."""
MANIFEST_SAYS = f"its {MANIFEST} says"
RECORDED = "recorded "
"""Begins the name of what a record says of its target's geometry, before the drafter's name of it."""


@dataclass(frozen=True)
class KnownPair:
    """A record, and why it is the one that counts.

    whole: whether its config is all of a config.json, so that a field it lacks may not be there
    by_content: whether it was found by what the files hold, whatever the target is called
    path: the pair.json that it came with beside a drafter, None for a registered one
    """

    record: PairRecord
    whole: bool
    by_content: bool = False
    path: Path | None = None

    @property
    def has(self) -> str:
        """Who speaks in a comparison with it."""
        return f"{THE_RECORD}{self.record.name} has"


def find_pair(
    target: Origin,
    facts: TargetFacts,
    drafter: Origin,
    folder: Path,
    values: dict[str, Any],
    records: Sequence[PairRecord],
) -> KnownPair | None:
    """The record that counts, the first of these; None where there is none:

    the one of `records`, the registered pairs, whose drafter has this origin, as nothing that a
    repository brings along may undo what is recorded of it; pair.json in the drafter's `folder` or,
    for a conversion, in the one around it; the registered pair that holds the whole of `values`,
    the drafter's config.json; the one whose target has this tokenizer and geometry; the one whose
    target may be called so, where that one says nothing of a tokenizer.
    Raises CheckpointError for a damaged record.
    """
    known = [KnownPair(record, _is_whole(record)) for record in records]
    published = next((pair for pair in known if _is_published(pair.record, drafter)), None)
    path = own_record(folder)
    if published is not None or path is None:
        return published or _by_likeness(known, target, facts, values)
    record = PairRecord.read(path, "remove it, or put the record of the pair in its place")
    return KnownPair(record, _is_whole(record), path=path)


def own_record(folder: Path) -> Path | None:
    """The pair.json of the drafter in `folder`, None where it has none."""
    # A conversion lies inside the folder of its source unless another place was asked for.
    around = [folder.resolve().parent] if (folder / MANIFEST).is_file() else []
    paths = (place / PAIR_FILE for place in (folder, *around))
    return next((path for path in paths if path.is_file()), None)


def _by_likeness(
    known: Sequence[KnownPair], target: Origin, facts: TargetFacts, values: dict[str, Any]
) -> KnownPair | None:
    """The registered pair that the files or the target's name are like."""
    config = (p for p in known if p.whole and all(check.holds for check in _config(p, values)))
    content = (pair for pair in known if _has_content(pair.record, facts))
    named = (
        pair
        for pair in known
        if pair.record.target.tokenizer_sha256 is None and pair.record.fits(target.repository)
    )
    like = (replace(pair, by_content=True) for pair in chain(config, content))
    return next(chain(like, named), None)


def target_side(pair: KnownPair, origin: Origin, facts: TargetFacts) -> list[Check]:
    """The target held to the record: its name and revision where known, geometry, tokenizer."""
    record = pair.record
    checks = _geometry(record, facts)
    if record.target.tokenizer_sha256 is not None:
        recorded, own = record.target.tokenizer_sha256, facts.tokenizer.sha256
        checks.append(Check.equal("tokenizer_sha256", recorded, own, "the target has"))
    if not origin.known:
        return checks
    if not pair.by_content:
        patterns, holds = Words(" or ".join(record.targets)), record.fits(origin.repository)
        checks.append(Check("target", patterns, origin.repository, holds, "the target is"))
    named = record.target.repository
    if named is not None and named.lower() == origin.repository.lower():
        recorded, own = record.target.revision, origin.revision
        checks.append(_revision("target revision", recorded, own, "the target has"))
    return checks


def drafter_side(
    pair: KnownPair, folder: Path, values: dict[str, Any], config: DFlash2Config | None
) -> list[Check]:
    """The drafter in `folder` held to the record: its config leaf by leaf, its revision, hashes."""
    checks = _config(pair, values) + _published(pair, find_origin(folder))
    if config is not None:
        checks += _hashes(pair, folder, values, config.quantization)
    return checks


def unknown_parts(
    pair: KnownPair | None, target: Origin, drafter: Origin, folder: Path
) -> list[str]:
    """What could not be compared, and which record a drafter in `folder` brings, in sentences."""
    if pair is None:
        return ["No record names this pair: only what the two checkpoints say was compared."]
    record, notes = pair.record, []
    if pair.path is not None:
        notes.append(f"The record of {record.name} is {pair.path}, which came with the drafter.")
    elif (path := own_record(folder)) is not None:
        notes.append(f"{path} does not count, as {drafter.repository} is registered.")
    if pair.by_content and target.known and not record.fits(target.repository):
        notes.append(f"The target {target} is told by its content to be that of {record.name}.")
    if not target.known and not (pair.by_content and record.target.revision is None):
        notes.append(f"Name and revision of the target in {target.repository} are not known.")
    if record.target.tokenizer_sha256 is None:
        notes.append(
            f"The target's tokenizer could not be compared: the record of {record.name} has none."
        )
    if not drafter.known and record.drafter.revision is not None:
        notes.append(f"The revision of the drafter in {drafter.repository} is not known.")
    if (folder / MANIFEST).is_file() and hash_in_cache(folder / WEIGHTS) is None:
        notes.append(f"Of the weights in {folder} only their {MANIFEST} says what they are.")
    return notes


def _is_published(record: PairRecord, drafter: Origin) -> bool:
    published = record.drafter.repository or ""
    return drafter.known and published.lower() == drafter.repository.lower()


def _has_content(record: PairRecord, facts: TargetFacts) -> bool:
    """Whether the target has the tokenizer and the geometry of the record, which gives both."""
    recorded = record.target.tokenizer_sha256
    if recorded is None or not all(check.holds for check in _geometry(record, facts)):
        return False
    return recorded == facts.tokenizer.sha256  # last, as it sorts and hashes every token


def _is_whole(record: PairRecord) -> bool:
    config, _ = inspect_config(record.drafter.config)
    return config is not None


def _geometry(record: PairRecord, facts: TargetFacts) -> list[Check]:
    return [
        Check.equal(f"{RECORDED}{name}", recorded, own, "the target has")
        for name, recorded, own in (
            ("hidden_size", record.target.hidden_size, facts.hidden_size),
            ("num_target_layers", record.target.num_hidden_layers, facts.layer_count),
            ("vocab_size", record.target.vocab_size, facts.vocab_size),
        )
    ]


def _config(pair: KnownPair, values: dict[str, Any]) -> list[Check]:
    recorded, values = in_place(pair.record.drafter.config), in_place(values)
    names = list(_leaves(recorded))
    if pair.whole:
        names += [name for name in _leaves(values) if look_up(recorded, name) is NOTHING]
    return [
        Check.equal(name, look_up(values, name), look_up(recorded, name), pair.has)
        for name in names
        if name.split(".")[0] not in QUANTIZATION  # held to the stored tensors instead
    ]


def _leaves(values: dict[str, Any], path: str = "") -> list[str]:
    """Dotted names of all that is no object; a list is one value, and so is an empty object."""
    names: list[str] = []
    for key, value in values.items():
        inner = isinstance(value, dict) and value
        names += _leaves(value, f"{path}{key}.") if inner else [f"{path}{key}"]
    return names


def _published(pair: KnownPair, origin: Origin) -> list[Check]:
    record = pair.record.drafter
    if not origin.known or record.repository is None:
        return []
    if record.repository.lower() != origin.repository.lower():
        return [_revision("drafter repository", origin.repository, record.repository, pair.has)]
    return [_revision("drafter revision", origin.revision, record.revision, pair.has)]


def _hashes(
    pair: KnownPair, folder: Path, values: dict[str, Any], quantization: Quantization | None
) -> list[Check]:
    """Hashes that are known without reading the weights, held to the recorded ones."""
    record, sha256 = pair.record.drafter, hash_in_cache(folder / WEIGHTS)
    checks: list[Check] = []
    found: list[tuple[str, str | None, str | None]] = []
    if quantization is None:
        # Every field counts here, also those that the record does not list.
        text = converted_config(values, REGISTERED.bits).encode()
        found.append(("sha256", sha256, record.sha256))
        found.append(("config.json sha256 once converted", _sha256(text), record.q8_config_sha256))
    elif (folder / MANIFEST).is_file():
        manifest, says = Manifest.read(folder), MANIFEST_SAYS
        size = (folder / WEIGHTS).stat().st_size
        checks.append(Check.equal("drafter bytes", size, manifest.bytes, says))
        found.append(("source sha256", manifest.source_sha256, record.sha256))
        # A manifest can be copied beside other weights; the name that the cache gives them cannot.
        sha256 = sha256 or manifest.sha256
    if quantization == REGISTERED:
        text = (folder / CONFIG).read_bytes()
        found.append(("sha256", sha256, record.q8_sha256))
        found.append(("config.json sha256", _sha256(text), record.q8_config_sha256))
    return checks + [
        _revision(f"drafter {name}", own, recorded, pair.has)
        for name, own, recorded in found
        if own is not None and recorded is not None
    ]


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def hash_in_cache(path: Path) -> str | None:
    """The SHA-256 by which the hub's cache calls the file, None for a file that lies elsewhere."""
    blob = path.resolve()
    is_named = blob.parent.name == "blobs" and SHA256.fullmatch(blob.name)
    return blob.name if is_named else None


def _revision(field: str, drafter: object, target: object, says: str) -> Check:
    kind: Kind = "revision"
    return Check(field, drafter, target, drafter == target, says, kind)
