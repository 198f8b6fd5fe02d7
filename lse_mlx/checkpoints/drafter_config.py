"""The drafter's config.json: what is read, and what is refused before any weight is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lse_mlx.checkpoints.checks import NOTHING, Check, Words, clauses, same
from lse_mlx.checkpoints.drafter_kind import read_drafter_values
from lse_mlx.checkpoints.names import ARCHITECTURE, QUANTIZATION, is_dflash2
from lse_mlx.errors import CheckpointError

LARGEST_BLOCK = 8
CONV_TAPS = 2
MOST_CANDIDATES = 255
"""What the selector may rank at a position: every pair of candidates is scored at once."""
GROUP_SIZES, BITS = (32, 64, 128), (4, 8)
NEEDS = "lse-mlx needs"

# Fields that change what is computed, by the one value that this package computes.
NEEDED: tuple[tuple[str, object], ...] = (
    ("is_causal", False),
    ("rope_parameters.rope_type", "default"),
    ("dflash_config.conv_kernel_size", CONV_TAPS),
)
# The same of optional fields: accepted only where they change nothing.
NEUTRAL: tuple[tuple[str, object], ...] = (
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("mlp_bias", False),
    ("rope_parameters.partial_rotary_factor", 1),
    ("rope_parameters.factor", 1),
    ("rope_scaling.rope_type", "default"),
    ("rope_scaling.type", "default"),
    ("rope_scaling.factor", 1),
    ("dflash_config.input_embedding_scale", 1),
    ("dflash_config.output_multiplier", 1),
    ("dflash_config.final_logit_softcapping", 0),
)
# Fields that may also stand where older configs have them, at the root.
MOVED = (("rope_parameters", "rope_theta"), ("dflash_config", "block_size"))
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""What config.json calls a type of floats, and what a safetensors header calls it."""


class TargetDimensions(Protocol):
    """What binds a drafter to its target."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def layer_count(self) -> int: ...


@dataclass(frozen=True)
class Quantization:
    """How the quantized matrices are stored: affine codes of `bits`, one scale and bias a group."""

    group_size: int
    bits: int


@dataclass(frozen=True)
class DFlash2Config:
    """The dimensions of one DFlash2 drafter, checked against themselves.

    Fields carry the names of config.json; those of its `dflash_config` stand at the same level.
    dtype: what the tensors that are no codes are stored as, None where config.json does not say
    """

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_target_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    quantization: Quantization | None
    dtype: str | None = None

    @property
    def ring_slots(self) -> int:
        """Context rows kept: what the anchor sees, and a block more so that a rewind loses none."""
        return self.sliding_window - 1 + self.block_size

    @property
    def conv_groups(self) -> int:
        """Channel groups that share one dynamic convolution coefficient."""
        return self.hidden_size // self.conv_group_size

    @classmethod
    def read(cls, folder: Path) -> "DFlash2Config":
        """Read `folder`/config.json.

        Raises CheckpointError if it is missing, is not JSON, or describes a drafter that this
        package does not run; the message names such fields and the values found.
        """
        return cls.parse(read_drafter_values(folder))

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "DFlash2Config":
        """Check the fields of a config.json that is already parsed; raises as `read` does."""
        config, checks = inspect_config(values)
        if config is None:
            raise CheckpointError(
                f"The drafter's config.json has {clauses(checks)}: "
                "use the config.json published with a DFlash2 checkpoint."
            )
        return config

    def check_target(self, target: TargetDimensions) -> None:
        """Raise CheckpointError unless the drafter's target-bound dimensions are `target`'s."""
        checks = target_checks(
            {
                "hidden_size": self.hidden_size,
                "vocab_size": self.vocab_size,
                "num_target_layers": self.num_target_layers,
                "dflash_config": {"target_layer_ids": list(self.target_layer_ids)},
            },
            target,
        )
        if not all(check.holds for check in checks):
            raise CheckpointError(
                f"The drafter's config.json has {clauses(checks)}: use the drafter made for it."
            )


def look_up(values: dict[str, Any], name: str) -> object:
    """The value of a dotted name, NOTHING where it or an object on the way to it is missing."""
    value: object = values
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return NOTHING
        value = value[part]
    return value


def in_place(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with every field of MOVED, and `architectures`, where and as configs have them today.

    A field that has another value in either place stays in both.
    """
    values = dict(values)
    if values.get("architectures") == ARCHITECTURE:
        values["architectures"] = [ARCHITECTURE]
    for part, name in MOVED:
        root, inner = values.get(name), values.get(part)
        inner = {} if inner is None else inner
        if root is None or not isinstance(inner, dict):
            continue
        if inner.get(name) is None:
            # What older configs say of a rope of another kind is in `rope_scaling`.
            plain = {"rope_type": "default"} if name == "rope_theta" and not inner else {}
            values[part] = {**plain, **inner, name: root}
        if same(values[part][name], root):
            del values[name]
    return values


def target_checks(values: dict[str, Any], target: TargetDimensions) -> list[Check]:
    """What binds the drafter of the config.json `values` to its target, compared with `target`."""
    checks = [
        Check.equal(field, look_up(values, field), dimension, "the target has")
        for field, dimension in (
            ("hidden_size", target.hidden_size),
            ("vocab_size", target.vocab_size),
            ("num_target_layers", target.layer_count),
        )
    ]
    taps = look_up(values, name := "dflash_config.target_layer_ids")
    inside = isinstance(taps, list) and all(
        type(tap) is int and 0 <= tap < target.layer_count for tap in taps
    )
    blocks = Words(f"0..{target.layer_count - 1}")
    checks.append(Check(name, taps, blocks, inside, "the target's blocks are"))
    return checks


def inspect_config(values: dict[str, Any]) -> tuple[DFlash2Config | None, list[Check]]:
    """The config of a parsed config.json, and every rule that it was held to.

    The config is None where a rule does not hold.
    """
    values = in_place(values)
    fields = _Fields(values)
    _check_kind(fields)
    for part, name in MOVED:
        if fields.optional(name) is not None:
            inner = fields.optional(f"{part}.{name}")
            fields.check(name, inner is None, f"{inner!r}, as {part}.{name} has it")
    config = DFlash2Config(
        hidden_size=fields.count("hidden_size"),
        vocab_size=fields.count("vocab_size"),
        num_hidden_layers=fields.count("num_hidden_layers"),
        num_target_layers=fields.count("num_target_layers"),
        num_attention_heads=fields.count("num_attention_heads"),
        num_key_value_heads=fields.count("num_key_value_heads"),
        head_dim=fields.count("head_dim"),
        intermediate_size=fields.count("intermediate_size"),
        sliding_window=fields.count("sliding_window"),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        rope_theta=fields.positive("rope_parameters.rope_theta"),
        block_size=fields.count("dflash_config.block_size"),
        mask_token_id=fields.integer("dflash_config.mask_token_id"),
        target_layer_ids=fields.integers("dflash_config.target_layer_ids"),
        conv_group_size=fields.count("dflash_config.conv_group_size"),
        selector_rank=fields.count("dflash_config.selector_rank"),
        selector_top_k=fields.count("dflash_config.selector_top_k"),
        quantization=_quantization(fields),
        dtype=_dtype(fields),
    )
    _check_layers(fields, config)
    _check_shapes(fields, config)
    _check_block(fields, config)
    return (config if all(check.holds for check in fields.checks) else None), fields.checks


class _Fields:
    """Typed look-ups by dotted name, each of which leaves a check.

    For what is missing or mistyped a stand-in of the right type is given: a rule about several
    fields is therefore looked at only where all of them are sound.
    """

    def __init__(self, values: dict[str, Any]):
        self._values = values
        self.checks: list[Check] = []

    def sound(self, *names: str) -> bool:
        return not {check.field for check in self.checks if not check.holds} & set(names)

    def optional(self, name: str) -> Any:
        """The value, or None where it or an object on the way to it is missing or null."""
        value = look_up(self._values, name)
        return None if value is NOTHING else value

    def check(self, name: str, holds: bool, needed: str) -> bool:
        """Leave a check of `name` that has `needed` in words; returns its verdict."""
        self.check_value(name, holds, Words(needed))
        return holds

    def check_value(self, name: str, holds: bool, needed: object) -> None:
        """Leave a check of `name` that has the value `needed`."""
        value = self.optional(name)
        found = NOTHING if value is None else value
        self.checks.append(Check(name, found, needed, holds, NEEDS))

    def rule(self, names: tuple[str, ...], holds: bool, needed: str) -> None:
        """A rule about several fields, where they are sound; the first one is what breaks it."""
        if self.sound(*names):
            self.check(names[0], holds, needed)

    def integer(self, name: str) -> int:
        value = self.optional(name)
        return value if self.check(name, type(value) is int, "an integer") else 0

    def count(self, name: str) -> int:
        value = self.optional(name)
        good = type(value) is int and 0 < value < 1 << 31
        return value if self.check(name, good, "a positive 32-bit integer") else 1

    def positive(self, name: str) -> float:
        value = self.optional(name)
        good = type(value) in (int, float) and 0 < value < 1e300
        return float(value) if self.check(name, good, "a finite positive number") else 1.0

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.optional(name)
        good = isinstance(value, list) and all(type(item) is int for item in value)
        return tuple(value) if self.check(name, good, "a list of integers") else ()


def _check_kind(fields: _Fields) -> None:
    named = fields.optional("architectures")
    fields.check_value("architectures", is_dflash2(named), [ARCHITECTURE])
    for name, only in NEEDED:
        fields.check_value(name, same(fields.optional(name), only), only)
    for name, neutral in NEUTRAL:
        value = fields.optional(name)
        holds = value is None or same(value, neutral)
        fields.check(name, holds, f"{neutral!r}, or no such field")


def _check_layers(fields: _Fields, config: DFlash2Config) -> None:
    kinds, layers = fields.optional("layer_types"), config.num_hidden_layers
    sliding = isinstance(kinds, list) and all(kind == "sliding_attention" for kind in kinds)
    fields.check("layer_types", sliding, "'sliding_attention' for every layer")
    fields.rule(
        ("layer_types", "num_hidden_layers"),
        isinstance(kinds, list) and len(kinds) == layers,
        f"num_hidden_layers = {layers} of them",
    )
    taps, blocks = config.target_layer_ids, config.num_target_layers
    fields.rule(
        ("dflash_config.target_layer_ids", "num_target_layers"),
        bool(taps) and list(taps) == sorted(set(taps)) and 0 <= taps[0] <= taps[-1] < blocks,
        f"target blocks in 0..{blocks - 1} (num_target_layers = {blocks}), strictly increasing "
        "and at least one",
    )


def _check_shapes(fields: _Fields, config: DFlash2Config) -> None:
    fields.rule(
        ("num_attention_heads", "num_key_value_heads"),
        config.num_attention_heads % config.num_key_value_heads == 0,
        f"a multiple of num_key_value_heads = {config.num_key_value_heads}",
    )
    fields.rule(("head_dim",), config.head_dim % 2 == 0, "an even one for rotary positions")
    fields.rule(
        ("dflash_config.conv_group_size", "hidden_size"),
        config.hidden_size % config.conv_group_size == 0,
        f"a divisor of hidden_size = {config.hidden_size}",
    )


def _check_block(fields: _Fields, config: DFlash2Config) -> None:
    block, vocab = config.block_size, config.vocab_size
    fields.rule(
        ("dflash_config.block_size",), 2 <= block <= LARGEST_BLOCK, f"one of 2..{LARGEST_BLOCK}"
    )
    # Below the block the public implementations disagree on what the last rows see.
    fields.rule(
        ("sliding_window", "dflash_config.block_size"),
        config.sliding_window >= max(2, block),
        f"at least the block of {block}",
    )
    fields.rule(
        ("dflash_config.mask_token_id", "vocab_size"),
        0 <= config.mask_token_id < vocab,
        f"an id of the vocabulary 0..{vocab - 1}",
    )
    most = min(vocab, MOST_CANDIDATES)
    fields.rule(
        ("dflash_config.selector_top_k", "vocab_size"),
        config.selector_top_k <= most,
        f"at most {most}, as candidates are scored in pairs",
    )


def _quantization(fields: _Fields) -> Quantization | None:
    """The `quantization` block, or the `quantization_config` that repeats it; null means none."""
    names = [n for n in QUANTIZATION if fields.optional(n) is not None]
    if not names:
        return None
    name, block = names[0], fields.optional(names[0])
    if not fields.check(name, isinstance(block, dict), "an object with group_size and bits"):
        return None
    if len(names) == 2:
        fields.check(names[1], same(block, fields.optional(names[1])), f"what {name} says")
    mode = fields.optional(f"{name}.mode")
    fields.check(f"{name}.mode", mode in (None, "affine"), "'affine', or no such field")
    group_size, bits = fields.count(f"{name}.group_size"), fields.count(f"{name}.bits")
    fields.rule((f"{name}.group_size",), group_size in GROUP_SIZES, f"one of {GROUP_SIZES}")
    fields.rule((f"{name}.bits",), bits in BITS, f"one of {BITS}")
    return Quantization(group_size, bits)


def _dtype(fields: _Fields) -> str | None:
    """What `dtype`, or `torch_dtype` as it was once called, says of the stored floats."""
    names = [name for name in ("dtype", "torch_dtype") if fields.optional(name) is not None]
    said = [fields.optional(name) for name in names]
    for name, value in zip(names, said, strict=True):
        known = isinstance(value, str) and value in DTYPES
        fields.check(name, known, f"one of {tuple(DTYPES)}")
    if not names or not fields.sound(*names):
        return None
    if len(names) == 2:
        fields.check(names[1], said[0] == said[1], f"what {names[0]} says")
    return DTYPES[said[0]]
