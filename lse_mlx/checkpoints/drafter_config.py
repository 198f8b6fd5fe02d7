"""The drafter's config.json: what is read, and what is refused before any weight is."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from lse_mlx.errors import CheckpointError

ARCHITECTURE = "DFlash2DraftModel"
LARGEST_BLOCK = 8
CONV_TAPS = 2
MOST_CANDIDATES = 255
"""What the selector may rank at a position: every pair of candidates is scored at once."""

# Optional fields that the drafter does not compute: accepted only where they change nothing.
NEUTRAL: tuple[tuple[str, object], ...] = (
    ("hidden_act", "silu"),
    ("rope_parameters.partial_rotary_factor", 1),
    ("dflash_config.input_embedding_scale", 1),
    ("dflash_config.output_multiplier", 1),
    ("dflash_config.final_logit_softcapping", 0),
)


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
        package does not run; the message names the field and the value found.
        """
        path = folder / "config.json"
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}): "
                "pass the folder of a DFlash2 checkpoint with its config.json."
            ) from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is not JSON ({error}): download the checkpoint again."
            ) from error
        if not isinstance(values, dict):
            raise CheckpointError(
                f"{path} holds a {type(values).__name__}, not a JSON object: "
                "download the checkpoint again."
            )
        return cls.parse(values)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "DFlash2Config":
        """Check the fields of a config.json that is already parsed; raises as `read` does."""
        fields = _Fields(values)
        _check_kind(fields)
        config = cls(
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
        )
        _check_layers(fields, config)
        _check_shapes(config)
        _check_block(config)
        return config

    def check_target(self, target: TargetDimensions) -> None:
        """Raise CheckpointError unless the drafter's target-bound dimensions are `target`'s."""
        for field, value, found in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.layer_count),
        ):
            if value != found:
                _refuse(field, value, f"the target has {found}: use the drafter made for it")
        for tap in self.target_layer_ids:
            if not 0 <= tap < target.layer_count:
                _refuse(
                    "dflash_config.target_layer_ids",
                    list(self.target_layer_ids),
                    f"the target's blocks are 0..{target.layer_count - 1}: "
                    "use the drafter made for it",
                )


def _refuse(field: str, value: object, way_out: str) -> NoReturn:
    raise CheckpointError(f"The drafter's config.json has {field} = {value!r}, but {way_out}.")


class _Fields:
    """Typed look-ups by dotted name; whatever is missing or mistyped is refused by that name."""

    def __init__(self, values: dict[str, Any]):
        self._values = values

    def optional(self, name: str) -> Any:
        """The value, or None where it or an object on the way to it is missing or null."""
        value: Any = self._values
        for part in name.split("."):
            if not isinstance(value, dict):
                return None
            value = value.get(part)
        return value

    def required(self, name: str) -> Any:
        value = self.optional(name)
        if value is None:
            raise CheckpointError(
                f"The drafter's config.json has no {name}: "
                "use the config.json published with the DFlash2 checkpoint."
            )
        return value

    def integer(self, name: str) -> int:
        value = self.required(name)
        if type(value) is not int:
            _refuse(name, value, "it must be an integer: use the published config.json")
        return value

    def count(self, name: str) -> int:
        value = self.integer(name)
        if not 0 < value < 1 << 31:
            _refuse(name, value, "it must be a positive 32-bit integer: use the published one")
        return value

    def positive(self, name: str) -> float:
        value = self.required(name)
        if type(value) not in (int, float) or not 0 < value < 1e300:
            _refuse(name, value, "it must be a finite positive number: use the published one")
        return float(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.required(name)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            _refuse(name, value, "it must be a list of integers: use the published config.json")
        return tuple(value)


def _check_kind(fields: _Fields) -> None:
    architectures = fields.required("architectures")
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        _refuse("architectures", architectures, f"a {ARCHITECTURE} is needed: pass a DFlash2 one")
    causal = fields.required("is_causal")
    if causal is not False:
        _refuse("is_causal", causal, "only false is implemented: use a non-causal DFlash2 drafter")
    rope = fields.required("rope_parameters.rope_type")
    if rope != "default":
        _refuse("rope_parameters.rope_type", rope, "only 'default' is implemented: use such one")
    taps = fields.integer("dflash_config.conv_kernel_size")
    if taps != CONV_TAPS:
        _refuse(
            "dflash_config.conv_kernel_size",
            taps,
            f"only {CONV_TAPS} is implemented: use a drafter with two convolution taps",
        )
    for name, neutral in NEUTRAL:
        value = fields.optional(name)
        if value is not None and (isinstance(value, bool) or value != neutral):
            _refuse(name, value, f"only {neutral!r} is implemented: use a drafter without it")


def _check_layers(fields: _Fields, config: DFlash2Config) -> None:
    kinds = fields.required("layer_types")
    if not isinstance(kinds, list) or any(kind != "sliding_attention" for kind in kinds):
        _refuse("layer_types", kinds, "every layer must be 'sliding_attention': use such a drafter")
    if len(kinds) != config.num_hidden_layers:
        _refuse(
            "layer_types",
            kinds,
            f"num_hidden_layers is {config.num_hidden_layers}: use the published config.json",
        )
    taps, blocks = config.target_layer_ids, config.num_target_layers
    if not taps or list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < blocks:
        _refuse(
            "dflash_config.target_layer_ids",
            list(taps),
            f"it must name target blocks in 0..{blocks - 1}, strictly increasing and at least "
            "one: use the published config.json",
        )


def _check_shapes(config: DFlash2Config) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        _refuse(
            "num_attention_heads",
            config.num_attention_heads,
            f"it must be a multiple of num_key_value_heads = {config.num_key_value_heads}: "
            "use the published config.json",
        )
    if config.head_dim % 2:
        _refuse("head_dim", config.head_dim, "rotary positions need an even one: use the published")
    if config.hidden_size % config.conv_group_size:
        _refuse(
            "dflash_config.conv_group_size",
            config.conv_group_size,
            f"it must divide hidden_size = {config.hidden_size}: use the published config.json",
        )


def _check_block(config: DFlash2Config) -> None:
    block, vocab = config.block_size, config.vocab_size
    if not 2 <= block <= LARGEST_BLOCK:
        _refuse(
            "dflash_config.block_size",
            block,
            f"2..{LARGEST_BLOCK} are implemented: use a drafter with such a block",
        )
    # Below the block the public implementations disagree on what the last rows see.
    if config.sliding_window < max(2, block):
        _refuse(
            "sliding_window",
            config.sliding_window,
            f"it must be at least the block of {block}: use the published config.json",
        )
    if not 0 <= config.mask_token_id < vocab:
        _refuse(
            "dflash_config.mask_token_id",
            config.mask_token_id,
            f"the vocabulary is 0..{vocab - 1}: use the published config.json",
        )
    most = min(vocab, MOST_CANDIDATES)
    if config.selector_top_k > most:
        _refuse(
            "dflash_config.selector_top_k",
            config.selector_top_k,
            f"at most {most} candidates are scored in pairs: use the published config.json",
        )


def _quantization(fields: _Fields) -> Quantization | None:
    """The `quantization` block, or the `quantization_config` that repeats it; null means none."""
    name = next(
        (n for n in ("quantization", "quantization_config") if fields.optional(n) is not None), None
    )
    if name is None:
        return None
    block = fields.required(name)
    if not isinstance(block, dict):
        _refuse(name, block, "it must be an object with group_size and bits: convert it again")
    mode = block.get("mode", "affine")
    if mode != "affine":
        _refuse(f"{name}.mode", mode, "only 'affine' is implemented: convert the drafter again")
    group_size, bits = fields.count(f"{name}.group_size"), fields.count(f"{name}.bits")
    if group_size not in (32, 64, 128):
        _refuse(f"{name}.group_size", group_size, "32, 64 or 128 is needed: convert it again")
    if bits not in (4, 8):
        _refuse(f"{name}.bits", bits, "4 or 8 is needed: convert the drafter again")
    return Quantization(group_size, bits)
