// Shared by sliding_attention and verify_attention: softmax(q k^T scale) v of some vectors over the
// keys of one partition, by a threadgroup of S SIMD groups.
//
// A vector is one query head of one row. SIMD group s holds the vectors s, s + S, ... (C of them),
// each spread over its 32 lanes: N = D / 32 elements of the query, and as many of the accumulator,
// a lane. Keys and values come as fp32 rows in threadgroup memory, which all SIMD groups read: a
// byte of the cache is loaded and widened once, whatever the number of vectors. Per key and vector
// that leaves N fma for the dot product and N for the value, beside one and a half shuffles (KEYS =
// 4) or two and a half (KEYS = 2), because lanes trade partial sums of different keys instead of
// all adding up the same one. The exponential is one a lane for 32 keys.
//
// Lane c keeps the largest dot product, the sum and the seen keys of its group's vector c.
//
// Order of operations, the same for every vector whatever C, KEYS and the other vectors are:
// - a dot product is, in each lane, fma over its elements ascending; then lanes 1, 2, 4, 8 and 16
//   apart;
// - 32 keys at a time: the largest so far, weights exp((dot - largest) * scale), their sum over the
//   lanes as above, sum = fma(sum, shrink, that), and value by value acc = fma(weight, value, acc)
//   after acc was multiplied by shrink = exp((largest before - largest now) * scale);
// - a key that a vector does not see takes no part at all, so its NaN or infinity does no harm.
//
// Dot products are taken before they are scaled. One of -inf has no weight, wherever it stands, as
// every largest so far is at least LOWEST; a vector that sees nothing else ends as one that sees
// nothing at all. One of +inf or NaN makes its vector NaN, even where a scaled one would have been
// finite: so do queries and keys whose products overflow fp32.

// The loops below must be unrolled: their arrays are registers.
#include "unroll.h"

constant constexpr int TILE_KEYS = 32;

// The least finite float: what the largest of nothing is. With -inf, -inf - -inf would be NaN.
constant constexpr float LOWEST = -3.402823466e38f;

// Which element of a row a lane's e-th one is: sixteen bytes side by side where the row allows it.
template <int N>
inline uint element(int e, uint lane) {
  return N % 4 == 0 ? 128 * (e / 4) + 4 * lane + e % 4 : 32 * e + lane;
}

template <int N>
inline void read_row(thread float* to, const threadgroup float* row, uint lane) {
  if (N % 4 == 0) {
    MLX_MTL_PRAGMA_UNROLL
    for (int e = 0; e < N; e += 4) {
      const float4 x = *(const threadgroup float4*)(row + 32 * e + 4 * lane);
      to[e] = x.x;
      to[e + 1] = x.y;
      to[e + 2] = x.z;
      to[e + 3] = x.w;
    }
  } else {
    MLX_MTL_PRAGMA_UNROLL
    for (int e = 0; e < N; ++e) {
      to[e] = row[32 * e + lane];
    }
  }
}

// The sum over the lanes of sums[lane % KEYS].
template <int KEYS>
inline float sum_over_lanes(thread float* sums, uint lane) {
  MLX_MTL_PRAGMA_UNROLL
  for (int apart = 1; apart < KEYS; apart *= 2) {
    const bool upper = (lane & uint(apart)) != 0;
    MLX_MTL_PRAGMA_UNROLL
    for (int j = 0; j < KEYS / 2 / apart; ++j) {
      const float kept = upper ? sums[2 * j + 1] : sums[2 * j];
      const float sent = upper ? sums[2 * j] : sums[2 * j + 1];
      sums[j] = kept + simd_shuffle_xor(sent, ushort(apart));
    }
  }
  float sum = sums[0];
  MLX_MTL_PRAGMA_UNROLL
  for (int apart = KEYS; apart < 32; apart *= 2) {
    sum += simd_shuffle_xor(sum, ushort(apart));
  }
  return sum;
}

inline float largest_of_lanes(float x) {
  MLX_MTL_PRAGMA_UNROLL
  for (int apart = 1; apart < 32; apart *= 2) {
    x = fmax(x, simd_shuffle_xor(x, ushort(apart)));
  }
  return x;
}

// Dot products of all C vectors with KEYS keys, of which the first is key `first` of the tile; lane
// l ends with those of key l.
template <typename T, int C, int N, int KEYS>
inline void score_keys(
    thread float* scores, const thread T* q, const threadgroup float* rows, int first, uint lane) {
  float k[KEYS * N];
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < KEYS; ++j) {
    read_row<N>(k + j * N, rows + j * 32 * N, lane);
  }
  const bool own = int(lane) / KEYS == first / KEYS;
  MLX_MTL_PRAGMA_UNROLL
  for (int c = 0; c < C; ++c) {
    float sums[KEYS];
    MLX_MTL_PRAGMA_UNROLL
    for (int j = 0; j < KEYS; ++j) {
      sums[j] = 0.0f;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int e = 0; e < N; ++e) {
      const float x = float(q[c * N + e]);
      MLX_MTL_PRAGMA_UNROLL
      for (int j = 0; j < KEYS; ++j) {
        sums[j] = fma(x, k[j * N + e], sums[j]);
      }
    }
    const float dot = sum_over_lanes<KEYS>(sums, lane);
    scores[c] = own ? dot : scores[c];
  }
}

// Makes weights of the scores of a tile, lane l holding those of `key`, and takes them in.
template <int C, int N>
inline void weigh(
    thread float* scores, thread float* acc, thread float& largest, thread float& sum, int from,
    int to, int key, float scale, uint lane) {
  MLX_MTL_PRAGMA_UNROLL
  for (int c = 0; c < C; ++c) {
    const int first = simd_shuffle(from, ushort(c));
    const int end = simd_shuffle(to, ushort(c));
    const bool seen = first <= key && key < end;
    const float before = simd_shuffle(largest, ushort(c));
    const float now = fmax(before, largest_of_lanes(seen ? scores[c] : -INFINITY));
    // The scale after the difference: a product that is then subtracted from could be fused.
    float weight = seen ? exp((scores[c] - now) * scale) : 0.0f;
    scores[c] = weight;
    const float tile = sum_over_lanes<1>(&weight, lane);
    // Equal where nothing larger came, +inf too, of which a difference would be NaN.
    const float shrink = before == now ? 1.0f : exp((before - now) * scale);
    MLX_MTL_PRAGMA_UNROLL
    for (int e = 0; e < N; ++e) {
      acc[c * N + e] *= shrink;
    }
    if (int(lane) == c) {
      largest = now;
      sum = fma(sum, shrink, tile);
    }
  }
}

// Adds `count` rows of values, of which the first is that of key `first` of the tile at `tile`.
// ALL: every vector sees every one of them.
template <bool ALL, int C, int N>
inline void add_values(
    thread float* acc, const thread float* weights, const threadgroup float* rows, int count,
    int first, int tile, int from, int to, uint lane) {
  for (int j = 0; j < count; ++j) {
    float v[N];
    read_row<N>(v, rows + j * 32 * N, lane);
    MLX_MTL_PRAGMA_UNROLL
    for (int c = 0; c < C; ++c) {
      const float weight = simd_shuffle(weights[c], ushort(first + j));
      bool seen = true;
      if (!ALL) {
        const int key = tile + first + j;
        const int begin = simd_shuffle(from, ushort(c));
        const int end = simd_shuffle(to, ushort(c));
        seen = begin <= key && key < end;
      }
      if (seen) {
        MLX_MTL_PRAGMA_UNROLL
        for (int e = 0; e < N; ++e) {
          acc[c * N + e] = fma(weight, v[e], acc[c * N + e]);
        }
      }
    }
  }
}
