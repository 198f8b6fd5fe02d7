// The K best of 512 candidates, by one threadgroup of 256 threads: topk_chunk's and topk_merge's.
//
// A candidate is a rank (the smaller the better, made of the bits of its value) and its place among
// the 512 (the smaller wins a tie). All pairs differ, so that the result depends on no order of work.
//
// Sorting all 512 would cost some 36 exchanges between lanes for every 64 candidates, much more than
// reading them. Most need no sorting: split the candidates into at least K groups, and the worst of
// the groups' best is a bound that K candidates keep. What keeps it, some 45 of 512 random ones at
// K = 16, is moved together and sorted, 64 by a SIMD-group, and the sorted lists are merged in pairs.
// Where all 512 keep the bound, as in a row of equal values, all are sorted: the same steps, eight
// SIMD-groups wide.
//
// Barriers of the threadgroup: one for the groups' best, one for the counts, one for the candidates
// moved together, and one for each halving of the lists, mostly none.

enum : uint {
  NO_RANK = 0xFFFFFFFFu,  // a place without a candidate
  RANK_OF_MINUS_INF = 0xFF800000u,
  NO_ID = 16777215u,
};

struct Candidate {
  uint rank;
  uint place;
};

// The order of the values by their bits: NaN 0, then +inf to -inf, both zeros alike. Integers, so that
// no device's treatment of NaN or of subnormal numbers is asked for.
inline uint rank_of(uint bits) {
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return 0;
  }
  if (bits == 0x80000000u) {
    return 0x7FFFFFFFu;
  }
  return (bits >> 31) != 0 ? bits : 0x7FFFFFFFu - bits;
}

inline bool comes_before(Candidate a, Candidate b) {
  return a.rank < b.rank || (a.rank == b.rank && a.place < b.place);
}

inline Candidate better(Candidate a, Candidate b) {
  return comes_before(b, a) ? b : a;
}

// One comparison of a sorting network: with the lane `distance` away, the better or the worse stays.
inline Candidate exchanged(Candidate mine, uint distance, bool keeps_better) {
  Candidate other;
  other.rank = simd_shuffle_xor(mine.rank, ushort(distance));
  other.place = simd_shuffle_xor(mine.place, ushort(distance));
  return comes_before(other, mine) == keeps_better ? other : mine;
}

// A SIMD-group's 32 candidates sorted by a bitonic network, the best in lane 0 or in lane 31.
inline Candidate sorted(Candidate mine, uint lane, bool best_first) {
  for (uint size = 2; size <= 32; size *= 2) {
    const bool ascending = ((lane & size) == 0 || size == 32) == best_first;
    for (uint distance = size / 2; distance > 0; distance /= 2) {
      mine = exchanged(mine, distance, ((lane & distance) == 0) == ascending);
    }
  }
  return mine;
}

// The 32 best of two sorted lists of 32, one best first and the other best last: the better of each
// pair are those, in bitonic order, which five comparisons sort.
inline Candidate merged(Candidate best_first, Candidate best_last, uint lane) {
  Candidate mine = better(best_first, best_last);
  for (uint distance = 16; distance > 0; distance /= 2) {
    mine = exchanged(mine, distance, (lane & distance) == 0);
  }
  return mine;
}

// How many the lanes before this one hold. Spelled out: not every device has it as one function.
inline uint sum_before(uint count, uint lane) {
  uint sum = count;
  for (uint distance = 1; distance < 32; distance *= 2) {
    const uint other = simd_shuffle_up(sum, ushort(distance));
    sum += lane >= distance ? other : 0;
  }
  return sum - count;
}

// The candidates of 256 threads, two each, in; the best 32 out, sorted, one in each lane of SIMD-group
// 0, of which the first K are the best K of all. Other SIMD-groups get nothing of use.
// ranks: 512, places: 512, counts: 8 of threadgroup memory. Neighbouring lanes use neighbouring words
// in all of it, so no two of a SIMD-group ask one bank for different words.
template <int K>
inline Candidate best_of(
    Candidate first,
    Candidate second,
    threadgroup uint* ranks,
    threadgroup ushort* places,
    threadgroup uint* counts,
    uint group,
    uint lane) {
  // The bound. Group by lane: neighbours in memory go to different groups, so that a smooth row of
  // logits has groups alike, and a close bound.
  ranks[group * 32 + lane] = min(first.rank, second.rank);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint bound = ranks[lane];
  for (uint other = 1; other < 8; other++) {
    bound = min(bound, ranks[other * 32 + lane]);
  }
  for (int groups = 16; groups >= K; groups /= 2) {
    bound = min(bound, simd_shuffle_xor(bound, ushort(groups)));
  }
  bound = simd_max(bound);

  // What keeps it, moved together.
  const bool first_kept = first.rank <= bound && first.rank != NO_RANK;
  const bool second_kept = second.rank <= bound && second.rank != NO_RANK;
  const uint kept = uint(first_kept) + uint(second_kept);
  const uint kept_before = sum_before(kept, lane);
  if (lane == 31) {
    counts[group] = kept_before + kept;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint at = kept_before;
  uint total = 0;
  for (uint other = 0; other < 8; other++) {
    at += other < group ? counts[other] : 0;
    total += counts[other];
  }
  if (first_kept) {
    ranks[at] = first.rank;
    places[at] = ushort(first.place);
    at++;
  }
  if (second_kept) {
    ranks[at] = second.rank;
    places[at] = ushort(second.place);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Lists of the best 32 of each 64.
  const uint tiles = (total + 63) / 64;
  const uint tile = group * 64;
  Candidate list = {NO_RANK, 0xFFFFu};
  if (group < tiles) {
    Candidate far = list;
    if (tile + lane < total) {
      list.rank = ranks[tile + lane];
      list.place = places[tile + lane];
    }
    if (tile + 32 + lane < total) {
      far.rank = ranks[tile + 32 + lane];
      far.place = places[tile + 32 + lane];
    }
    list = merged(sorted(list, lane, true), sorted(far, lane, false), lane);
  }
  // The upper half of the lists into the lower half, until one is left. A list is written once, over
  // the tile that it came from: a lane has its place in the list when the sort is through, and that
  // has waited for what every lane of the SIMD-group read.
  for (uint lists = tiles; lists > 1; lists = (lists + 1) / 2) {
    const uint half_of = (lists + 1) / 2;
    if (group >= half_of && group < lists) {
      ranks[tile + lane] = list.rank;
      places[tile + lane] = ushort(list.place);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (group + half_of < lists) {
      Candidate other;
      other.rank = ranks[(group + half_of) * 64 + 31 - lane];
      other.place = places[(group + half_of) * 64 + 31 - lane];
      list = merged(list, other, lane);
    }
  }
  return list;
}
