// topk_chunk: the K best logits of every 512 columns, best first.
//
// T: float or bfloat16_t. K: 1 to 32.
// logits  T [rows, width], width up to 16,777,215
// values  float [rows, chunks * K], chunks = width / 512 rounded up: as stored, bfloat16_t widened
// ids     int [rows, chunks * K], their columns
// Order: NaN first, then by value, descending; what is equal (all NaN; both zeros) by column. A last
// chunk with fewer than K columns fills its list with -inf and the id 16,777,215.
// Grid: (chunks * 256, rows, 1) in threadgroups of (256, 1, 1): one a chunk, two columns a thread.
// Nothing is added up. Every list is the one list that the order allows, whatever the rows.
#include "topk.h"

inline uint bits_of(float value) { return as_type<uint>(value); }
inline uint bits_of(bfloat16_t value) { return uint(as_type<ushort>(value)) << 16; }

//// body
threadgroup uint ranks[512];
threadgroup ushort places[512];
threadgroup uint counts[8];
const uint thread_at = thread_index_in_threadgroup;
const uint chunk = threadgroup_position_in_grid.x;
const uint row = threadgroup_position_in_grid.y;
const uint width = uint(logits_shape[1]);
const uint start = chunk * 512;
const size_t line = size_t(row) * width + start;

// 256 columns apart, so that the lanes of a SIMD-group read one stretch of memory: a row may begin
// anywhere, and then a load of two together would not be aligned.
Candidate first = {NO_RANK, thread_at};
Candidate second = {NO_RANK, thread_at + 256};
if (start + first.place < width) {
  first.rank = rank_of(bits_of(logits[line + first.place]));
}
if (start + second.place < width) {
  second.rank = rank_of(bits_of(logits[line + second.place]));
}
const uint group = thread_at / 32;
const uint lane = thread_at % 32;
const Candidate best = best_of<K>(first, second, ranks, places, counts, group, lane);
if (group == 0 && lane < K) {
  const size_t out = (size_t(row) * threadgroups_per_grid.x + chunk) * K + lane;
  float value = -INFINITY;
  int id = NO_ID;
  if (best.rank != NO_RANK) {
    // Read again, since a rank has lost a zero's sign and which NaN it was.
    value = as_type<float>(bits_of(logits[line + best.place]));
    id = int(start + best.place);
  }
  values[out] = value;
  ids[out] = id;
}
