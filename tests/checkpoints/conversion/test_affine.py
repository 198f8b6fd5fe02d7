"""The arithmetic against the rule as it is written, and against its own table of edge cases."""

import math
import random
import struct
from itertools import pairwise

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings

from lse_mlx.checkpoints.conversion.affine import GroupQuantizer
from tests.checkpoints.conversion.adversarial_groups import (
    INFINITY,
    LARGEST,
    MINUS_INFINITY,
    NAN,
    SIGN,
    adversarial_groups,
    bfloat,
)
from tests.checkpoints.conversion.scalar_quantizer import half_away, quantize, quantize_group, widen


def run(values: list[int], bits: int = 8, groups: int = 2048) -> tuple[bytes, list[int], list[int]]:
    """Codes, scales and biases by the code under test."""
    count = len(values) // 64
    codes = np.full(len(values) * bits // 8, 0xAA, np.uint8)
    scales, biases = np.full(count, 0xAAAA, np.uint16), np.full(count, 0xAAAA, np.uint16)
    GroupQuantizer(bits, groups).quantize(np.array(values, np.uint16), codes, scales, biases)
    return codes.tobytes(), scales.tolist(), biases.tolist()


def flat(groups: list[list[int]]) -> list[int]:
    return [value for group in groups for value in group]


# The table of the rule: group, scale, bias, codes.
TABLE = {
    "zeros": ([0] * 64, 0xB3D7, 0, [0] * 64),
    "minus zeros": ([SIGN] * 64, 0xB3D7, 0, [0] * 64),
    "zeros of both signs": ([0, SIGN] * 32, 0xB3D7, 0, [0] * 64),
    "constant 1.5": ([bfloat(1.5)] * 64, 0xB3D7, 0x3FC0, [0] * 64),
    "constant -2.25": ([bfloat(-2.25)] * 64, 0xB3D7, 0xC010, [0] * 64),
    "one 3.0": ([0] * 9 + [bfloat(3.0)] + [0] * 54, 0xBC41, 0x4040, [255] * 9 + [0] + [255] * 54),
    "smallest subnormal": ([1] * 64, 0xB3D7, 0, [0] * 64),
}


@pytest.mark.parametrize("case", TABLE)
def test_table(case: str) -> None:
    group, scale, bias, codes = TABLE[case]
    assert run(group) == (bytes(codes), [scale], [bias])


def test_table_integers() -> None:
    codes, scales, biases = run([bfloat(float(i)) for i in range(64)])
    assert (scales, biases) == ([0xBE7D], [0x427C])
    assert list(codes[:4]) == [255, 251, 247, 243] and codes[63] == 0


def test_table_range_that_overflows() -> None:
    codes, [scale], [bias] = run([LARGEST, LARGEST | SIGN, 0, bfloat(1.0)] * 16)
    assert codes == bytes(64)
    assert scale & ~SIGN == INFINITY and bias == 0


@pytest.mark.parametrize(
    ("special", "bias"),
    [
        pytest.param(NAN, NAN, id="NaN"),
        pytest.param(NAN | SIGN, NAN, id="NaN with a sign"),
        pytest.param(0x7F81, NAN, id="signalling NaN"),
        pytest.param(INFINITY, INFINITY, id="infinity"),
        pytest.param(MINUS_INFINITY, MINUS_INFINITY, id="minus infinity"),
    ],
)
@pytest.mark.parametrize("bits", [8, 4])
def test_table_not_finite(special: int, bias: int, bits: int) -> None:
    group = [bfloat(float(i - 20)) for i in range(64)]
    calm = run(group, bits)
    group[17] = special
    # A calm neighbour on each side is not touched.
    around = [bfloat(float(i - 20)) for i in range(64)]
    codes, scales, biases = run(around + group + around, bits)
    each = 8 * bits
    assert codes[each : 2 * each] == bytes(each)
    assert (scales[1], biases[1]) == (NAN, bias)
    assert codes[:each] == codes[2 * each :] == calm[0]
    assert [scales[0], scales[2]] == calm[1] * 2 and [biases[0], biases[2]] == calm[2] * 2


@pytest.mark.parametrize("bits", [8, 4])
def test_adversarial_groups(bits: int) -> None:
    values = flat(adversarial_groups())
    assert run(values, bits) == quantize(values, bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_like_those_of_a_model(bits: int) -> None:
    spread = np.random.default_rng(bits).normal(0, 0.02, (400, 64)).astype(np.float32)
    values = (spread.view(np.uint32) >> 16).ravel().tolist()
    assert run(values, bits) == quantize(values, bits)


def test_constants_of_every_magnitude() -> None:
    for constant in range(0, 0x10000, 251):
        codes, scale, bias = quantize_group([constant] * 64)
        assert run([constant] * 64) == (bytes(codes), [scale], [bias]), hex(constant)


ANY = st.integers(0, 0xFFFF)
FINITE = ANY.map(lambda bits: bits if bits & 0x7F80 != 0x7F80 else bits & 0x807F)


def near(middle: int) -> st.SearchStrategy[int]:
    """Values of like magnitude, of both signs."""
    low, high = max(0, middle - 0x100), min(0x7F7F, middle + 0x100)
    return st.builds(lambda m, s: m | s, st.integers(low, high), st.sampled_from((0, SIGN)))


GROUPS = st.one_of(
    st.lists(ANY, min_size=64, max_size=64),
    st.lists(FINITE, min_size=64, max_size=64),
    st.integers(0, 0x7F7F).flatmap(lambda m: st.lists(near(m), min_size=64, max_size=64)),
    st.lists(FINITE, min_size=1, max_size=3).flatmap(
        lambda few: st.lists(st.sampled_from(few), min_size=64, max_size=64)
    ),
)


@settings(max_examples=150)
@given(group=GROUPS, bits=st.sampled_from((8, 4)))
@example(group=[LARGEST] + [LARGEST | SIGN] * 63, bits=8)
def test_any_group(group: list[int], bits: int) -> None:
    assert run(group, bits) == quantize(group, bits)


def test_holding_then_cutting_is_rounding_then_holding() -> None:
    """The shortcut that the quantizer takes, where it could go wrong: around every half."""
    halves = [k + 0.5 for k in range(-3, 260)] + [0.0, -0.0, 2.0**23, 2.0**24 - 1, 3e38, -3e38]
    points = np.array(halves, np.float32)
    around = [np.nextafter(points, np.float32(end)) for end in (-np.inf, np.inf)]
    ends = np.array([np.inf, -np.inf, 1e-45, -1e-45], np.float32)
    points = np.concatenate([points, *around, ends])
    for levels in (255, 15):
        short = np.clip(points + np.float32(0.5), np.float32(0), np.float32(levels)).astype(int)
        long = [min(max(half_away(x), 0.0), levels) for x in points.tolist()]
        assert short.tolist() == long


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("groups", [1, 3, 7, 100, 5000])
def test_the_size_of_the_blocks_changes_nothing(bits: int, groups: int) -> None:
    values = flat(adversarial_groups(seed=1))
    assert run(values, bits, groups) == run(values, bits)


def test_an_instance_keeps_nothing_from_call_to_call() -> None:
    quantizer = GroupQuantizer(groups=8)
    values = np.array(flat(adversarial_groups(seed=2)), np.uint16)
    expected = run(values.tolist())
    for order in (1, -1):
        codes = np.empty(values.size, np.uint8)
        scales, biases = (np.empty(values.size // 64, np.uint16) for _ in range(2))
        cuts = [0, 3 * 64, 4 * 64, 50 * 64, values.size]
        for start, stop in list(pairwise(cuts))[::order]:
            part, few = slice(start, stop), slice(start // 64, stop // 64)
            quantizer.quantize(values[part], codes[part], scales[few], biases[few])
        assert (codes.tobytes(), scales.tolist(), biases.tolist()) == expected


@pytest.mark.parametrize("bits", [8, 4])
def test_mlx_reads_codes_as_code_times_scale_plus_bias(bits: int) -> None:
    values = [v for group in adversarial_groups(seed=3) for v in group]
    groups = [values[i : i + 64] for i in range(0, len(values), 64)]
    finite = [g for g in groups if all(v & 0x7F80 != 0x7F80 for v in g)]
    codes, scales, biases = run(flat(finite), bits)
    # Expected: each code, unpacked by hand, in the arithmetic of the scalar rule.
    expected = []
    for at, group in enumerate(finite):
        s, b = widen(scales[at]), widen(biases[at])
        if math.isinf(s):
            continue
        for code in quantize_group(group, bits)[0]:
            # A code has at most 8 bits and a scale 8: their product is exact in float32.
            total = np.float32(code * s) + np.float32(b)
            expected.append(struct.pack("<f", total))
    keep = [at for at, scale in enumerate(scales) if not math.isinf(widen(scale))]
    each = 8 * bits
    words = np.frombuffer(b"".join(codes[at * each : at * each + each] for at in keep), np.uint32)
    stored = [
        mx.array(np.array([some[at] for at in keep], np.uint16)[:, None]).view(mx.bfloat16)
        for some in (scales, biases)
    ]
    read = mx.dequantize(
        mx.array(words.reshape(len(keep), -1)),
        *(part.astype(mx.float32) for part in stored),
        group_size=64,
        bits=bits,
    )
    assert np.array(read).tobytes() == b"".join(expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_value_comes_back_within_a_step(bits: int) -> None:
    g, levels = random.Random(5), 2**bits - 1
    for _ in range(50):
        group = [g.randrange(0x3C00, 0x3F00) | g.choice((0, SIGN)) for _ in range(64)]
        codes, [scale], [bias] = run(group, bits)
        unpacked = list(codes) if bits == 8 else [c >> s & 15 for c in codes for s in (0, 4)]
        span = max(map(widen, group)) - min(map(widen, group))
        for value, code in zip(map(widen, group), unpacked, strict=True):
            back = code * widen(scale) + widen(bias)
            # Half a step; and the far end moves as the edge is put on a whole step, which is at
            # least the middle one, and as the scale is rounded to 8 bits.
            moved = 0.5 / (levels / 2) + 2**-9
            assert abs(back - value) <= span * (0.5 / levels * (1 + moved) + moved)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bits"):
        GroupQuantizer(bits=5)
    with pytest.raises(ValueError, match="0 groups"):
        GroupQuantizer(groups=0)
    one = np.zeros(1, np.uint16)
    with pytest.raises(ValueError, match="not of the same groups"):
        GroupQuantizer().quantize(np.zeros(63, np.uint16), np.zeros(64, np.uint8), one, one)
    with pytest.raises(ValueError, match="not of the same groups"):
        GroupQuantizer(4).quantize(np.zeros(64, np.uint16), np.zeros(64, np.uint8), one, one)
