// topk_merge: sorted lists of K candidates, as many as fit into 512, become one.
//
// K: 1 to 32.
// values  float [rows, lists * K]: list after list, each best first, of ascending columns
// ids     int [rows, lists * K], the columns; 16,777,215 beside -inf is a place without a candidate
// best_values, best_ids: the same of [rows, merged * K], merged = lists / (512 / K) rounded up
// Order as in topk_chunk. Grid: (merged * 256, rows, 1) in threadgroups of (256, 1, 1).
// Nothing is added up. Every list is the one list that the order allows, whatever the rows.
#include "topk.h"

// What a thread reads. Element e of the 512 is rank e / SPAN of list e % SPAN: neighbouring lanes
// read different lists, so that each of best_of's groups holds whole lists, each with its best, and
// not one rank of all lists, which would make a loose bound. Lanes read K words apart then, from
// lines of memory that the other SIMD-groups use up: 60 KB a row, once.
struct Element {
  bool there;
  uint place;  // list after list, so that the smaller place is the smaller column
};

template <int K>
inline Element element(uint e, uint lists) {
  const uint span = 512 / K;
  Element out;
  out.there = e / span < K && e % span < lists;
  out.place = (e % span) * K + e / span;
  return out;
}

//// body
threadgroup uint ranks[512];
threadgroup ushort places[512];
threadgroup uint counts[8];
const uint thread_at = thread_index_in_threadgroup;
const uint part = threadgroup_position_in_grid.x;
const uint row = threadgroup_position_in_grid.y;
const uint span = 512 / K;
const uint lists = uint(values_shape[1]) / K;
const size_t line = (size_t(row) * lists + part * span) * K;

const Element near = element<K>(thread_at, lists - part * span);
const Element far = element<K>(thread_at + 256, lists - part * span);
Candidate first = {NO_RANK, near.place};
Candidate second = {NO_RANK, far.place};
if (near.there) {
  const uint rank = rank_of(as_type<uint>(values[line + near.place]));
  const bool none = rank == RANK_OF_MINUS_INF && ids[line + near.place] == NO_ID;
  first.rank = none ? NO_RANK : rank;
}
if (far.there) {
  const uint rank = rank_of(as_type<uint>(values[line + far.place]));
  const bool none = rank == RANK_OF_MINUS_INF && ids[line + far.place] == NO_ID;
  second.rank = none ? NO_RANK : rank;
}
const uint group = thread_at / 32;
const uint lane = thread_at % 32;
const Candidate best = best_of<K>(first, second, ranks, places, counts, group, lane);
if (group == 0 && lane < K) {
  const size_t out = (size_t(row) * threadgroups_per_grid.x + part) * K + lane;
  const bool there = best.rank != NO_RANK;
  best_values[out] = there ? values[line + best.place] : -INFINITY;
  best_ids[out] = there ? ids[line + best.place] : int(NO_ID);
}
