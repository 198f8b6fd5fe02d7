"""y = x @ W.T for the few rows of a decoding pass; W in affine codes, read once for all of them."""

from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from lse_mlx.errors import KernelError
from lse_mlx.kernels.choices import STOCK, dtype_name
from lse_mlx.kernels.registry import SMALL, DoesNotRun, Kernel, Registry
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
    "matrix": _Form(MATRIX, 32, (MAX_ROWS,)),
}


class _Launch(NamedTuple):
    kernel: Kernel
    rows: int  # of a threadgroup
    threads: int  # of the grid, along outputs
    split: mx.array
    template: dict[str, mx.Dtype | int]


class _Alike(NamedTuple):
    """What calls with so many rows of a dtype have in common; making it anew takes longer than the
    rest of a call does in Python."""

    fits: bool
    shape: str
    launches: dict[str, _Launch]  # by form


@dataclass(frozen=True, eq=False)
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
    _known: dict[tuple[int, mx.Dtype], _Alike] = field(default_factory=dict, init=False, repr=False)
    _exact: set[tuple[str, mx.Dtype]] = field(default_factory=set, init=False, repr=False)
    """Forms that have given an exact engine rows of a dtype: those rows must stay as they are."""

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., in] @ W.T, accumulated in fp32: bf16, fp16 or fp32, of x's dtype [..., out].

        Up to eight rows take the form that `registry.choices` names; more rows are stock MLX's.
        Where choices are exact, any number of rows takes one form, eight at a time, and a row's bits
        do not depend on the others. A form that this device refuses at its first use gives its place
        to the next; raises KernelError where none is left, or where it served before.
        """
        registry, rows = self.registry, x.size // x.shape[-1]
        alike = self._alike(min(rows, MAX_ROWS), x.dtype)
        if not (registry.on_device and alike.fits):
            registry.reference(NAME)
            return self._stock_of_any_size(x)
        if rows > MAX_ROWS and not registry.choices.exact:
            return self._stock(x)
        if registry.choices.exact and not registry.choices.forced:
            return self._in_one_form(alike, x, rows)
        chosen = registry.choices.form(NAME, alike.shape, own_forms(registry))
        if chosen == STOCK:
            return self._stock(x)
        launch = alike.launches[chosen]
        return registry.serve(
            launch.kernel.name,
            True,
            lambda: self._launch(launch, x, rows),
            lambda: self._stock(x),
        )

    @property
    def in_width(self) -> int:
        """Columns of W."""
        return self.scales.shape[1] * self.group_size

    @property
    def out_width(self) -> int:
        """Rows of W."""
        return self.weight.shape[0]

    def shape_name(self, rows: int, dtype: mx.Dtype) -> str:
        """What tells a call with so many rows of a dtype from others in `Choices`."""
        dtypes = f"{dtype_name(dtype)}/{dtype_name(self.scales.dtype)}"
        matrix = f"{self.in_width}x{self.out_width} {self.bits}-bit in {self.group_size}"
        return f"{rows}x{matrix}, {dtypes}"

    def has_form(self, dtype: mx.Dtype) -> bool:
        """Whether the kernels take x of this dtype, whatever the number of rows."""
        return (
            self.bits in BITS
            and self.group_size in GROUPS
            and dtype in _FLOATS
            and self.scales.dtype in _FLOATS
            and self.biases.dtype == self.scales.dtype
            and self.weight.size >= SMALL  # the kernels point into device memory
        )

    def _alike(self, rows: int, dtype: mx.Dtype) -> _Alike:
        known = self._known.get((rows, dtype))
        if known is None:
            fits = rows > 0 and self.has_form(dtype)
            names = own_forms(self.registry) if fits else ()
            launches = {name: self._prepared(_FORMS[name], rows, dtype) for name in names}
            known = _Alike(fits, self.shape_name(rows, dtype), launches)
            self._known[rows, dtype] = known
        return known

    def _prepared(self, form: _Form, rows: int, dtype: mx.Dtype) -> _Launch:
        row_count = next(count for count in form.row_counts if rows <= count)
        split = parts_of_k(self.out_width, form.tile)
        template: dict[str, mx.Dtype | int] = {"T": dtype, "S": self.scales.dtype}
        template |= {"BITS": self.bits, "GROUP": self.group_size}
        if len(form.row_counts) > 1:
            template["ROWS"] = row_count
        threads = _threadgroups(self.out_width, form.tile, split) * _THREADS
        return _Launch(form.kernel, row_count, threads, mx.array(split), template)

    def _in_one_form(self, alike: _Alike, x: mx.array, rows: int) -> mx.array:
        """By one of the project's forms, the same for all calls: stock MLX's rows have other bits."""
        registry = self.registry
        while own := self._left(alike, x.dtype):
            chosen = registry.choices.form(NAME, alike.shape, own)
            launch = alike.launches[chosen]
            try:
                y = self._launch(launch, x, rows)
            except DoesNotRun as error:
                if (chosen, x.dtype) in self._exact:
                    raise
                registry.refused[launch.kernel.name] = str(error)
                continue
            self._exact.add((chosen, x.dtype))
            return y
        names = " and ".join(launch.kernel.name for launch in alike.launches.values())
        raise KernelError(
            f"Of {names} none runs on this device for {alike.shape}, so exact decoding cannot be had: "
            "leave it out, and report what `lse-mlx selftest --json` prints."
        )

    def _left(self, alike: _Alike, dtype: mx.Dtype) -> list[str]:
        """The forms that this device has not refused, or not before they served."""
        refused = self.registry.refused
        return [
            form
            for form, launch in alike.launches.items()
            if launch.kernel.name not in refused or (form, dtype) in self._exact
        ]

    def _launch(self, launch: _Launch, x: mx.array, rows: int) -> mx.array:
        [y] = self.registry.launch(
            launch.kernel,
            inputs=[x.reshape(rows, -1), self.weight, self.scales, self.biases, launch.split],
            outputs=[((rows, self.out_width), x.dtype)],
            grid=(launch.threads, -(-rows // launch.rows), 1),
            threadgroup=(_THREADS, 1, 1),
            template=launch.template,
        )
        return y.reshape(*x.shape[:-1], self.out_width)

    def _stock(self, x: mx.array) -> mx.array:
        return skinny_qmm_reference(
            x, self.weight, self.scales, self.biases, self.bits, self.group_size
        )

    def _stock_of_any_size(self, x: mx.array) -> mx.array:
        return in_tiles(self._stock, x) if self.registry.choices.exact else self._stock(x)


def skinny_qmm(
    registry: Registry,
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    bits: int,
    group_size: int,
) -> mx.array:
    """One call of a `QuantizedProduct`, for a matrix that is not kept."""
    return QuantizedProduct(registry, weight, scales, biases, bits, group_size)(x)


def skinny_qmm_reference(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int
) -> mx.array:
    """`skinny_qmm` by stock MLX, for all bits and group sizes that MLX has."""
    y = mx.quantized_matmul(
        x, weight, scales, biases, transpose=True, group_size=group_size, bits=bits
    )
    return y.astype(x.dtype)  # MLX takes the wider dtype of x and scales


def own_forms(registry: Registry) -> tuple[str, ...]:
    """The project's forms on this device, the first preferred: CUDA has no simdgroup_matrix."""
    return ("simd",) if registry.form == "cuda" else ("simd", "matrix")


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
