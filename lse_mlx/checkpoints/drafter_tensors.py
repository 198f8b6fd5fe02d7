"""The tensors of a DFlash2 drafter: their names and shapes, and a file's header held to them."""

from collections.abc import Iterator

from lse_mlx.checkpoints.drafter_config import CONV_TAPS, DFlash2Config
from lse_mlx.checkpoints.safetensors_header import StoredTensor
from lse_mlx.errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")
SIDES = 2  # a convolution before the sublayer, and one after it

# Published without `.weight`; a converter that quantizes them adds it.
CODEBOOKS = (
    "candidate_selector.predecessor_codebook.weight",
    "candidate_selector.successor_codebook.weight",
)


def tensor_shapes(config: DFlash2Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a drafter, before quantization; two axes mean a matrix."""
    hidden, rank = config.hidden_size, config.selector_rank
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
    }
    shapes |= dict.fromkeys(CODEBOOKS, (config.vocab_size, rank))
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


def match_names(
    stored: dict[str, StoredTensor], config: DFlash2Config
) -> Iterator[tuple[str, str]]:
    """Pairs of the name asked for and the name in the file, each of checked shape and dtype."""
    for name, shape in tensor_shapes(config).items():
        bare = name.removesuffix(".weight")
        found = bare if name in CODEBOOKS and name not in stored else name
        yield name, found
        if found not in stored:
            # The published name is the more helpful one to look for.
            raise CheckpointError(
                f"The drafter's model.safetensors has no tensor {found}: "
                "download the checkpoint again, or use the config.json that belongs to it."
            )
        if len(shape) == 2 and stored[found].dtype == "U32":
            yield from _match_quantized(stored, config, found, shape)
        else:
            _check_tensor(stored, found, FLOATS, shape)


def _match_quantized(
    stored: dict[str, StoredTensor], config: DFlash2Config, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, str]]:
    quantization = config.quantization
    rows, columns = shape
    if quantization is None or not name.endswith(".weight"):
        raise CheckpointError(
            f"The drafter's tensor {name} holds U32 codes, but nothing says how to read them: "
            "use the config.json with the quantization block it was converted with."
        )
    if columns % quantization.group_size:
        raise CheckpointError(
            f"The drafter's tensor {name} has {columns} columns, which groups of "
            f"{quantization.group_size} do not divide: convert it with a smaller group."
        )
    _check_tensor(stored, name, ("U32",), (rows, columns * quantization.bits // 32))
    for part in ("scales", "biases"):
        yield (at := part_name(name, part)), at
        if at not in stored:
            raise CheckpointError(
                f"The drafter's model.safetensors has no tensor {at} beside {name}: "
                "convert the checkpoint again."
            )
        _check_tensor(stored, at, FLOATS, (rows, columns // quantization.group_size))


def _check_tensor(
    stored: dict[str, StoredTensor], name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    found = stored[name]
    if found.shape != shape:
        raise CheckpointError(
            f"The drafter's tensor {name} has shape {list(found.shape)}, but its config.json asks "
            f"for {list(shape)}: use a config.json and weights of one checkpoint."
        )
    if found.dtype not in dtypes:
        raise CheckpointError(
            f"The drafter's tensor {name} has dtype {found.dtype}, but {' or '.join(dtypes)} is "
            "needed: use the published checkpoint or convert it again."
        )
