"""Mutants that compute the same as the kernel, or what nobody reads, and why."""

from dataclasses import dataclass

from tests.kernels.mutations import Mutant


@dataclass(frozen=True)
class Equivalent:
    """A mutant by its line and what stands there instead.

    nth:     which of the mutants with this line and change; () is all of them
    kernels: where it is one; () is wherever the line is
    """

    line: str
    change: str
    why: str
    nth: tuple[int, ...] = ()
    kernels: tuple[str, ...] = ()

    def is_it(self, mutant: Mutant) -> bool:
        same = (self.line, self.change) == (mutant.line, mutant.change)
        here = not self.kernels or mutant.kernel in self.kernels
        return same and here and (not self.nth or mutant.nth in self.nth)


def is_equivalent(mutant: Mutant) -> bool:
    """Whether it is listed here."""
    return any(one.is_it(mutant) for one in EQUIVALENT)


EQUIVALENT = (
    # attention.h
    Equivalent(
        "for (int apart = 1; apart < KEYS; apart *= 2) {",
        "for (int apart = 1; apart <= KEYS; apart *= 2) {",
        "The loop inside has no round for it: KEYS / 2 / KEYS is 0.",
    ),
    Equivalent(
        "seen = begin <= key && key < end;",
        "seen = begin <= key && key <= end;",
        "All queries see up to the last key, and behind it there are zeros of weight 0.",
        kernels=("sliding_attention",),
    ),
    # sliding_attention, verify_attention
    Equivalent(
        "for (int s = 0; s < TILE_KEYS; s += STAGE) {",
        "for (int s = 0; s <= TILE_KEYS; s += STAGE) {",
        "A stage without keys.",
    ),
    Equivalent(
        "const bool busy = int(own) < rows * G;",
        "const bool busy = int(own) <= rows * G;",
        "A SIMD-group works whose results are not written.",
    ),
    Equivalent(
        "const bool busy = int(own) < held;",
        "const bool busy = int(own) <= held;",
        "A SIMD-group works whose results are not written.",
    ),
    Equivalent(
        "const int to = lane_vector < rows * G ? total : 0;",
        "const int to = lane_vector <= rows * G ? total : 0;",
        "Of a vector whose results are not written.",
    ),
    Equivalent(
        "const int to = lane_vector < held ? all_see_to + lane_vector / G : 0;",
        "const int to = lane_vector <= held ? all_see_to + lane_vector / G : 0;",
        "Of a vector whose results are not written.",
    ),
    Equivalent(
        "constexpr int STAGE = D <= 128 ? TILE_KEYS : 4096 / D / KEYS * KEYS;",
        "constexpr int STAGE = D < 128 ? TILE_KEYS : 4096 / D / KEYS * KEYS;",
        "At 128 both say 32.",
    ),
    Equivalent(
        "constexpr int STAGE = D <= 128 ? TILE_KEYS : 4096 / D / 4 * 4;",
        "constexpr int STAGE = D < 128 ? TILE_KEYS : 4096 / D / 4 * 4;",
        "At 128 both say 32.",
    ),
    Equivalent(
        "const bool all_seen = all_see_from <= tile && tile + TILE_KEYS <= stop;",
        "const bool all_seen = all_see_from < tile && tile + TILE_KEYS <= stop;",
        "The way that looks at each key gives the same bits.",
    ),
    Equivalent(
        "const bool all_seen = all_see_from <= tile && tile + TILE_KEYS <= stop;",
        "const bool all_seen = all_see_from <= tile && tile + TILE_KEYS < stop;",
        "The way that looks at each key gives the same bits.",
    ),
    Equivalent(
        "const bool all_seen = tile + TILE_KEYS <= all_see_to;",
        "const bool all_seen = tile + TILE_KEYS < all_see_to;",
        "The way that looks at each key gives the same bits.",
    ),
    Equivalent(
        "constexpr int KEYS = C * N > 16 ? 2 : 4;",
        "constexpr int KEYS = C * N >= 16 ? 2 : 4;",
        "How many keys are scored together changes no bit.",
    ),
    Equivalent(
        "for (int c = 0; c < C; ++c) {",
        "for (int c = 0; c <= C; ++c) {",
        "The vector of that place is not there.",
        nth=(6,),
    ),
    Equivalent(
        "const int start = coarse < 0 ? partition * FINE : FINE_KEYS + coarse * COARSE;",
        "const int start = coarse <= 0 ? partition * FINE : FINE_KEYS + coarse * COARSE;",
        "The first coarse partition begins where another fine one would.",
    ),
    Equivalent(
        "for (int tile = start; tile < stop; tile += TILE_KEYS) {",
        "for (int tile = start; tile <= stop; tile += TILE_KEYS) {",
        "A tile in which nothing is seen.",
    ),
    # gated_delta_verify
    Equivalent(
        "for (int i = 0; i < N; ++i) {",
        "for (int i = 0; i <= N; ++i) {",
        "Reads and writes a vector behind two private arrays, which the harness does not see.",
        nth=(2,),
        kernels=("gated_delta_verify",),
    ),
    # selector
    Equivalent(
        "for (uint begin = 0; begin < rank; begin += TILE) {",
        "for (uint begin = 0; begin <= rank; begin += TILE) {",
        "A tile without columns.",
    ),
    Equivalent(
        "for (uint i = 0; i < PAIRS; i++) {",
        "for (uint i = 0; i <= PAIRS; i++) {",
        "PAIRS * THREADS is K * K or more, so the pair is not there.",
        nth=(3,),
    ),
    # skinny_qmm_matrix
    Equivalent(
        "for (int run = part * SPAN; run < width; run += split * SPAN) {",
        "for (int run = part * SPAN; run <= width; run += split * SPAN) {",
        "A run behind K adds zeros.",
    ),
    # topk.h
    Equivalent(
        "return a.rank < b.rank || (a.rank == b.rank && a.place < b.place);",
        "return a.rank < b.rank || (a.rank == b.rank && a.place <= b.place);",
        "Equal in rank and place they are one candidate.",
    ),
    Equivalent(
        "for (uint distance = 1; distance < 32; distance *= 2) {",
        "for (uint distance = 1; distance <= 32; distance *= 2) {",
        "No lane is 32 or higher.",
    ),
    Equivalent(
        "for (int groups = 16; groups >= K; groups /= 2) {",
        "for (int groups = 16; groups > K; groups /= 2) {",
        "A looser bound leaves more candidates to the sort, and the same ones come first.",
    ),
    Equivalent(
        "if (group < tiles) {",
        "if (group <= tiles) {",
        "A SIMD-group sorts no candidates, and nobody reads its list.",
    ),
)
