"""Affine quantization of bfloat16 values in groups of 64: the arithmetic, bit for bit.

Needs NumPy and the standard library only. A value is stored as a code, its group as a scale S and a
bias B in bfloat16; code * S + B is what the code stands for. All arithmetic is float32 with one
rounding an operation: every operation is a NumPy call of its own, so none is fused with another.

What is computed for a group, with R(x) = copysign(floor(|x| + 0.5), x) and L the largest code:
    lo, hi = least and greatest value; negative = |lo| > |hi|
    s = max((hi - lo) / L, 1e-7), negated unless negative; edge = lo if negative, else hi
    q = R(edge / s); if q is not 0: s = edge / q, b = edge; else: b = 0
    S = bfloat16(s), B = bfloat16(b), inverse = 1 / S, or 0 if S is 0
    code = R((value - B) * inverse), held to 0..L
A group with a NaN or an infinity gets code 0 throughout and the scale NaN; its bias is NaN with a
NaN in it, else the infinity that is its edge. These NaNs are always written as 0x7FC0.
"""

import numpy as np
from numpy.typing import NDArray

from lse_mlx.checkpoints.names import GROUP_SIZE

BITS = (8, 4)
NAN = 0x7FC0
LEAST_SCALE = np.float32(1e-7)
HALF, ZERO = np.float32(0.5), np.float32(0)

Bits16 = NDArray[np.uint16]
Floats = NDArray[np.float32]


def code_bytes(values: int, bits: int) -> int:
    """Bytes that the codes of `values` values take."""
    return values * bits // 8


class GroupQuantizer:
    """Quantizes values a few thousand groups at a time, in buffers that are made once.

    The result depends on neither how many groups that is nor how calls divide the values. An
    instance belongs to one thread at a time; several run side by side, as NumPy lets go of the
    interpreter while it computes.
    """

    def __init__(self, bits: int = 8, groups: int = 2048):
        """bits: 8 or 4 a code; groups: worked on at once (2,048 of them stay within 2 MiB)."""
        if bits not in BITS:
            raise ValueError(f"codes of {bits!r} bits are not implemented, only of 8 or 4")
        if groups < 1:
            raise ValueError(f"{groups!r} groups at once are not possible, one is the least")
        self.bits = bits
        self._levels = np.float32(2**bits - 1)
        self._groups = groups
        # One block of float32 serves, one after the other, as keys, widened values and products.
        self._work = np.empty((groups, GROUP_SIZE), np.float32)
        self._codes = np.empty((groups, GROUP_SIZE), np.uint8)
        self._least = np.empty(groups, np.int16)
        self._greatest = np.empty(groups, np.int16)

    def quantize(
        self, values: Bits16, codes: NDArray[np.uint8], scales: Bits16, biases: Bits16
    ) -> None:
        """Quantize `values` into `codes`, `scales` and `biases`.

        values: bits of bfloat16, [64 n]; codes: bytes, [64 n] at 8 bits and [32 n] at 4, where the
        first of two codes is the low half; scales, biases: bits of bfloat16, [n]. All contiguous.
        Raises ValueError where the sizes do not fit each other.
        """
        count = scales.size
        if (values.size, codes.size, biases.size) != (
            count * GROUP_SIZE,
            code_bytes(count * GROUP_SIZE, self.bits),
            count,
        ):
            raise ValueError("values, codes, scales and biases are not of the same groups")
        values = values.reshape(count, GROUP_SIZE)
        codes = codes.reshape(count, -1)
        for start in range(0, count, self._groups):
            part = slice(start, start + self._groups)
            with np.errstate(all="ignore"):  # groups that overflow or hold NaN are defined above
                numbers = self._numbers(values[part], scales[part], biases[part])
            self._store(numbers, codes[part])

    def _numbers(self, values: Bits16, scales: Bits16, biases: Bits16) -> Floats:
        """Fill in scales and biases; the codes, of which a fraction is still to be dropped."""
        lo, hi = self._bounds(values)
        scale, bias = _line(lo, hi, self._levels)
        scales[:] = _rounded(scale)
        biases[:] = _rounded(bias)
        # Codes are chosen against what is stored, not against what was computed.
        scale, bias = _widened(scales), _widened(biases)
        inverse = np.where(scale != 0, 1 / scale, ZERO)
        work = self._work[: len(values)]
        np.left_shift(values, 16, out=work.view(np.uint32), dtype=np.uint32)
        np.subtract(work, bias[:, None], out=work)
        np.multiply(work, inverse[:, None], out=work)
        # R(x) held to 0..L is the whole part of x + 0.5 held to 0..L: for x >= 0 both round x + 0.5
        # once and drop its fraction, and a whole bound may be applied before that or after; for
        # x < 0, R(x) <= 0, and x + 0.5 rounds to at most 0.5, of which nothing is left.
        np.add(work, HALF, out=work)
        np.clip(work, ZERO, self._levels, out=work)
        unbounded = np.isnan(scale)
        if unbounded.any():  # what a NaN is as an integer depends on the processor
            work[unbounded] = 0
        return work

    def _bounds(self, values: Bits16) -> tuple[Floats, Floats]:
        """The least and the greatest value of each group; NaN for both if one is NaN.

        Bits of bfloat16 are a sign and a magnitude. As two's complement integers they have the order
        of the numbers, with NaNs beyond the infinities and -0 below +0 (which nothing here tells
        apart), and 16-bit integers are compared much faster than floats.
        """
        count = len(values)
        signed = values.view(np.int16)
        # They fill the front half of the block before it is filled with floats.
        keys = self._work.view(np.int16).reshape(2, -1)[0, : values.size].reshape(values.shape)
        _flip_negative(signed, keys)
        least, greatest = self._least[:count], self._greatest[:count]
        np.minimum.reduce(keys, axis=1, out=least)
        np.maximum.reduce(keys, axis=1, out=greatest)
        lo, hi = (_widened(_flip_negative(k, k).view(np.uint16)) for k in (least, greatest))
        unordered = np.isnan(lo) | np.isnan(hi)
        lo[unordered] = hi[unordered] = np.nan
        return lo, hi

    def _store(self, numbers: Floats, codes: NDArray[np.uint8]) -> None:
        # NumPy warns of a NaN here, should one ever come this far.
        if self.bits == 8:
            np.copyto(codes, numbers, casting="unsafe")  # in 0..L: drops the fraction
            return
        whole = self._codes[: len(numbers)]
        np.copyto(whole, numbers, casting="unsafe")
        np.left_shift(whole[:, 1::2], 4, out=codes)
        np.bitwise_or(codes, whole[:, ::2], out=codes)


def _flip_negative(signed: NDArray[np.int16], out: NDArray[np.int16]) -> NDArray[np.int16]:
    """Sign and magnitude to two's complement order, or back: it is its own inverse."""
    flips = np.right_shift(signed, 15, out=None if out is signed else out)
    np.bitwise_and(flips, 0x7FFF, out=flips)
    return np.bitwise_xor(signed, flips, out=out)


def _line(lo: Floats, hi: Floats, levels: np.float32) -> tuple[Floats, Floats]:
    """Scale and bias of each group, not rounded yet."""
    negative = np.abs(lo) > np.abs(hi)
    scale = np.maximum((hi - lo) / levels, LEAST_SCALE)
    scale = np.where(negative, scale, -scale)
    edge = np.where(negative, lo, hi)
    steps = edge / scale
    steps = np.copysign(np.floor(np.abs(steps) + HALF), steps)
    reached = steps != 0
    return np.where(reached, edge / steps, scale), np.where(reached, edge, ZERO)


def _rounded(values: Floats) -> Bits16:
    """Bits of the nearest bfloat16, the even one of two; NaN as 0x7FC0."""
    bits = values.view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), NAN, bits).astype(np.uint16)


def _widened(bits: Bits16) -> Floats:
    """The same numbers as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
