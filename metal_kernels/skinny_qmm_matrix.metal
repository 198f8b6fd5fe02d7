// y = x W^T for up to eight rows of x and affine codes W, which are read once for all rows: the
// form on simdgroup_matrix. `skinny_qmm` is the same product without it.
//
// Inputs, output: as of `skinny_qmm`
//   x T [rows, K], weight uint32 [N, K BITS / 32], scales S [N, K / GROUP], biases S [N, K / GROUP],
//   split int32; out T [rows, N]
// Template
//   T, S, BITS, GROUP: as of `skinny_qmm`
// Grid
//   (256 ceil(N split / 256), ceil(rows / 8), 1) threads in threadgroups of (256, 1, 1)
//
// Layout: eight SIMD groups a threadgroup, each with a tile of 32 outputs and one of the `split` parts
// of K. A SIMD group multiplies four 8 x 8 matrices of weights (outputs by k) with one 8 x 8 matrix
// of x (k by rows) at a time; the four 8 x 8 sums stay in registers for all of K. A lane makes its two
// elements of each matrix itself, from 16 bytes of codes or four values of x read at once, and no
// matrix passes through memory: that takes the place of an element in its lane from the layout that
// MLX's own kernels rely on. A sum over k may take k in any order, so column 2 q + e of matrix j
// stands for k = VALUES q + VALUES / 2 e + j of a run of 4 VALUES: then what a lane needs for
// VALUES / 2 products lies side by side.
//
// What it saves against the plain form: an x is read and converted once for 32 outputs and not for
// four, and a lane holds 8 sums and not 32 (about 60 registers in all). What it costs: the
// arithmetic of eight rows, however few there are. For each weight 8 fma (inside the matrix unit),
// 4.5 operations to make it, and 1 / 16 load of x: 12.5 operations, 22 a byte at 4 bits.
//
// Order of summation: sums of products over k in the order of the matrices j = 0, 1, ..., eight k
// at a time in the order of the hardware, runs of part p ascending; then parts 0, 1, ... . A row's
// bits depend on its own x, W, BITS and `split` only, if the hardware takes all columns of a matrix
// alike. They need not equal those of `skinny_qmm`.

#include <metal_simdgroup_matrix>

#include "affine_codes.h"
#include "unroll.h"

inline simdgroup_matrix<float, 8, 8> matrix_of(float first, float second) {
  simdgroup_matrix<float, 8, 8> matrix;
  reinterpret_cast<thread float2&>(matrix.thread_elements()) = float2(first, second);
  return matrix;
}

//// body
constexpr int VALUES = 128 / BITS;
constexpr int HALF = VALUES / 2;
constexpr int SPAN = 4 * VALUES;
constexpr int BLOCKS = 4;
constexpr int TILE = 8 * BLOCKS;
constexpr int PER_WORD = 32 / BITS;
threadgroup float partial[8 * TILE * 8];

const int tiles = 8 / split;
const int width = x_shape[1];
const int rows = x_shape[0];
const int outs = weight_shape[0];
const int row_words = width / PER_WORD;
const int row_groups = width / GROUP;
const int part = int(simdgroup_index_in_threadgroup) % split;
const int tile = int(simdgroup_index_in_threadgroup) / split;
const int lane = int(thread_index_in_simdgroup);
// Row, and half of the first of the two columns, of this lane's elements.
const int down = ((lane / 4) & 4) + (lane / 2) % 4;
const int pair = ((lane / 4) & 2) + lane % 2;
const int first_out = int(threadgroup_position_in_grid.x) * tiles * TILE;
const int first_row = int(threadgroup_position_in_grid.y) * 8;

// Outputs and rows that are not there are read as the last one, and not written.
int outputs[BLOCKS];
simdgroup_matrix<float, 8, 8> sums[BLOCKS];
MLX_MTL_PRAGMA_UNROLL
for (int t = 0; t < BLOCKS; ++t) {
  outputs[t] = min(first_out + tile * TILE + 8 * t + down, outs - 1);
  sums[t] = matrix_of(0.0f, 0.0f);
}
const int start0 = min(first_row + 2 * pair, rows - 1) * width;
const int start1 = min(first_row + 2 * pair + 1, rows - 1) * width;

for (int run = part * SPAN; run < width; run += split * SPAN) {
  // K may end inside a run; what lies behind it counts as zeros, whatever is read for it.
  const int k = run + pair * VALUES;
  const bool inside = k < width;
  uint4 words[BLOCKS];
  float scale[BLOCKS];
  float bias[BLOCKS];
  MLX_MTL_PRAGMA_UNROLL
  for (int t = 0; t < BLOCKS; ++t) {
    const int from = inside ? k : 0;
    words[t] = *(const device uint4*)(weight + outputs[t] * row_words + from / PER_WORD);
    const int group = outputs[t] * row_groups + from / GROUP;
    scale[t] = inside ? float(scales[group]) : 0.0f;
    bias[t] = inside ? float(biases[group]) : 0.0f;
  }
  const int x_run = run + (down / 2) * VALUES;
  const int x_k = x_run + (down % 2) * HALF;
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < HALF / 4; ++j) {
    float4 x0 = float4(0.0f);
    float4 x1 = float4(0.0f);
    if (x_run < width) {
      x0 = four_values(x + start0 + x_k + 4 * j);
      x1 = four_values(x + start1 + x_k + 4 * j);
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int t = 0; t < BLOCKS; ++t) {
      const float4 s = float4(scale[t]);
      const float4 b = float4(bias[t]);
      const float4 w0 = fma(four_codes<BITS>(words[t], j), s, b);
      const float4 w1 = fma(four_codes<BITS>(words[t], HALF / 4 + j), s, b);
      MLX_MTL_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const simdgroup_matrix<float, 8, 8> w = matrix_of(w0[i], w1[i]);
        const simdgroup_matrix<float, 8, 8> v = matrix_of(x0[i], x1[i]);
        simdgroup_multiply_accumulate(sums[t], w, v, sums[t]);
      }
    }
  }
}

MLX_MTL_PRAGMA_UNROLL
for (int t = 0; t < BLOCKS; ++t) {
  const float2 sum = reinterpret_cast<thread float2&>(sums[t].thread_elements());
  const int at = ((tile * split + part) * TILE + 8 * t + down) * 8 + 2 * pair;
  partial[at] = sum.x;
  partial[at + 1] = sum.y;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int i = int(thread_index_in_threadgroup); i < tiles * TILE * 8; i += 256) {
  const int n = i % (tiles * TILE);
  const int m = i / (tiles * TILE);
  const int at = ((n / TILE) * split * TILE + n % TILE) * 8 + m;
  float sum = partial[at];
  for (int p = 1; p < split; ++p) {
    sum += partial[at + p * TILE * 8];
  }
  if (first_out + n < outs && first_row + m < rows) {
    out[(first_row + m) * outs + first_out + n] = T(sum);
  }
}
