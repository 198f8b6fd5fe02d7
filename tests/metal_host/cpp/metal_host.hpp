// The Metal Shading Language that custom MLX kernels use, as C++20 for g++ on Linux. A kernel's
// text is compiled as it is: address spaces and the like are macros, so include nothing after this.
#pragma once
#include "msl_atomics.hpp"
#include "msl_matrix.hpp"
#include "msl_simd.hpp"

#undef INFINITY
#define INFINITY __builtin_inff()
#undef NAN
#define NAN __builtin_nanf("")
#undef M_PI_F
#define M_PI_F 3.14159274101257324f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define HALF_MAX 65504.0f
#undef FLT_MAX
#define FLT_MAX __FLT_MAX__
#define METAL_FUNC inline
#define MLX_MTL_PRAGMA_UNROLL
#define MLX_MTL_LOOP_UNROLL
#define __METAL_VERSION__ 310
#define device
#define constant
#define threadgroup
#define thread
#define kernel
#ifdef MH_CHECKED
// As Metal does; then more is known of what a pointer into a private array points to.
#define inline inline __attribute__((always_inline))
#endif
