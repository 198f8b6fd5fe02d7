// A drafted block's queries over the ring of committed rows and over the block's own keys, split
// over keys; attention_merge makes one result of the partitions.
//
// Inputs
//   queries         fp32 [rows, heads, D]           rows <= 8
//   ring            fp32 [2, kv, capacity, D]       keys, then values; the row at absolute position s
//                                                   lies in slot s mod slots. Read where it lies. What
//                                                   lies in a dead slot is not read
//   block           fp32 [2, kv, rows, D]           the block's own keys and values
//   position        int32, no dimensions            absolute position of the block's first row
//   live            int32, no dimensions            rows before it that are held, <= slots
//   window          int32, no dimensions            the row at s is seen by query i where
//                                                   position + i - s < window
//   slots           int32, no dimensions            <= capacity
//   scale           fp32, no dimensions             what dot products are multiplied by, > 0
// Outputs
//   accumulators    fp32 [partitions, rows * heads, D]
//   stats           fp32 [partitions, rows * heads, 2], flat: largest dot product, sum of weights;
//                                                   (LOWEST, 0) where a partition shows nothing
// Template
//   D: a multiple of 32; G = heads / kv; C = ceil(rows * G / 8) vectors a SIMD group, with
//   C * D / 32 <= 32; PARTITION: keys of a partition, a multiple of 32
// Grid
//   (256, ceil((live + rows) / PARTITION), kv) threads in threadgroups of (256, 1, 1); 16 KB of
//   threadgroup memory at most
//
// Keys are counted by age, not by slot: key t < live is the committed row at position - live + t,
// key live + j the block's row j. So query i sees one range of keys, from max(0, live + i - window +
// 1) to the end, and a ring that has turned gives the same bits as one that has not. No mask is made
// and no key is laid anywhere but into threadgroup memory: a threadgroup serves all rows and all
// query heads of its key/value head, so each byte of the ring is read once a pass.
//
// Why 256 keys a partition: 8 key/value heads of a 2,048-row window are 72 threadgroups of eight
// SIMD groups, and what they write and the merge reads (32 vectors each) is a seventh of what they
// read of the ring; half as many keys would double that, twice as many leave half the GPU idle.
//
// Registers a thread at 32/8 heads of 128 and 8 rows: 16 for queries, 16 for accumulators, 16 for
// four keys.
//
// Order of operations: attention.h, keys ascending by age.

#include "attention.h"

constant constexpr int S = 8;

// `count` rows from key `first` on into threadgroup memory; zeros from key `stop` on.
template <int D>
inline void load_keys(
    threadgroup float4* stage, int count, const device float* ring, const device float* block,
    int oldest, int slots, int live, int first, int stop, uint thread_index) {
  for (int i = int(thread_index); i < count * (D / 4); i += 32 * S) {
    const int key = first + i / (D / 4);
    const int column = 4 * (i % (D / 4));
    float4 x = float4(0.0f);
    if (key < live) {
      const int slot = oldest + key;
      x = *(const device float4*)(ring + size_t(slot < slots ? slot : slot - slots) * D + column);
    } else if (key < stop) {
      x = *(const device float4*)(block + (key - live) * D + column);
    }
    stage[i] = x;
  }
}

//// body
constexpr int N = D / 32;
constexpr int KEYS = C * N > 16 ? 2 : 4;
constexpr int STAGE = D <= 128 ? TILE_KEYS : 4096 / D / KEYS * KEYS;
threadgroup float4 stage[STAGE * (D / 4)];
const threadgroup float* staged = (const threadgroup float*)stage;

const uint lane = thread_index_in_simdgroup;
const uint own = simdgroup_index_in_threadgroup;
const int rows = queries_shape[0];
const int heads = queries_shape[1];
const int kv = int(threadgroup_position_in_grid.z);
const int partition = int(threadgroup_position_in_grid.y);
const size_t half_ring = size_t(ring_shape[1]) * ring_shape[2] * D;
const device float* ring_keys = ring + size_t(kv) * ring_shape[2] * D;
const device float* block_keys = block + kv * rows * D;
const int half_block = ring_shape[1] * rows * D;

const int total = live + rows;
const int start = partition * PARTITION;
const int stop = min(start + PARTITION, total);
const int oldest = (position - live) % slots;
const int all_see_from = max(0, live + rows - window);

float q[C * N];
float acc[C * N];
MLX_MTL_PRAGMA_UNROLL
for (int c = 0; c < C; ++c) {
  const int vector = int(own) + S * c;
  const int at = ((vector / G) * heads + kv * G + vector % G) * D;
  MLX_MTL_PRAGMA_UNROLL
  for (int e = 0; e < N; ++e) {
    q[c * N + e] = vector < rows * G ? queries[at + element<N>(e, lane)] : 0.0f;
    acc[c * N + e] = 0.0f;
  }
}
const bool busy = int(own) < rows * G;
const int lane_vector = int(own) + S * int(lane);
const int from = min(live, max(0, live + lane_vector / G - window + 1));
const int to = lane_vector < rows * G ? total : 0;
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
    load_keys<D>(
        stage, count, ring_keys, block_keys, oldest, slots, live, tile + s, stop,
        thread_index_in_threadgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (busy) {
      for (int j = 0; j < count; j += KEYS) {
        score_keys<float, C, N, KEYS>(scores, q, staged + j * D, s + j, lane);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (busy) {
    weigh<C, N>(scores, acc, largest, sum, from, to, tile + int(lane), scale, lane);
  }
  const bool all_seen = all_see_from <= tile && tile + TILE_KEYS <= stop;
  for (int s = 0; s < TILE_KEYS; s += STAGE) {
    const int count = min(STAGE, TILE_KEYS - s);
    load_keys<D>(
        stage, count, ring_keys + half_ring, block_keys + half_block, oldest, slots, live,
        tile + s, stop, thread_index_in_threadgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (busy && all_seen) {
      add_values<true, C, N>(acc, scores, staged, count, s, tile, from, to, lane);
    } else if (busy) {
      add_values<false, C, N>(acc, scores, staged, count, s, tile, from, to, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

MLX_MTL_PRAGMA_UNROLL
for (int c = 0; c < C; ++c) {
  const int vector = int(own) + S * c;
  if (vector < rows * G) {
    const int at = partition * rows * heads + (vector / G) * heads + kv * G + vector % G;
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
