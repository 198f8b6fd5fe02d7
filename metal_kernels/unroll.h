// MLX_MTL_PRAGMA_UNROLL before a loop whose variable indexes an array of a thread: kept rolled, such
// a loop puts the array into memory instead of registers. MLX defines it for Metal, and
// cuda_prelude.h for CUDA.
#ifndef MLX_MTL_PRAGMA_UNROLL
#define MLX_MTL_PRAGMA_UNROLL
#endif
