"""The gate: a drafter loads only if it belongs to this exact target.

A drafter's weights are trained on one target's features, tokens and output. Loading them beside
another one gives proposals that may read well and mean nothing, so everything that files can tell is
compared first, and one mismatch refuses. Read are JSON files and safetensors headers: no tensor, no
pickle, no code that a checkpoint brings along or names.

Compared are, in this order:
- the drafter's config.json with what this package computes: attention and rope, convolution,
  selector, block, candidates, quantization;
- its target-bound dimensions and taps with the target's config.json, and with the embedding, output
  head and layers that the target's headers hold;
- its mask token with the target's tokenizer, and its own tokenizer, if it has one, with the target's;
- both with the pair's record (see `known_pair`): the target's name, geometry and tokenizer, and
  config.json leaf by leaf. Where the record holds a whole config.json, a field that it lacks is a
  mismatch too. Without such a record an unknown field is let through if it is none of those that
  would change what is computed;
- as the only thing that may be waived, revisions: of both repositories, and hashes of published files
  where the hub's cache, or else a manifest, tells them. A config.json in bf16 is held to the hash of
  the one that its conversion has, so that fields which the record does not list are closed too;
- and its tensors with the exact set that its config.json asks for.

How tokens are verified, and who owns which cache, is this package's own code and no file's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.checks import Check, Words, clauses
from lse_mlx.checkpoints.drafter_config import NEEDS, inspect_config, look_up, target_checks
from lse_mlx.checkpoints.drafter_kind import read_drafter_values
from lse_mlx.checkpoints.drafter_tensors import ASKS, HOLDS, compare_tensors
from lse_mlx.checkpoints.gate.known_pair import (
    MANIFEST_SAYS,
    RECORDED,
    THE_RECORD,
    drafter_side,
    find_pair,
    target_side,
    unknown_parts,
)
from lse_mlx.checkpoints.gate.target_facts import TargetFacts, read_target
from lse_mlx.checkpoints.gate.tokenizer_identity import (
    has_tokenizer,
    read_tokenizer,
    unread_tokenizer,
)
from lse_mlx.checkpoints.names import WEIGHTS
from lse_mlx.checkpoints.origin import find_origin
from lse_mlx.checkpoints.pairing import PairRecord, registered
from lse_mlx.checkpoints.safetensors_header import read_header
from lse_mlx.errors import CheckpointError

FLAG = "--allow-revision-mismatch"
CODE = ("auto_map", "model_file")
"""Fields by which a config.json names Python files to run."""
OF_ITS_FILES = {ASKS, HOLDS, MANIFEST_SAYS}
"""Who speaks where the drafter's own files are compared with each other."""


@dataclass(frozen=True)
class GateReport:
    """What the gate found of one pair of folders.

    checks: every comparison with both values and its verdict
    notes: what could not be compared, in sentences
    """

    target: Path
    drafter: Path
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def mismatches(self) -> tuple[Check, ...]:
        """The comparisons that do not hold."""
        return tuple(check for check in self.checks if not check.holds)

    def accepts(self, allow_revision_mismatch: bool = False) -> bool:
        """Whether the drafter may load."""
        return not self._refused_by(allow_revision_mismatch)

    def as_dict(self, allow_revision_mismatch: bool = False) -> dict[str, Any]:
        """For JSON. A side that has no such field is left out of its entry."""
        return {
            "accepted": self.accepts(allow_revision_mismatch),
            "target": str(self.target),
            "drafter": str(self.drafter),
            "mismatches": [check.as_dict() for check in self.mismatches],
            "checks": [check.as_dict() for check in self.checks],
            "notes": list(self.notes),
        }

    def refusal(self, allow_revision_mismatch: bool = False) -> str:
        """Why the drafter may not load, in one sentence."""
        refused = self._refused_by(allow_revision_mismatch)
        found = clauses(refused)
        speakers = {check.says for check in refused if not check.says.startswith(THE_RECORD)}
        if speakers and speakers <= OF_ITS_FILES:
            return (
                f"The files of the drafter {self.drafter} do not belong together ({found}): "
                "download or convert it again."
            )
        if speakers == {NEEDS}:
            return (
                f"The config.json of the drafter {self.drafter} is none that lse-mlx runs "
                f"({found}): download it again, or use another drafter."
            )
        return (
            f"The drafter {self.drafter} does not belong to the target {self.target} "
            f"({found}): {_way_out(refused)}."
        )

    def _refused_by(self, allow_revision_mismatch: bool) -> list[Check]:
        waived = "revision" if allow_revision_mismatch else None
        return [check for check in self.mismatches if check.kind != waived]


class PairRefused(CheckpointError):
    """The drafter does not belong to the target; `report` has every comparison."""

    def __init__(self, report: GateReport, allow_revision_mismatch: bool):
        super().__init__(report.refusal(allow_revision_mismatch))
        self.report = report


def check_pair(
    target: Path,
    drafter: Path,
    allow_revision_mismatch: bool = False,
    records: Sequence[PairRecord] | None = None,
) -> GateReport:
    """Raise PairRefused, a CheckpointError that names what does not fit, unless the two belong together.

    Reads what `inspect_pair` reads and raises what it raises.
    """
    report = inspect_pair(target, drafter, records)
    if not report.accepts(allow_revision_mismatch):
        raise PairRefused(report, allow_revision_mismatch)
    return report


def inspect_pair(
    target: Path, drafter: Path, records: Sequence[PairRecord] | None = None
) -> GateReport:
    """Compare the drafter in the folder `drafter` with the target in the folder `target`.

    records: the registered pairs, those of the package if None

    Reads configs, tokenizer files and headers. Raises CheckpointError where one of the two is
    nothing that can be compared: another kind of model, a missing or damaged file.
    """
    values = read_drafter_values(drafter)
    facts = read_target(target)
    stored = read_header(drafter / WEIGHTS).tensors
    config, checks = inspect_config(values)
    checks += target_checks(values, facts)
    checks += facts.tensor_checks(look_up(values, "hidden_size"), look_up(values, "vocab_size"))
    checks.append(facts.layer_check(look_up(values, "num_target_layers")))
    checks += _tokenizer_checks(facts, values, drafter)
    origins = find_origin(target), find_origin(drafter)
    known = registered() if records is None else records
    pair = find_pair(origins[0], facts, origins[1], drafter, values, known)
    if pair is not None:
        by_record = target_side(pair, origins[0], facts)
        by_record += drafter_side(pair, drafter, values, config)
        refused = {check.field for check in checks if not check.holds}
        checks += [c for c in by_record if c.field.removeprefix(RECORDED) not in refused]
    notes = unknown_parts(pair, *origins, drafter)
    notes += [f"The {name} that {drafter} names is never run." for name in CODE if name in values]
    if unread := unread_tokenizer(drafter):
        notes.append(f"The drafter's {unread} could not be compared: only tokenizer.json is read.")
    if config is None:
        notes.append("The tensors were not compared, as the drafter's config.json is not sound.")
    else:  # at the end: there may be many
        checks += compare_tensors(stored, config).checks
    return GateReport(target, drafter, tuple(checks), tuple(notes))


def _way_out(refused: list[Check]) -> str:
    if all(check.kind == "revision" for check in refused):
        return f"use the recorded revisions, or pass {FLAG}"
    if all(check.says.startswith(THE_RECORD) for check in refused):
        return "use the recorded drafter, or give a pair that you trained a pair.json of its own"
    return "use the drafter that was made for it"


def _tokenizer_checks(facts: TargetFacts, values: dict[str, Any], drafter: Path) -> list[Check]:
    tokenizer, checks = facts.tokenizer, []
    vocabulary = look_up(values, "vocab_size")
    inside = isinstance(vocabulary, int) and tokenizer.largest < vocabulary
    largest = Words(f"token ids up to {tokenizer.largest}")
    says = "the target's tokenizer has"
    checks.append(Check("vocabulary", Words(f"{vocabulary!r} rows"), largest, inside, says))
    mask = look_up(values, name := "dflash_config.mask_token_id")
    text = tokenizer.text_token(mask) if type(mask) is int else None
    found = Words("no text there") if text is None else Words(f"the text {text!r} there")
    checks.append(Check(name, mask, found, text is None and type(mask) is int, says))
    if has_tokenizer(drafter):
        own = read_tokenizer(drafter)
        differing = own.first_difference(tokenizer)
        said = (own.sha256, tokenizer.sha256) if differing is None else map(Words, differing)
        checks.append(Check("tokenizer", *said, holds=differing is None, says=says))
    return checks
