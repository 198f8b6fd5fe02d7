"""The drafter's model.safetensors: every tensor present, of its exact shape, and no other."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from lse_mlx.drafters.dflash2.config import CONV_TAPS, DFlash2Config, Quantization
from lse_mlx.errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")
SIDES = 2  # a convolution before the sublayer, and one after it

# Published without `.weight`; a converter that quantizes them adds it.
CODEBOOKS = (
    "candidate_selector.predecessor_codebook.weight",
    "candidate_selector.successor_codebook.weight",
)


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns] as stored: floats, or affine codes.

    weight: bf16, fp16 or fp32 [rows, columns]; or uint32 [rows, columns * bits / 32].
    scales, biases: fp32 [rows, columns / group_size] of affine codes, else None.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    quantization: Quantization | None = None

    def dense(self) -> mx.array:
        """The matrix as fp32 [rows, columns], each code multiplied out in fp32."""
        if self.quantization is None:
            return self.weight.astype(mx.float32)
        assert self.scales is not None
        return mx.dequantize(
            self.weight,
            self.scales,
            self.biases,
            group_size=self.quantization.group_size,
            bits=self.quantization.bits,
        )

    def rows(self, ids: mx.array) -> mx.array:
        """Rows `ids` (int32, any shape) as fp32 [*ids.shape, columns]; no other row is decoded."""
        if self.quantization is None:
            return self.weight[ids].astype(mx.float32)
        assert self.scales is not None
        assert self.biases is not None
        picked = Matrix(self.weight[ids], self.scales[ids], self.biases[ids], self.quantization)
        return picked.dense()


@dataclass(frozen=True)
class DFlash2Weights:
    """All tensors of a drafter by their names: matrices as stored, everything else as fp32."""

    matrices: dict[str, Matrix]
    vectors: dict[str, mx.array]

    @classmethod
    def read(cls, folder: Path, config: DFlash2Config) -> "DFlash2Weights":
        """Read `folder`/model.safetensors.

        Raises CheckpointError if the file is missing or damaged, or if a tensor is missing, has
        another shape or dtype than `config` asks for, or is not part of a DFlash2 drafter.
        """
        path = folder / "model.safetensors"
        stored = _read_header(path)
        names = dict(_match_names(stored, config))
        if unclaimed := sorted(set(stored) - set(names.values())):
            raise CheckpointError(
                f"{path} holds {len(unclaimed)} tensors that are no part of a DFlash2 drafter "
                f"({', '.join(unclaimed[:3])}): pass the published checkpoint."
            )
        tensors = _read_tensors(path)
        matrices: dict[str, Matrix] = {}
        vectors: dict[str, mx.array] = {}
        for name, shape in tensor_shapes(config).items():
            tensor = tensors[names[name]]
            if len(shape) != 2:
                vectors[name] = tensor.astype(mx.float32)
            elif tensor.dtype == mx.uint32:
                matrices[name] = Matrix(
                    tensor,
                    tensors[_part(name, "scales")].astype(mx.float32),
                    tensors[_part(name, "biases")].astype(mx.float32),
                    config.quantization,
                )
            else:
                matrices[name] = Matrix(tensor)
        # Read now: a first draft should not wait for the disk, nor find the file gone.
        stored_parts = [part for m in matrices.values() for part in (m.weight, m.scales, m.biases)]
        mx.eval(*vectors.values(), *(part for part in stored_parts if part is not None))
        return cls(matrices, vectors)


@dataclass(frozen=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]


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


def _part(name: str, part: str) -> str:
    """The name of a quantized matrix's scales or biases."""
    return name.removesuffix("weight") + part


def _match_names(stored: dict[str, _Stored], config: DFlash2Config) -> Iterator[tuple[str, str]]:
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
    stored: dict[str, _Stored], config: DFlash2Config, name: str, shape: tuple[int, ...]
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
        yield (at := _part(name, part)), at
        if at not in stored:
            raise CheckpointError(
                f"The drafter's model.safetensors has no tensor {at} beside {name}: "
                "convert the checkpoint again."
            )
        _check_tensor(stored, at, FLOATS, (rows, columns // quantization.group_size))


def _check_tensor(
    stored: dict[str, _Stored], name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]
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


def _read_header(path: Path) -> dict[str, _Stored]:
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: _Stored(s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): pass the folder of a DFlash2 checkpoint."
        ) from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): download the checkpoint again."
        ) from error


def _read_tensors(path: Path) -> dict[str, mx.array]:
    try:
        tensors = mx.load(str(path))
        assert isinstance(tensors, dict)
        mx.eval(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} cannot be loaded ({error}): download the checkpoint again."
        ) from error
    return tensors
