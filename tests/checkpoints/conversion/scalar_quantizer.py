"""The conversion once more: one value at a time, in Python floats, from the written rule alone.

A Python float is a double. One +, -, * or / of two float32 numbers in double, rounded to float32,
is what float32 arithmetic gives, since a double has more than twice its digits.
"""

import json
import math
import struct

NAN = 0x7FC0
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name to dtype, shape and little-endian content."""


def single(value: float) -> float:
    """The nearest float32."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


LEAST_SCALE = single(1e-7)


def widen(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def narrow(value: float) -> int:
    """Bits of the nearest bfloat16; all NaNs are one."""
    if math.isnan(value):
        return NAN
    [bits] = struct.unpack("<I", struct.pack("<f", value))
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFFFFFF) >> 16


def half_away(x: float) -> float:
    """Round half away from zero in float32."""
    if math.isnan(x) or math.isinf(x):
        return x
    return math.copysign(float(math.floor(single(abs(x) + 0.5))), x)


def clamp(x: float, levels: int) -> int:
    if math.isnan(x):
        return 0
    return int(min(max(x, 0.0), float(levels)))


def quantize_group(group: list[int], bits: int = 8) -> tuple[list[int], int, int]:
    """Codes, scale and bias of 64 bfloat16 values; all but the codes are bits of bfloat16."""
    levels = 2**bits - 1
    values = [widen(v) for v in group]
    if any(math.isnan(v) for v in values):
        lo = hi = math.nan
    else:
        lo, hi = min(values), max(values)
    negative = abs(lo) > abs(hi)
    s = single(single(hi - lo) / levels)
    if s < LEAST_SCALE:
        s = LEAST_SCALE
    if not negative:
        s = -s
    edge = lo if negative else hi
    q0 = half_away(single(edge / s))
    if q0 != 0:
        s, b = single(edge / q0), edge
    else:
        b = 0.0
    scale, bias = narrow(s), narrow(b)
    s, b = widen(scale), widen(bias)
    inverse = single(1 / s) if s != 0 else 0.0
    codes = [clamp(half_away(single(single(v - b) * inverse)), levels) for v in values]
    return codes, scale, bias


def pack(codes: list[int], bits: int) -> bytes:
    """Codes in words of 32 bits, the first in the lowest bits."""
    a_word = 32 // bits
    words = (
        sum(code << (bits * place) for place, code in enumerate(codes[at : at + a_word]))
        for at in range(0, len(codes), a_word)
    )
    return b"".join(word.to_bytes(4, "little") for word in words)


def quantize(values: list[int], bits: int = 8) -> tuple[bytes, list[int], list[int]]:
    """Packed codes, scales and biases of whole groups."""
    groups = [quantize_group(values[i : i + 64], bits) for i in range(0, len(values), 64)]
    codes = [code for group in groups for code in group[0]]
    return pack(codes, bits), [group[1] for group in groups], [group[2] for group in groups]


def shorts(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


def converted_tensors(source: Tensors, bits: int = 8) -> Tensors:
    """What the tensors of a source become."""
    renamed = {}
    for name, tensor in source.items():
        renamed[f"{name}.weight" if name in CODEBOOKS else name] = tensor
    output: Tensors = {}
    for name, (dtype, shape, content) in renamed.items():
        if len(shape) != 2 or not name.endswith(".weight"):
            output[name] = dtype, shape, content
            continue
        rows, columns = shape
        codes, scales, biases = quantize(list(struct.unpack(f"<{rows * columns}H", content)), bits)
        base = name[: -len(".weight")]
        output[f"{base}.weight"] = "U32", (rows, columns * bits // 32), codes
        output[f"{base}.scales"] = "BF16", (rows, columns // 64), shorts(scales)
        output[f"{base}.biases"] = "BF16", (rows, columns // 64), shorts(biases)
    return output


def safetensors_file(tensors: Tensors) -> bytes:
    """A whole file, tensors in their order, the header without spaces and padded to 8."""
    entries, place = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        end = place + len(content)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    header = json.dumps(entries).replace(", ", ",").replace(": ", ":").encode()
    while len(header) % 8:
        header += b" "
    return struct.pack("<Q", len(header)) + header + b"".join(c for _, _, c in tensors.values())
