// y = x W^T for up to eight rows of x and affine codes W, which are read once for all rows: the
// form that needs nothing but SIMD groups.
//
// Inputs
//   x        T [rows, K]                    any number of rows; ROWS of them to a threadgroup
//   weight   uint32 [N, K BITS / 32]        codes, lowest bits first; 8 words or more
//   scales   S [N, K / GROUP]               a weight is scale * code + bias
//   biases   S [N, K / GROUP]
//   split    int32, no dimensions           1, 2, 4 or 8: into how many parts K is cut; it must not
//                                           depend on the rows
// Output
//   out      T [rows, N]
// Template
//   T, S: float, half or bfloat16_t; BITS 4 or 8; GROUP a multiple of 32; K a multiple of GROUP
//   ROWS: 1, 2, 4 or 8, the first that holds the rows of the pass (8 if none does)
// Grid
//   (256 ceil(N split / 128), ceil(rows / ROWS), 1) threads in threadgroups of (256, 1, 1)
//
// Layout: eight SIMD groups a threadgroup, each with a tile of 16 outputs and one of the `split`
// parts of K, so 128 / split outputs a threadgroup. In a SIMD group eight lanes lie along K and four
// across outputs, and a lane has four outputs. A lane reads 16 bytes of a weight row at once, its
// seven neighbours the bytes behind it: 128 bytes in one line, 32 or 16 weights a lane, all in one
// group of codes, so one scale and one bias serve them. The four lanes across outputs read the same
// x, which is one read of the cache for them.
// With few outputs there would be too few threadgroups to keep memory busy: then `split` grows.
//
// Why a weight is multiplied out, fma(code, scale, bias), before it meets x, and not folded into
// scale * sum(code x) + bias * sum(x): with eight rows the sums of x and the two products a row and
// run cost more than one fma a weight, and the two terms are up to sixteen times what is left of
// them (codes of weights around zero have a bias of about -8 scales), so folding loses bits.
//
// Registers of a lane at ROWS = 8: 32 sums, 16 weights, 16 words of codes, 8 scales and biases, 4 of
// x, the rest addresses: about 90.
//
// Budget for each weight at 4 bits, groups of 64 and 16-bit scales: 0.5625 bytes; ROWS fma, 4.5
// operations to make the weight, ROWS / 4 conversions of 16-bit x and ROWS / 16 loads of x. With
// eight rows that is 15 operations, 27 a byte; a GPU of 4 T operations and 273 GB/s has 15 a byte. So
// one row, and two, wait for memory; eight rows wait for arithmetic, at a bit over half the memory's
// rate. The matrix form spends less on x.
//
// Order of summation, the same for every ROWS: lane l of part p of K adds, by one fma a weight from k
// ascending, the runs of 128 / BITS weights number 8 (p + split t) + l for t = 0, 1, ...; then lanes
// 1, 2 and 4 apart are added; then parts 0, 1, ... . A row's bits depend on its own x, W, BITS and
// `split` only: not on how many rows there are, nor on its place among them.

#include "affine_codes.h"
#include "unroll.h"

//// body
constexpr int VALUES = 128 / BITS;
constexpr int SPAN = 8 * VALUES;
constexpr int OUTS = 4;
constexpr int TILE = 4 * OUTS;
constexpr int PER_WORD = 32 / BITS;
threadgroup float partial[8 * TILE * ROWS];

const int tiles = 8 / split;
const int width = x_shape[1];
const int rows = x_shape[0];
const int outs = weight_shape[0];
const int row_words = width / PER_WORD;
const int row_groups = width / GROUP;
const int part = int(simdgroup_index_in_threadgroup) % split;
const int tile = int(simdgroup_index_in_threadgroup) / split;
const int along = int(thread_index_in_simdgroup) % 8;
const int across = int(thread_index_in_simdgroup) / 8;
const int first_out = int(threadgroup_position_in_grid.x) * tiles * TILE;
const int first_row = int(threadgroup_position_in_grid.y) * ROWS;

// Outputs and rows that are not there are read as the last one, and not written.
int outputs[OUTS];
MLX_MTL_PRAGMA_UNROLL
for (int r = 0; r < OUTS; ++r) {
  outputs[r] = min(first_out + tile * TILE + 4 * r + across, outs - 1);
}
int starts[ROWS];
MLX_MTL_PRAGMA_UNROLL
for (int m = 0; m < ROWS; ++m) {
  starts[m] = min(first_row + m, rows - 1) * width;
}

float sums[OUTS][ROWS];
MLX_MTL_PRAGMA_UNROLL
for (int r = 0; r < OUTS; ++r) {
  MLX_MTL_PRAGMA_UNROLL
  for (int m = 0; m < ROWS; ++m) {
    sums[r][m] = 0.0f;
  }
}
for (int k = part * SPAN + along * VALUES; k < width; k += split * SPAN) {
  uint4 words[OUTS];
  float scale[OUTS];
  float bias[OUTS];
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < OUTS; ++r) {
    words[r] = *(const device uint4*)(weight + outputs[r] * row_words + k / PER_WORD);
    const int group = outputs[r] * row_groups + k / GROUP;
    scale[r] = float(scales[group]);
    bias[r] = float(biases[group]);
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < VALUES / 4; ++j) {
    float4 weights[OUTS];
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < OUTS; ++r) {
      weights[r] = fma(four_codes<BITS>(words[r], j), float4(scale[r]), float4(bias[r]));
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int m = 0; m < ROWS; ++m) {
      const float4 values = four_values(x + starts[m] + k + 4 * j);
      MLX_MTL_PRAGMA_UNROLL
      for (int r = 0; r < OUTS; ++r) {
        float sum = sums[r][m];
        sum = fma(weights[r].x, values.x, sum);
        sum = fma(weights[r].y, values.y, sum);
        sum = fma(weights[r].z, values.z, sum);
        sums[r][m] = fma(weights[r].w, values.w, sum);
      }
    }
  }
}

MLX_MTL_PRAGMA_UNROLL
for (int r = 0; r < OUTS; ++r) {
  MLX_MTL_PRAGMA_UNROLL
  for (int m = 0; m < ROWS; ++m) {
    float sum = sums[r][m];
    sum += simd_shuffle_xor(sum, ushort(1));
    sum += simd_shuffle_xor(sum, ushort(2));
    sum += simd_shuffle_xor(sum, ushort(4));
    if (along == m) {
      partial[((tile * split + part) * TILE + 4 * r + across) * ROWS + m] = sum;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int i = int(thread_index_in_threadgroup); i < tiles * TILE * ROWS; i += 256) {
  const int n = i % (tiles * TILE);
  const int m = i / (tiles * TILE);
  const int at = ((n / TILE) * split * TILE + n % TILE) * ROWS + m;
  float sum = partial[at];
  for (int p = 1; p < split; ++p) {
    sum += partial[at + p * TILE * ROWS];
  }
  if (first_out + n < outs && first_row + m < rows) {
    out[(first_row + m) * outs + first_out + n] = T(sum);
  }
}
