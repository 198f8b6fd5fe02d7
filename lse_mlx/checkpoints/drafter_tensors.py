"""The tensors of a DFlash2 drafter: their names and shapes, and a file's header held to them."""

from dataclasses import dataclass

from lse_mlx.checkpoints.checks import NOTHING, Check, Words
from lse_mlx.checkpoints.drafter_config import CONV_TAPS, DFlash2Config
from lse_mlx.checkpoints.names import CODEBOOKS, FLOATS
from lse_mlx.checkpoints.safetensors_header import StoredTensor

ASKS, HOLDS = "its config.json asks for", "the weights hold"
SIDES = 2  # a convolution before the sublayer, and one after it

BOOKS = tuple(f"{name}.weight" for name in CODEBOOKS)


def tensor_shapes(config: DFlash2Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a drafter, before quantization; two axes mean a matrix."""
    hidden, rank = config.hidden_size, config.selector_rank
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
    }
    shapes |= dict.fromkeys(BOOKS, (config.vocab_size, rank))
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{k}": v for k, v in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: DFlash2Config) -> dict[str, tuple[int, ...]]:
    hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries = config.num_attention_heads * head_dim
    keys = config.num_key_value_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    for conv in ("attention_conv", "mlp_conv"):
        coefficients = SIDES * CONV_TAPS * config.conv_groups
        shapes[f"{conv}.base_kernel"] = (SIDES, CONV_TAPS, hidden)
        shapes[f"{conv}.kernel_projection.weight"] = (coefficients, hidden)
    return shapes


def part_name(name: str, part: str) -> str:
    """The name of a quantized matrix's scales or biases."""
    return name.removesuffix("weight") + part


@dataclass(frozen=True)
class TensorTable:
    """A header held to a config.

    names: the name in the file of every tensor asked for, by the name it is asked for
    checks: one for each tensor, asked for or found, and one for the quantization
    """

    names: dict[str, str]
    checks: list[Check]

    @property
    def fits(self) -> bool:
        """Whether every tensor is there, as it must be, and no other."""
        return all(check.holds for check in self.checks)


def compare_tensors(stored: dict[str, StoredTensor], config: DFlash2Config) -> TensorTable:
    """Hold the tensors `stored` to the exact set that `config` asks for."""
    table = _Table(stored, config)
    for name, shape in tensor_shapes(config).items():
        table.match(name, shape)
    if config.quantization is not None:
        coded = sum(tensor.dtype == "U32" for tensor in stored.values())
        said = f"{config.quantization.bits}-bit codes in groups of {config.quantization.group_size}"
        found = Words(f"{coded} tensors of codes")
        table.checks.append(Check("quantization", Words(said), found, coded > 0, HOLDS))
    for name in sorted(set(stored) - set(table.names.values())):
        table.check(name, NOTHING, False)
    return TensorTable(table.names, table.checks)


class _Table:
    """The comparison in progress."""

    def __init__(self, stored: dict[str, StoredTensor], config: DFlash2Config):
        self._stored = stored
        self._config = config
        self.names: dict[str, str] = {}
        self.checks: list[Check] = []

    def check(self, name: str, wanted: object, holds: bool) -> None:
        tensor = self._stored.get(name)
        found = NOTHING if tensor is None else _form((tensor.dtype,), tensor.shape)
        self.checks.append(Check(f"tensor {name}", found, wanted, holds, ASKS))

    def match(self, name: str, shape: tuple[int, ...]) -> None:
        """Find the tensor `name` under one of its names, as floats or as codes."""
        bare = name.removesuffix(".weight")
        # The published name is the more helpful one to look for.
        found = bare if name in BOOKS and name not in self._stored else name
        self.names[name] = found
        tensor = self._stored.get(found)
        if tensor is not None and tensor.dtype == "U32" and len(shape) == 2:
            self._match_codes(found, shape)
        else:
            self._match_floats(found, shape)

    def _match_floats(self, name: str, shape: tuple[int, ...]) -> None:
        dtype, tensor = self._config.dtype, self._stored.get(name)
        dtypes = FLOATS if dtype is None else (dtype,)
        holds = tensor is not None and tensor.shape == shape and tensor.dtype in dtypes
        self.check(name, _form(dtypes, shape), holds)

    def _match_codes(self, name: str, shape: tuple[int, ...]) -> None:
        quantization, (rows, columns) = self._config.quantization, shape
        if name.endswith(".weight"):
            for part in ("scales", "biases"):
                self.names[part_name(name, part)] = part_name(name, part)
        if quantization is None or not name.endswith(".weight"):
            reason = "which nothing explains: floats, or a quantization block and a .weight name"
            self.check(name, Words(f"no U32 codes, {reason}"), False)
            return
        group, bits = quantization.group_size, quantization.bits
        if columns % group:
            wanted = f"no codes, as groups of {group} do not divide its {columns} columns"
            self.check(name, Words(wanted), False)
            return
        coded = (rows, columns * bits // 32)
        self.check(name, _form(("U32",), coded), self._stored[name].shape == coded)
        for part in ("scales", "biases"):
            self._match_floats(part_name(name, part), (rows, columns // group))


def _form(dtypes: tuple[str, ...], shape: tuple[int, ...]) -> Words:
    return Words(f"{' or '.join(dtypes)} {list(shape)}")
