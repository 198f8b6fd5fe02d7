// Causal attention of a pass's rows at the end of a cache, split over keys; attention_merge makes one
// result of the partitions.
//
// Inputs
//   queries         T [1, heads, rows, D]           any number of rows
//   keys, values    T [1, kv, capacity, D]          the cache's whole buffers, of which `length` rows
//                                                   are in use, the last `rows` of them being the
//                                                   pass's own. What lies behind is not read
//   length          int32, no dimensions            <= capacity
//   scale           fp32, no dimensions             what dot products are multiplied by, > 0
// Outputs
//   accumulators    fp32 [partitions, heads * rows, D]
//   stats           fp32 [partitions, heads * rows, 2], flat, at least 8 long: largest dot product, sum
//                                                   of weights; (LOWEST, 0) where a row sees nothing
// Template
//   T: float, half or bfloat16_t; D: a multiple of 32; G = heads / kv; R: rows of a row tile;
//   S: SIMD groups of a threadgroup, 8 or 12; C = ceil(min(rows, R) * G / S) vectors a SIMD group;
//   FINE, FINE_KEYS, COARSE: multiples of 32, FINE_KEYS also of FINE: keys below FINE_KEYS are in
//   partitions of FINE, the others in partitions of COARSE
// Grid
//   (32 S, partitions, kv * ceil(rows / R)) threads in threadgroups of (32 S, 1, 1), row tile slowest;
//   16 KB of threadgroup memory at most
//
// A threadgroup serves all query heads of its key/value head and up to 8 rows (R) over one partition,
// so each byte of keys and values is read once per key/value head for 1 to 8 rows: 48 vectors at 6
// query heads to one and 8 rows. At D = 256 a vector is 8 fp32 accumulators and 8 query elements a
// lane, all of which must be in registers of some thread, of which a thread has 128 before it spills.
// So twelve SIMD groups hold four vectors each: 32 registers for accumulators, 32 for queries, 16 for
// two keys. Eight SIMD groups of six vectors would need 48, 48 and 16 and spill; sixteen of three
// would read every key from threadgroup memory a third more often, in more threads than an Apple GPU
// is known to grant at that many registers each (384). Queries in threadgroup memory would leave no
// room for keys. Up to five rows (30 vectors) fit into eight SIMD groups, which is then their number.
// They share the vectors evenly, so C falls to 1 for one row, and more threadgroups fit on a core.
//
// Partitions lie at fixed absolute keys, so a row's result does not depend on what lies behind it:
// neither on later rows of its pass nor on the cache's length or capacity. Their sizes answer two
// questions. At 1,000 keys, 4 key/value heads in partitions of 128 are 32 threadgroups of up to twelve
// SIMD groups, where 256 would leave half a GPU idle. At 16,000 keys there is no lack of threadgroups
// (176), but every partition costs 48 vectors of fp32, written and read again: with 128 keys a
// partition that is three quarters of what is read of the cache, with 512 a fifth.
//
// Order of operations: attention.h, keys ascending.

#include "attention.h"

// `count` rows from key `first` on into threadgroup memory, widened; zeros from key `stop` on.
template <typename T, int D, int S>
inline void load_keys(
    threadgroup float4* stage, int count, const device T* rows, int first, int stop,
    uint thread_index) {
  for (int i = int(thread_index); i < count * (D / 4); i += 32 * S) {
    const int key = first + i / (D / 4);
    float4 x = float4(0.0f);
    if (key < stop) {
      const vec<T, 4> four = *(const device vec<T, 4>*)(rows + size_t(key) * D + 4 * (i % (D / 4)));
      x = float4(float(four.x), float(four.y), float(four.z), float(four.w));
    }
    stage[i] = x;
  }
}

//// body
constexpr int N = D / 32;
constexpr int KEYS = C * N > 16 ? 2 : 4;
constexpr int STAGE = D <= 128 ? TILE_KEYS : 4096 / D / 4 * 4;
threadgroup float4 stage[STAGE * (D / 4)];
const threadgroup float* staged = (const threadgroup float*)stage;

const uint lane = thread_index_in_simdgroup;
const uint own = simdgroup_index_in_threadgroup;
const int kv_heads = keys_shape[1];
const int rows = queries_shape[2];
const int vectors = queries_shape[1] * rows;
const int kv = int(threadgroup_position_in_grid.z) % kv_heads;
const int first_row = int(threadgroup_position_in_grid.z) / kv_heads * R;
const int held = min(R, rows - first_row) * G;
const size_t head = size_t(kv) * keys_shape[2] * D;

const int partition = int(threadgroup_position_in_grid.y);
const int coarse = partition - FINE_KEYS / FINE;
const int start = coarse < 0 ? partition * FINE : FINE_KEYS + coarse * COARSE;
const int all_see_to = length - rows + first_row + 1;
const int stop = min(start + (coarse < 0 ? FINE : COARSE), all_see_to + held / G - 1);

T q[C * N];
float acc[C * N];
MLX_MTL_PRAGMA_UNROLL
for (int c = 0; c < C; ++c) {
  const int vector = int(own) + S * c;
  const int at = ((kv * G + vector % G) * rows + first_row + vector / G) * D;
  MLX_MTL_PRAGMA_UNROLL
  for (int e = 0; e < N; ++e) {
    q[c * N + e] = vector < held ? queries[at + element<N>(e, lane)] : T(0.0f);
    acc[c * N + e] = 0.0f;
  }
}
const bool busy = int(own) < held;
const int lane_vector = int(own) + S * int(lane);
const int to = lane_vector < held ? all_see_to + lane_vector / G : 0;
float largest = LOWEST;
float sum = 0.0f;

for (int tile = start; tile < stop; tile += TILE_KEYS) {
  float scores[C];
  MLX_MTL_PRAGMA_UNROLL
  for (int c = 0; c < C; ++c) {
    scores[c] = 0.0f;
  }
  for (int s = 0; s < TILE_KEYS; s += STAGE) {
    const int count = min(STAGE, TILE_KEYS - s);
    load_keys<T, D, S>(stage, count, keys + head, tile + s, stop, thread_index_in_threadgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (busy) {
      for (int j = 0; j < count; j += KEYS) {
        score_keys<T, C, N, KEYS>(scores, q, staged + j * D, s + j, lane);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (busy) {
    weigh<C, N>(scores, acc, largest, sum, 0, to, tile + int(lane), scale, lane);
  }
  const bool all_seen = tile + TILE_KEYS <= all_see_to;
  for (int s = 0; s < TILE_KEYS; s += STAGE) {
    const int count = min(STAGE, TILE_KEYS - s);
    load_keys<T, D, S>(stage, count, values + head, tile + s, stop, thread_index_in_threadgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (busy && all_seen) {
      add_values<true, C, N>(acc, scores, staged, count, s, tile, 0, to, lane);
    } else if (busy) {
      add_values<false, C, N>(acc, scores, staged, count, s, tile, 0, to, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

MLX_MTL_PRAGMA_UNROLL
for (int c = 0; c < C; ++c) {
  const int vector = int(own) + S * c;
  if (vector < held) {
    const int at = partition * vectors + (kv * G + vector % G) * rows + first_row + vector / G;
    MLX_MTL_PRAGMA_UNROLL
    for (int e = 0; e < N; ++e) {
      accumulators[size_t(at) * D + element<N>(e, lane)] = acc[c * N + e];
    }
    if (int(lane) == c) {
      stats[2 * at] = largest;
      stats[2 * at + 1] = sum;
    }
  }
}
