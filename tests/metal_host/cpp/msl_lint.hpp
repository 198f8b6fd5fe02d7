// Declarations for lint.py: clang reads a kernel as C++ for OpenCL, which has Metal's address
// spaces. Only those are looked at; g++ and metal_host.hpp see to the types.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef half float16_t;
typedef half bfloat;
typedef half bfloat16_t;  // bfloat rules are checked by g++
typedef half bfloat2 __attribute__((ext_vector_type(2)));
typedef half bfloat4 __attribute__((ext_vector_type(4)));
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <class T> struct atomic {
  T v;
};
typedef atomic<int> msl_atomic_int;
typedef atomic<uint> msl_atomic_uint;
typedef atomic<float> msl_atomic_float;
#define atomic_int msl_atomic_int
#define atomic_uint msl_atomic_uint
#define atomic_float msl_atomic_float
enum msl_order { msl_relaxed };
#define memory_order_relaxed msl_relaxed
#define MSL_SPACES(M) M(__global) M(__local)
#define M(S)                                                                                    \
  template <class T, class U> T atomic_fetch_add_explicit(volatile S atomic<T>*, U, msl_order); \
  template <class T, class U> T atomic_fetch_or_explicit(volatile S atomic<T>*, U, msl_order);  \
  template <class T, class U> T atomic_fetch_max_explicit(volatile S atomic<T>*, U, msl_order); \
  template <class T, class U> T atomic_fetch_min_explicit(volatile S atomic<T>*, U, msl_order); \
  template <class T, class U> void atomic_store_explicit(volatile S atomic<T>*, U, msl_order);  \
  template <class T> T atomic_load_explicit(const volatile S atomic<T>*, msl_order);
MSL_SPACES(M)
#undef M
namespace mem_flags {
enum t { mem_none, mem_device, mem_threadgroup, mem_texture };
t operator|(t, t);
}  // namespace mem_flags
void threadgroup_barrier(mem_flags::t);
void simdgroup_barrier(mem_flags::t);
#define D1(f) template <class T> T f(T);
#define D2(f) template <class T> T f(T, ushort);
D1(simd_sum)
D1(simd_product)
D1(simd_max)
D1(simd_min)
D1(simd_and)
D1(simd_or)
D1(simd_xor)
D1(simd_prefix_exclusive_sum)
D1(simd_prefix_inclusive_sum)
D1(simd_broadcast_first)
D2(simd_shuffle)
D2(simd_broadcast)
D2(simd_shuffle_xor)
D2(simd_shuffle_up)
D2(simd_shuffle_down)
D2(simd_shuffle_rotate_up)
D2(simd_shuffle_rotate_down)
D2(quad_broadcast)
D2(quad_shuffle_xor)
template <class T> T simd_shuffle_and_fill_up(T, T, ushort);
template <class T> T simd_shuffle_and_fill_down(T, T, ushort);
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();
template <class U, class T> U as_type(T);
template <class T, int R, int C> struct simdgroup_matrix {
  vec<T, 2> el;
  simdgroup_matrix() = default;
  template <class S> explicit simdgroup_matrix(S);
  __private vec<T, 2>& thread_elements() __private;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
#define M(S)                                                                                \
  template <class T> void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const S T*, ulong = 8, \
                                         ulong2 = 0, bool = false);                         \
  template <class T>                                                                        \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, S T*, ulong = 8, ulong2 = 0, bool = false);
MSL_SPACES(M)
#undef M
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                                   simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class T, int R, int C = R> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
template <class D, class A, class B> void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&,
                                                             simdgroup_matrix<A, 8, 8>,
                                                             simdgroup_matrix<B, 8, 8>);
#define MATH \
  D1(exp)    \
  D1(exp2)   \
  D1(log)    \
  D1(log2)   \
  D1(sqrt)   \
  D1(rsqrt)  \
  D1(sin)    \
  D1(cos)    \
  D1(tanh)   \
  D1(abs)    \
  D1(fabs)   \
  D1(floor)  \
  D1(ceil)   \
  D1(rint)   \
  D1(round)  \
  D1(isnan)  \
  D1(isinf)  \
  T2(max) T2(min) T2(pow) T2(divide) T3(fma) T3(clamp)
#define T2(f) template <class T> T f(T, T);
#define T3(f) template <class T> T f(T, T, T);
namespace metal {
MATH namespace fast {
  MATH
}
namespace precise {
MATH
}
using ::as_type;
using ::simd_max;
using ::simd_min;
using ::simd_shuffle;
using ::simd_shuffle_down;
using ::simd_shuffle_xor;
using ::simd_sum;
using ::simdgroup_matrix;
using ::vec;
}  // namespace metal
namespace fast = metal::fast;
namespace precise = metal::precise;
int64_t elem_to_loc(uint, constant const int*, constant const int64_t*, int);
// Constructors: any arguments (component counts are checked by g++).
template <class... A> float2 msl_float2(A...);
#define float2(...) msl_float2(__VA_ARGS__)
template <class... A> float3 msl_float3(A...);
#define float3(...) msl_float3(__VA_ARGS__)
template <class... A> float4 msl_float4(A...);
#define float4(...) msl_float4(__VA_ARGS__)
template <class... A> half2 msl_half2(A...);
#define half2(...) msl_half2(__VA_ARGS__)
template <class... A> half4 msl_half4(A...);
#define half4(...) msl_half4(__VA_ARGS__)
template <class... A> uint2 msl_uint2(A...);
#define uint2(...) msl_uint2(__VA_ARGS__)
template <class... A> uint3 msl_uint3(A...);
#define uint3(...) msl_uint3(__VA_ARGS__)
template <class... A> uint4 msl_uint4(A...);
#define uint4(...) msl_uint4(__VA_ARGS__)
template <class... A> int2 msl_int2(A...);
#define int2(...) msl_int2(__VA_ARGS__)
template <class... A> int4 msl_int4(A...);
#define int4(...) msl_int4(__VA_ARGS__)
template <class... A> ulong2 msl_ulong2(A...);
#define ulong2(...) msl_ulong2(__VA_ARGS__)
#define METAL_FUNC inline
#define device __global
#define threadgroup __local
#define thread __private
