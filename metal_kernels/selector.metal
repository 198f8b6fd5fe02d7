// selector: how well each candidate follows each candidate of the position before, and the best path.
//
// P positions, K candidates at each (K: 1 to 32, P * K up to 256), R the rank of the codebooks.
// logits        float [P, K]
// ids           int [P, K], tokens of the candidates
// predecessors  float [P, K, R], codebook rows of the K tokens before a position
// gates         float [P, R]
// successors    float [P, K, R], codebook rows of the candidates
// vocab_size    int
// scores        float [P, K, K]: [p, a, b] of candidate b after token a
// path          int [P + 1]: a token for each position, then the status
//
// Score: a product asked = predecessor * gate, rounded; then fma(asked, successor, sum) from 0 in the
// order of the rank; then + logit. So a score has the same bits on every device, whatever P and K.
// Path: from row 0 of position 0, the best score of the row of the candidate taken before; equal
// scores by the smaller token, then by the smaller place. A row on the path with a score that is not
// finite sets bit 0 of the status; a token outside 0 <= id < vocab_size anywhere sets bit 1. Such a
// row, or such a winner, gives token 0 and goes on from row 0.
// Grid: (256, 1, 1) in one threadgroup.
//
// One threadgroup, because the walk needs every position's scores and a launch of its own would cost
// more than both: at P 7, K 16, R 256 these are 460,000 fma on 240 KB. The winner of every row is
// found before the walk, by as many threads as there are rows; the walk itself is P steps.

inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7F800000u) != 0x7F800000u; }

enum : uint {
  THREADS = 256,
  TILE = 64,    // of the rank: codebook rows are read 64 words at a time, side by side
  LINE = 65,    // a row of a tile in threadgroup memory: odd, so that 16 rows lie in 16 banks
  PLACE = 31,   // of a winner: its place,
  NOT_FINITE = 32,  // and whether its row cannot be chosen from,
  NO_TOKEN = 64,    // or its token is none
};

//// body
threadgroup float asked[K * LINE];
threadgroup float offered[K * LINE];
threadgroup uint winners[THREADS];
threadgroup uint malformed[THREADS / 32];
const uint at = thread_index_in_threadgroup;
const uint positions = uint(successors_shape[0]);
const uint rank = uint(successors_shape[2]);
constexpr uint PAIRS = (K * K + THREADS - 1) / THREADS;

for (uint p = 0; p < positions; p++) {
  float sums[PAIRS];
  for (uint i = 0; i < PAIRS; i++) {
    sums[i] = 0.0f;
  }
  for (uint begin = 0; begin < rank; begin += TILE) {
    const uint columns = min(uint(TILE), rank - begin);
    for (uint i = at; i < K * TILE; i += THREADS) {
      const uint r = i % TILE;
      if (r < columns) {
        const uint from = (p * K + i / TILE) * rank + begin + r;
        asked[i / TILE * LINE + r] = predecessors[from] * gates[p * rank + begin + r];
        offered[i / TILE * LINE + r] = successors[from];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint r = 0; r < columns; r++) {
      for (uint i = 0; i < PAIRS; i++) {
        const uint pair = min(at + i * THREADS, uint(K * K - 1));
        sums[i] = fma(asked[pair / K * LINE + r], offered[pair % K * LINE + r], sums[i]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = 0; i < PAIRS; i++) {
    const uint pair = at + i * THREADS;
    if (pair < K * K) {
      scores[p * K * K + pair] = sums[i] + logits[p * K + pair % K];
    }
  }
}

// A thread for each row [position, token before], and for each id.
const bool has_row = at < positions * K;
bool no_token = false;
if (has_row) {
  no_token = ids[at] < 0 || ids[at] >= vocab_size;
}
const bool any_malformed = simd_any(no_token);
if (at % 32 == 0) {
  malformed[at / 32] = any_malformed ? 2 : 0;
}
threadgroup_barrier(mem_flags::mem_device);
if (has_row) {
  const uint candidates = at / K * K;
  float best = scores[at * K];
  uint winner = 0;
  bool finite = is_finite(best);
  for (uint b = 1; b < K; b++) {
    const float score = scores[at * K + b];
    finite = finite && is_finite(score);
    if (score > best || (score == best && ids[candidates + b] < ids[candidates + winner])) {
      best = score;
      winner = b;
    }
  }
  const int token = ids[candidates + winner];
  winners[at] =
      winner | (finite ? 0 : NOT_FINITE) | (token < 0 || token >= vocab_size ? NO_TOKEN : 0);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (at == 0) {
  uint status = 0;
  for (uint i = 0; i < THREADS / 32; i++) {
    status |= malformed[i];
  }
  uint taken = 0;
  for (uint p = 0; p < positions; p++) {
    const uint winner = winners[p * K + taken];
    status |= (winner & NOT_FINITE) != 0 ? 1 : 0;
    const bool valid = (winner & (NOT_FINITE | NO_TOKEN)) == 0;
    taken = valid ? winner & PLACE : 0;
    path[p] = valid ? ids[p * K + taken] : 0;
  }
  path[positions] = int(status);
}
