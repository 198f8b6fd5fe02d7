"""The drafter's model.safetensors: every tensor present, of its exact shape, and no other."""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from lse_mlx.checkpoints.checks import clauses
from lse_mlx.checkpoints.drafter_config import DFlash2Config, Quantization
from lse_mlx.checkpoints.drafter_tensors import compare_tensors, part_name, tensor_shapes
from lse_mlx.checkpoints.names import WEIGHTS
from lse_mlx.checkpoints.safetensors_header import read_header
from lse_mlx.errors import CheckpointError


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
        another shape or dtype than `config` asks for, or is not part of a DFlash2 drafter; no tensor
        is read then.
        """
        path = folder / WEIGHTS
        stored = read_header(path).tensors
        table = compare_tensors(stored, config)
        if not table.fits:
            raise CheckpointError(
                f"{path} does not hold the tensors of its config.json ({clauses(table.checks)}): "
                "use the config.json and the weights of one checkpoint."
            )
        tensors = _read_tensors(path)
        matrices: dict[str, Matrix] = {}
        vectors: dict[str, mx.array] = {}
        for name, shape in tensor_shapes(config).items():
            tensor = tensors[table.names[name]]
            if len(shape) != 2:
                vectors[name] = tensor.astype(mx.float32)
            elif tensor.dtype == mx.uint32:
                matrices[name] = Matrix(
                    tensor,
                    tensors[part_name(name, "scales")].astype(mx.float32),
                    tensors[part_name(name, "biases")].astype(mx.float32),
                    config.quantization,
                )
            else:
                matrices[name] = Matrix(tensor)
        # Read now: a first draft should not wait for the disk, nor find the file gone.
        stored_parts = [part for m in matrices.values() for part in (m.weight, m.scales, m.biases)]
        mx.eval(*vectors.values(), *(part for part in stored_parts if part is not None))
        return cls(matrices, vectors)


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
