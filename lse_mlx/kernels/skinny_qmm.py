"""y = x @ W.T for the few rows of a decoding pass; W in affine codes, read once for all of them."""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from lse_mlx.kernels.choices import STOCK
from lse_mlx.kernels.registry import Kernel, Registry
from lse_mlx.kernels.row_tiles import TILE, in_tiles

NAME = "skinny_qmm"
MAX_ROWS = TILE
"""More rows are stock MLX's, which has matrix products for them; or they go in tiles of so many."""

BITS = (4, 8)
GROUPS = (32, 64, 128)
_FLOATS = (mx.float32, mx.bfloat16, mx.float16)

_INPUTS = ("x", "weight", "scales", "biases", "split")
SIMD = Kernel(NAME, _INPUTS, ("out",))
MATRIX = Kernel("skinny_qmm_matrix", _INPUTS, ("out",))

_THREADS = 256
_SIMD_GROUPS = _THREADS // 32
_BUSY = 256
"""Threadgroups that keep the memory of the largest chips busy: fewer outputs split K further."""


class _Form(NamedTuple):
    kernel: Kernel
    tile: int  # outputs of a SIMD group
    row_counts: tuple[int, ...]  # compiled apart, with the same bits


_FORMS = {
    "simd": _Form(SIMD, 16, (1, 2, 4, 8)),
    "matrix": _Form(MATRIX, 32, ()),
}


@dataclass(frozen=True)
class QuantizedProduct:
    """x @ W.T of one W in affine codes: a weight is scale * code + bias.

    weight: uint32 [out, in * bits / 32], the first code in the lowest bits
    scales, biases: bf16, fp16 or fp32 [out, in / group_size]
    """

    registry: Registry
    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    def __call__(self, x: mx.array) -> mx.array:
        return skinny_qmm(
            self.registry, x, self.weight, self.scales, self.biases, self.bits, self.group_size
        )

    @property
    def in_width(self) -> int:
        """Columns of W."""
        return self.scales.shape[1] * self.group_size

    @property
    def out_width(self) -> int:
        """Rows of W."""
        return self.weight.shape[0]


def skinny_qmm(
    registry: Registry,
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    bits: int,
    group_size: int,
) -> mx.array:
    """x @ W.T, accumulated in fp32.

    x: bf16, fp16 or fp32 [..., in]. The matrix as in `QuantizedProduct`. Returns x's dtype
    [..., out].

    Up to eight rows take the form that `registry.choices` names; more rows are stock MLX's. Where
    choices are exact, any number of rows takes one form, eight at a time, and a row's bits do not
    depend on the others.
    """
    if not (registry.on_device and has_form(x, scales, biases, bits, group_size)):
        registry.reference(NAME)
        return _stock_of_any_size(registry, x, weight, scales, biases, bits, group_size)
    rows, out_width = x.size // x.shape[-1], weight.shape[0]
    if rows > MAX_ROWS and not registry.choices.exact:
        return skinny_qmm_reference(x, weight, scales, biases, bits, group_size)
    shape = shape_name(rows, x.shape[-1], out_width, bits)
    chosen = registry.choices.form(NAME, shape, own_forms(registry))
    if chosen == STOCK:
        return skinny_qmm_reference(x, weight, scales, biases, bits, group_size)
    form = _FORMS[chosen]
    row_count = next((count for count in form.row_counts if rows <= count), MAX_ROWS)
    split = parts_of_k(out_width, form.tile)
    template = {"T": x.dtype, "S": scales.dtype, "BITS": bits, "GROUP": group_size}
    if form.row_counts:
        template["ROWS"] = row_count
    [y] = registry.launch(
        form.kernel,
        inputs=[x.reshape(rows, -1), weight, scales, biases, split],
        outputs=[((rows, out_width), x.dtype)],
        grid=(_threadgroups(out_width, form.tile, split) * _THREADS, -(-rows // row_count), 1),
        threadgroup=(_THREADS, 1, 1),
        template=template,
    )
    return y.reshape(*x.shape[:-1], out_width)


def skinny_qmm_reference(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int
) -> mx.array:
    """`skinny_qmm` by stock MLX, for all bits and group sizes that MLX has."""
    y = mx.quantized_matmul(
        x, weight, scales, biases, transpose=True, group_size=group_size, bits=bits
    )
    return y.astype(x.dtype)  # MLX takes the wider dtype of x and scales


def has_form(x: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int) -> bool:
    """Whether the kernels take this product, whatever the number of rows."""
    return (
        bits in BITS
        and group_size in GROUPS
        and x.dtype in _FLOATS
        and scales.dtype in _FLOATS
        and biases.dtype == scales.dtype
        and x.size > 0
    )


def own_forms(registry: Registry) -> tuple[str, ...]:
    """The project's forms on this device, the first preferred: CUDA has no simdgroup_matrix."""
    return ("simd",) if registry.form == "cuda" else ("simd", "matrix")


def shape_name(rows: int, in_width: int, out_width: int, bits: int) -> str:
    """What tells a product from others in `Choices`."""
    return f"{rows}x{in_width}x{out_width} {bits}-bit"


def parts_of_k(out_width: int, tile: int) -> int:
    """Into how many parts a threadgroup's SIMD groups cut K: 1, 2, 4 or 8.

    tile: outputs of a SIMD group. A function of the matrix alone: a row's bits depend on it.
    """
    for split in (1, 2, 4):
        if _threadgroups(out_width, tile, split) >= _BUSY:
            return split
    return _SIMD_GROUPS


def _threadgroups(out_width: int, tile: int, split: int) -> int:
    return -(-out_width // (tile * _SIMD_GROUPS // split))


def _stock_of_any_size(
    registry: Registry,
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    bits: int,
    group_size: int,
) -> mx.array:
    def product(rows: mx.array) -> mx.array:
        return skinny_qmm_reference(rows, weight, scales, biases, bits, group_size)

    return in_tiles(product, x) if registry.choices.exact else product(x)
