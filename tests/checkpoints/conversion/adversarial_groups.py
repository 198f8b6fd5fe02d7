"""Groups of 64 bfloat16 values, as bits, that a quantizer may trip over."""

import random
import struct

INFINITY, MINUS_INFINITY, NAN, LARGEST = 0x7F80, 0xFF80, 0x7FC0, 0x7F7F
SIGN = 0x8000


def bfloat(value: float) -> int:
    """Bits of a number that bfloat16 holds exactly."""
    [bits] = struct.unpack("<I", struct.pack("<f", value))
    assert bits & 0xFFFF == 0, f"{value} is no bfloat16 number"
    return bits >> 16


def with_sign(generator: random.Random, magnitude: int) -> int:
    return magnitude | generator.choice((0, SIGN))


def adversarial_groups(seed: int = 0) -> list[list[int]]:
    """Fixed and seeded groups: zeros, constants, subnormals, outliers, huge ranges, NaN, infinities."""
    g = random.Random(seed)
    groups = [
        [0] * 64,
        [SIGN] * 64,
        [g.choice((0, SIGN)) for _ in range(64)],
        [bfloat(3.0)] + [0] * 63,
        [bfloat(-3.0)] + [SIGN] * 63,
        [bfloat(float(i)) for i in range(64)],
        [bfloat(float(-i)) for i in range(64)],
        [bfloat(float(i - 32)) for i in range(64)],
        [bfloat(1.0), bfloat(-1.0)] * 32,  # |lo| = |hi|
        [LARGEST, LARGEST | SIGN] * 32,
        [LARGEST] * 64,
        [LARGEST] * 63 + [LARGEST - 1],
        [LARGEST | SIGN] * 63 + [0],
        [1] * 64,
        [1, 1 | SIGN] * 32,
        [0x7F] * 32 + [SIGN | 0x80] * 32,
    ]
    for constant in (1.5, -2.25, 255.0, 1e30, -(2.0**-126)):
        [bits] = struct.unpack("<I", struct.pack("<f", constant))
        groups.append([bits >> 16] * 64)
    for special in (NAN, NAN | SIGN, 0x7F81, 0xFFFF, INFINITY, MINUS_INFINITY):
        groups.append([special] * 64)
        for _ in range(2):
            group = [with_sign(g, g.randrange(0x3000, 0x4100)) for _ in range(64)]
            group[g.randrange(64)] = special
            groups.append(group)
    groups.append([INFINITY, MINUS_INFINITY] + [0] * 62)
    groups.append([INFINITY, NAN] + [0] * 62)
    for _ in range(12):
        middle = g.randrange(0x2000, 0x7000)
        narrow = [with_sign(g, g.randrange(middle, middle + 0x180)) for _ in range(64)]
        groups.append(narrow)
        groups.append([v & ~SIGN for v in narrow])
        groups.append([v | SIGN for v in narrow])
        outlier = list(narrow)
        outlier[g.randrange(64)] = with_sign(g, min(middle + g.randrange(0x1800), LARGEST))
        groups.append(outlier)
        groups.append([with_sign(g, g.randrange(INFINITY)) for _ in range(64)])  # any finite number
        groups.append([with_sign(g, g.randrange(0x80)) for _ in range(64)])  # subnormals
        groups.append([with_sign(g, g.randrange(0x3300, 0x33E0)) for _ in range(64)])  # near 1e-7
        groups.append([g.randrange(0x10000) for _ in range(64)])  # any bits at all
        a, b = g.randrange(INFINITY), g.randrange(INFINITY)
        groups.append([g.choice((a, b | SIGN)) for _ in range(64)])
        base = g.randrange(0x3F80, 0x4700)
        groups.append([base + g.randrange(2) for _ in range(64)])  # one step apart
    return groups
