// What the text of a Metal kernel needs on an NVIDIA GPU, in C++17 without any header.
//
// mx.fast.cuda_kernel compiles with NVRTC, functions being device functions unless they say
// otherwise. cuda_form.py puts the kernel's helpers and body behind this text, in the same
// namespace, after it has removed the address-space words (device, constant, threadgroup, thread)
// and turned threadgroup arrays into __shared__ ones.
//
// Kept as on Metal: which type an expression has (bfloat16_t and half compute as float beside a
// float, and round once beside their own kind), the order of simd_sum, exact fma, and functions
// that are never the approximate ones. Missing on purpose, since kernels here do without: swizzles,
// atomics, textures, simdgroup_matrix, and simd functions under a condition that differs in a group.
namespace metal {

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using int8_t = signed char;
using uint8_t = uchar;
using int16_t = short;
using uint16_t = ushort;
using int32_t = int;
using uint32_t = uint;
using int64_t = long;
using uint64_t = ulong;
using size_t = ulong;

#undef INFINITY
#undef NAN
#define INFINITY __builtin_bit_cast(float, 0x7f800000u)
#define NAN __builtin_bit_cast(float, 0x7fc00000u)
#define METAL_FUNC inline
#define MLX_MTL_PRAGMA_UNROLL _Pragma("unroll")

template <typename To, typename From>
constexpr To as_type(From value) { return __builtin_bit_cast(To, value); }

// ---------------------------------------------------------------------------- 16-bit floats
// A float becomes a bfloat16_t by an explicit cast alone, as on Metal; rounding is to nearest even.
struct bfloat16_t {
  ushort bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    const uint u = as_type<uint>(value);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = ushort(nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  template <typename I, typename = decltype(I() % 1)>
  bfloat16_t(I whole) : bfloat16_t(float(whole)) {}
  operator float() const { return as_type<float>(uint(bits) << 16); }
};
using bfloat = bfloat16_t;

struct half {
  ushort bits;
  half() = default;
  half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};
using float16_t = half;

template <typename T>
struct sixteen {};
template <>
struct sixteen<bfloat16_t> {
  using type = bfloat16_t;
};
template <>
struct sixteen<half> {
  using type = half;
};
// Templates, so that nothing is converted to match them: a bfloat16_t times a float is a float.
#define LSE_ROUNDED(op)                                 \
  template <typename T>                                 \
  inline typename sixteen<T>::type operator op(T a, T b) { \
    return T(float(a) op float(b));                     \
  }
LSE_ROUNDED(+) LSE_ROUNDED(-) LSE_ROUNDED(*) LSE_ROUNDED(/)
#undef LSE_ROUNDED
inline bfloat16_t operator-(bfloat16_t a) { return bfloat16_t(-float(a)); }
inline half operator-(half a) { return half(-float(a)); }

// ---------------------------------------------------------------------------------- vectors
// Aligned as on Metal, so that a float4 is one 16-byte load. An index that is no constant after
// unrolling would put a vector into memory: kernels here index by constants.
template <typename T, int N>
struct vec;

template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  vec(T all) : x(all), y(all) {}
  vec(T x, T y) : x(x), y(y) {}
  template <typename U>
  explicit vec(const vec<U, 2>& v) : x(T(v.x)), y(T(v.y)) {}
  T& operator[](int i) { return i == 0 ? x : y; }
  const T& operator[](int i) const { return i == 0 ? x : y; }
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  vec(T all) : x(all), y(all), z(all) {}
  vec(T x, T y, T z) : x(x), y(y), z(z) {}
  T& operator[](int i) { return i == 0 ? x : i == 1 ? y : z; }
  const T& operator[](int i) const { return i == 0 ? x : i == 1 ? y : z; }
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  vec(T all) : x(all), y(all), z(all), w(all) {}
  vec(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
  template <typename U>
  explicit vec(const vec<U, 4>& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  T& operator[](int i) { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
  const T& operator[](int i) const { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
};

// A number beside a vector stands for a vector of it. `same` keeps it out of the deduction of T.
template <typename T>
struct same {
  using type = T;
};
#define LSE_VECTOR(op)                                                        \
  template <typename T, int N>                                                \
  inline vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {      \
    vec<T, N> out;                                                            \
    for (int i = 0; i < N; ++i) out[i] = T(a[i] op b[i]);                     \
    return out;                                                               \
  }                                                                           \
  template <typename T, int N>                                                \
  inline vec<T, N> operator op(const vec<T, N>& a, typename same<T>::type b) { \
    return a op vec<T, N>(b);                                                 \
  }                                                                           \
  template <typename T, int N>                                                \
  inline vec<T, N> operator op(typename same<T>::type a, const vec<T, N>& b) { \
    return vec<T, N>(a) op b;                                                 \
  }                                                                           \
  template <typename T, int N>                                                \
  inline vec<T, N>& operator op##=(vec<T, N>& a, const vec<T, N>& b) {        \
    return a = a op b;                                                        \
  }                                                                           \
  template <typename T, int N>                                                \
  inline vec<T, N>& operator op##=(vec<T, N>& a, typename same<T>::type b) {  \
    return a = a op b;                                                        \
  }
LSE_VECTOR(+) LSE_VECTOR(-) LSE_VECTOR(*) LSE_VECTOR(/) LSE_VECTOR(&) LSE_VECTOR(|)
LSE_VECTOR(<<) LSE_VECTOR(>>)
#undef LSE_VECTOR

#define LSE_TYPES(type) \
  using type##2 = vec<type, 2>; using type##3 = vec<type, 3>; using type##4 = vec<type, 4>;
LSE_TYPES(float) LSE_TYPES(half) LSE_TYPES(bfloat) LSE_TYPES(char) LSE_TYPES(uchar)
LSE_TYPES(short) LSE_TYPES(ushort) LSE_TYPES(int) LSE_TYPES(uint)
#undef LSE_TYPES

// ------------------------------------------------------------------------------------- math
#define LSE_FLOAT(name, value) \
  inline float name(float x) { return value; }
LSE_FLOAT(exp, ::expf(x)) LSE_FLOAT(exp2, ::exp2f(x)) LSE_FLOAT(log, ::logf(x))
LSE_FLOAT(log2, ::log2f(x)) LSE_FLOAT(sqrt, ::sqrtf(x)) LSE_FLOAT(rsqrt, 1.0f / ::sqrtf(x))
LSE_FLOAT(sin, ::sinf(x)) LSE_FLOAT(cos, ::cosf(x)) LSE_FLOAT(tanh, ::tanhf(x))
LSE_FLOAT(floor, ::floorf(x)) LSE_FLOAT(ceil, ::ceilf(x)) LSE_FLOAT(trunc, ::truncf(x))
LSE_FLOAT(rint, ::rintf(x)) LSE_FLOAT(round, ::roundf(x)) LSE_FLOAT(fabs, ::fabsf(x))
LSE_FLOAT(log1p, ::log1pf(x)) LSE_FLOAT(expm1, ::expm1f(x))
#undef LSE_FLOAT
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return ::fabsf(x) == INFINITY; }
inline bool isfinite(float x) { return ::fabsf(x) < INFINITY; }
inline float pow(float x, float y) { return ::powf(x, y); }
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float fmin(float a, float b) { return ::fminf(a, b); }
inline float fmax(float a, float b) { return ::fmaxf(a, b); }
// A NaN gives way to a number, as on Metal.
inline float min(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return ::fmaxf(a, b); }
template <typename T>
inline T min(T a, T b) { return b < a ? b : a; }
template <typename T>
inline T max(T a, T b) { return a < b ? b : a; }
template <typename T>
inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T>
inline T abs(T x) { return x < T(0) ? T(-x) : x; }
inline float abs(float x) { return ::fabsf(x); }
template <typename T>
inline T select(T no, T yes, bool which) { return which ? yes : no; }
inline uint popcount(uint x) { return uint(__popc(x)); }
inline uint clz(uint x) { return uint(__clz(int(x))); }

template <int N>
inline vec<float, N> fma(const vec<float, N>& a, const vec<float, N>& b, const vec<float, N>& c) {
  vec<float, N> out;
  for (int i = 0; i < N; ++i) out[i] = fma(a[i], b[i], c[i]);
  return out;
}
template <int N>
inline vec<float, N> exp(const vec<float, N>& x) {
  vec<float, N> out;
  for (int i = 0; i < N; ++i) out[i] = exp(x[i]);
  return out;
}

namespace precise {
using metal::exp; using metal::exp2; using metal::log; using metal::log2; using metal::sqrt;
using metal::rsqrt; using metal::sin; using metal::cos; using metal::tanh; using metal::pow;
}  // namespace precise

// --------------------------------------------------------------- threadgroups and SIMD groups
// A warp is a SIMD group: 32 threads, numbered the same way. Every thread of it takes part.
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
inline void simdgroup_barrier(mem_flags) { __syncwarp(); }

constexpr uint LSE_WARP = 0xffffffffu;

// Any plain value through shuffles of 32-bit words.
template <typename T, typename Shuffle>
inline T lse_words(T value, Shuffle shuffle) {
  constexpr int n = (sizeof(T) + 3) / 4;
  uint words[n] = {};
  memcpy(words, &value, sizeof(T));
  for (int i = 0; i < n; ++i) words[i] = shuffle(words[i]);
  memcpy(&value, words, sizeof(T));
  return value;
}
template <typename T>
inline T simd_shuffle(T v, ushort lane) {
  return lse_words(v, [=](uint w) { return __shfl_sync(LSE_WARP, w, lane); });
}
template <typename T>
inline T simd_broadcast(T v, ushort lane) { return simd_shuffle(v, lane); }
template <typename T>
inline T simd_broadcast_first(T v) { return simd_shuffle(v, 0); }
template <typename T>
inline T simd_shuffle_xor(T v, ushort mask) {
  return lse_words(v, [=](uint w) { return __shfl_xor_sync(LSE_WARP, w, mask); });
}
template <typename T>
inline T simd_shuffle_down(T v, ushort by) {
  return lse_words(v, [=](uint w) { return __shfl_down_sync(LSE_WARP, w, by); });
}
template <typename T>
inline T simd_shuffle_up(T v, ushort by) {
  return lse_words(v, [=](uint w) { return __shfl_up_sync(LSE_WARP, w, by); });
}

// Reductions are the ascending butterfly: lanes 1 apart first, then 2, 4, 8, 16. Addition being
// commutative, every lane ends with the same bits.
#define LSE_BUTTERFLY(name, value)                                           \
  template <typename T>                                                      \
  inline T name(T a) {                                                       \
    for (int step = 1; step < 32; step *= 2) {                               \
      const T b = simd_shuffle_xor(a, ushort(step));                         \
      a = value;                                                             \
    }                                                                        \
    return a;                                                                \
  }
LSE_BUTTERFLY(simd_sum, T(a + b)) LSE_BUTTERFLY(simd_product, T(a * b))
LSE_BUTTERFLY(simd_max, max(a, b)) LSE_BUTTERFLY(simd_min, min(a, b))
LSE_BUTTERFLY(simd_or, T(a | b)) LSE_BUTTERFLY(simd_and, T(a & b))
#undef LSE_BUTTERFLY
inline bool simd_any(bool b) { return __any_sync(LSE_WARP, b); }
inline bool simd_all(bool b) { return __all_sync(LSE_WARP, b); }

}  // namespace metal
