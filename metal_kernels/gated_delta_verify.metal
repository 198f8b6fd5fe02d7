// The gated delta rule over the rows of a pass, behind the accepted rows of the pass before it:
// S <- g S + beta (v - g S k) k^T and y = S q, with q and k brought to length one here.
//
// Inputs
//   mixed           T [1, rows, 2 Hk Dk + Hv Dv]  the pass's rows: q, k and v of all heads side by
//                                                 side, as the short convolution leaves them
//   decay           fp32 [1, rows, Hv]            g, in [0, 1]
//   beta            fp32 [1, rows, Hv]            write strength
//   pending_mixed, pending_decay, pending_beta    the same of an earlier pass, any number of rows
//   state           fp32 [1, Hv, Dv, Dk]          before the pending rows; not changed
//   n_rows          int32, no dimensions          rows of the pass to run; may be 0
//   n_pending       int32, no dimensions          leading pending rows to fold in; may be 0
//   keep            int32, no dimensions          0: write no state; 1: the one after the pending
//                                                 rows; 2: the one after all rows
// Outputs
//   y               T [1, rows, Hv, Dv]           of the pass's rows; only n_rows of them are written
//   kept            fp32 [1, Hv, Dv, Dk]          the state that `keep` asks for
// Template
//   T: float, half or bfloat16_t; Dk a multiple of 32; Dv a multiple of 4; Hv a multiple of Hk;
//   Hv >= 8 for one variant whatever the rows, because MLX passes arrays of fewer than 8 elements
//   in another address space
// Grid
//   (32, Dv / 4, Hv) threads in threadgroups of (32, 1, 2 or 4 SIMD groups, 1); no barriers, no
//   threadgroup memory
//
// Layout: a SIMD group holds four rows of one head's state in registers from the first row of the
// pass to the last, eight lanes a row, lane l elements 32 i + 4 l + (0..3) of it. So the state is
// read once and written once however many rows there are, sixteen-byte loads of eight lanes lie side
// by side, a sum over Dk needs three shuffles, and a lane holds Dk / 8 elements (16 of 128), which
// leaves registers for many SIMD groups a core: 1,536 of them at 48 heads of 128 x 128. Keys and
// queries are read again by each SIMD group, from cache.
//
// Why q and k are normalized here: as MLX operations that takes a copy, a norm and a product for
// each of them and a copy of v, seven launches a layer, because a part of `mixed` is no contiguous
// array. Here it is one more product and sum beside each load, off the chain that makes a row wait
// for the row before it. Decay and beta stay outside: they are one launch for both, and a logarithm
// and three exponentials that every lane would repeat.
//
// Order of operations: a sum over Dk is, in each of four columns, fma over i ascending; then
// (column 0 + column 1) + (column 2 + column 3); then lanes 1, 2 and 4 apart. State, sums and all
// else are fp32; only y is rounded to T. Every row, pending or new, goes through the same code in
// the same order, so y and the kept state do not depend, to the bit, on how rows are cut into passes.
//
// A query or key so long that its sum of squares overflows fp32 counts as length infinity: what comes
// of it is 0, or NaN where a sum over its elements overflows too.

#include "unroll.h"

// Added to a sum of squares before its root is taken, as mlx-lm's l2norm does.
constant constexpr float NORM_EPS = 1e-6f;

template <typename T>
inline float4 four(const device T* from) {
  const vec<T, 4> x = *(const device vec<T, 4>*)(from);
  return float4(float(x.x), float(x.y), float(x.z), float(x.w));
}

// The sum over a row of the state, of which each lane brings four columns.
inline float over_row(float4 columns) {
  float sum = (columns.x + columns.y) + (columns.z + columns.w);
  sum += simd_shuffle_xor(sum, ushort(1));
  sum += simd_shuffle_xor(sum, ushort(2));
  sum += simd_shuffle_xor(sum, ushort(4));
  return sum;
}

// What a key or query is multiplied by to have length one.
inline float to_length_one(float4 squares) { return 1.0f / sqrt(over_row(squares) + NORM_EPS); }

template <typename T, int N>
inline void fold_row(thread float4* s, const device T* key, float value, float decay, float beta) {
  float4 k[N];
  float4 squares = float4(0.0f);
  float4 memory = float4(0.0f);
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < N; ++i) {
    k[i] = four(key + 32 * i);
    s[i] = s[i] * decay;
    squares = fma(k[i], k[i], squares);
    memory = fma(s[i], k[i], memory);
  }
  const float shrink = to_length_one(squares);
  const float delta = fma(-over_row(memory), shrink, value) * beta;
  const float4 write = float4(delta * shrink);
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < N; ++i) {
    s[i] = fma(write, k[i], s[i]);
  }
}

template <typename T, int N>
inline float read_row(const thread float4* s, const device T* query, float scale) {
  float4 squares = float4(0.0f);
  float4 sums = float4(0.0f);
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < N; ++i) {
    const float4 q = four(query + 32 * i);
    squares = fma(q, q, squares);
    sums = fma(s[i], q, sums);
  }
  return over_row(sums) * (to_length_one(squares) * scale);
}

template <int N>
inline void store(const thread float4* s, device float* to) {
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < N; ++i) {
    *(device float4*)(to + 32 * i) = s[i];
  }
}

//// body
constexpr int PARTS = Dk / 32;
constexpr uint KEYS = Hk * Dk;
constexpr uint WIDTH = 2 * KEYS + Hv * Dv;

const uint head = thread_position_in_grid.z;
const uint row = 4 * thread_position_in_grid.y + thread_index_in_simdgroup / 8;
const uint column = 4 * (thread_index_in_simdgroup % 8);
const uint own = (head * Dv + row) * Dk + column;
const uint query = head / (Hv / Hk) * Dk + column;
const uint key = KEYS + query;
const uint value = 2 * KEYS + head * Dv + row;
const float scale = 1.0f / sqrt(float(Dk));

float4 s[PARTS];
MLX_MTL_PRAGMA_UNROLL
for (int i = 0; i < PARTS; ++i) {
  s[i] = four(state + own + 32 * i);
}

for (uint t = 0; t < uint(n_pending); ++t) {
  const uint at = t * WIDTH;
  const float v = float(pending_mixed[at + value]);
  const uint gate = t * Hv + head;
  fold_row<T, PARTS>(s, pending_mixed + at + key, v, pending_decay[gate], pending_beta[gate]);
}
if (keep == 1) {
  store<PARTS>(s, kept + own);
}

for (uint t = 0; t < uint(n_rows); ++t) {
  const uint at = t * WIDTH;
  const float v = float(mixed[at + value]);
  const uint gate = t * Hv + head;
  fold_row<T, PARTS>(s, mixed + at + key, v, decay[gate], beta[gate]);
  const float out = read_row<T, PARTS>(s, mixed + at + query, scale);
  if (column == 0) {
    y[gate * Dv + row] = T(out);
  }
}
if (keep == 2) {
  store<PARTS>(s, kept + own);
}
