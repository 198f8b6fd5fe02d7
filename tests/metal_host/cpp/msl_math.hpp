// Metal's arithmetic on scalars and vectors, and what MLX puts before every kernel.
#pragma once
#include "msl_vectors.hpp"

namespace metal {
// Float functions are the correctly rounded-ish libm ones; half and bfloat go
// through float and round once.  fast:: and precise:: are the same functions.
#define MH_F1(name, expr)                                               \
  inline float name(float x) {                                          \
    return expr;                                                        \
  }                                                                     \
  inline half name(half x) {                                            \
    return half(name(float(x)));                                        \
  }                                                                     \
  inline bfloat name(bfloat x) {                                        \
    return bfloat(name(float(x)));                                      \
  }                                                                     \
  template <class T, int N> inline vec<T, N> name(const vec<T, N>& v) { \
    vec<T, N> r;                                                        \
    for (int i = 0; i < N; ++i) r[i] = name(v[i]);                      \
    return r;                                                           \
  }
MH_F1(exp, ::expf(x))
MH_F1(exp2, ::exp2f(x))
MH_F1(exp10, ::powf(10.0f, x))
MH_F1(log, ::logf(x))
MH_F1(log2, ::log2f(x))
MH_F1(log10, ::log10f(x))
MH_F1(sqrt, ::sqrtf(x))
MH_F1(rsqrt, 1.0f / ::sqrtf(x))
MH_F1(sin, ::sinf(x))
MH_F1(cos, ::cosf(x))
MH_F1(tan, ::tanf(x))
MH_F1(asin, ::asinf(x))
MH_F1(acos, ::acosf(x))
MH_F1(atan, ::atanf(x))
MH_F1(sinh, ::sinhf(x))
MH_F1(cosh, ::coshf(x))
MH_F1(tanh, ::tanhf(x))
MH_F1(asinh, ::asinhf(x))
MH_F1(acosh, ::acoshf(x))
MH_F1(atanh, ::atanhf(x))
MH_F1(floor, ::floorf(x))
MH_F1(ceil, ::ceilf(x))
MH_F1(trunc, ::truncf(x))
MH_F1(rint, ::rintf(x))
MH_F1(round, ::roundf(x))
MH_F1(fabs, ::fabsf(x))
MH_F1(fract, x - ::floorf(x))
MH_F1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x)
MH_F1(saturate, x != x ? 0.0f : x < 0 ? 0.0f : x > 1 ? 1.0f : x)
// log1p and expm1 are MLX's, not MSL's
MH_F1(expm1, ::expm1f(x))
MH_F1(log1p, ::log1pf(x))
#undef MH_F1
#define MH_P1(name, expr)                                                  \
  inline bool name(float x) {                                              \
    return expr;                                                           \
  }                                                                        \
  inline bool name(half x) {                                               \
    return name(float(x));                                                 \
  }                                                                        \
  inline bool name(bfloat x) {                                             \
    return name(float(x));                                                 \
  }                                                                        \
  template <class T, int N> inline vec<bool, N> name(const vec<T, N>& v) { \
    vec<bool, N> r;                                                        \
    for (int i = 0; i < N; ++i) r[i] = name(v[i]);                         \
    return r;                                                              \
  }
MH_P1(isnan, x != x)
MH_P1(isinf, ::fabsf(x) == __builtin_inff())
MH_P1(isfinite, ::fabsf(x) < __builtin_inff())
MH_P1(signbit, as_type<uint>(x) >> 31)
MH_P1(isnormal, ::fabsf(x) < __builtin_inff() && ::fabsf(x) >= 1.17549435e-38f)
#undef MH_P1
#define MH_F2(name, expr)                                                                   \
  inline float name(float x, float y) {                                                     \
    return expr;                                                                            \
  }                                                                                         \
  inline half name(half x, half y) {                                                        \
    return half(name(float(x), float(y)));                                                  \
  }                                                                                         \
  inline bfloat name(bfloat x, bfloat y) {                                                  \
    return bfloat(name(float(x), float(y)));                                                \
  }                                                                                         \
  template <class T, int N> inline vec<T, N> name(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<T, N> r;                                                                            \
    for (int i = 0; i < N; ++i) r[i] = name(a[i], b[i]);                                    \
    return r;                                                                               \
  }
MH_F2(pow, ::powf(x, y))
MH_F2(powr, ::powf(x, y))
MH_F2(atan2, ::atan2f(x, y))
MH_F2(fmod, ::fmodf(x, y))
MH_F2(copysign, ::copysignf(x, y))
MH_F2(fmin, ::fminf(x, y))
MH_F2(fmax, ::fmaxf(x, y))
MH_F2(divide, x / y)
MH_F2(step, y < x ? 0.0f : 1.0f)
MH_F2(fdim, ::fdimf(x, y))
#undef MH_F2
template <Integral T> constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <Integral T> constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <Floating T> inline T min(T a, T b) {
  return a != a ? b : b != b ? a : b < a ? b : a;
}
template <Floating T> inline T max(T a, T b) {
  return a != a ? b : b != b ? a : a < b ? b : a;
}
template <Scalar T> inline T min3(T a, T b, T c) {
  return min(a, min(b, c));
}
template <Scalar T> inline T max3(T a, T b, T c) {
  return max(a, max(b, c));
}
template <Scalar T> inline T clamp(T x, T lo, T hi) {
  return min(max(x, lo), hi);
}
template <Integral T> constexpr T abs(T x) {
  return x < T(0) ? T(-x) : x;
}
template <Floating T> inline T abs(T x) {
  return fabs(x);
}
template <Floating T> inline T fma(T a, T b, T c) {
  return T(::fmaf(float(a), float(b), float(c)));
}
template <Floating T> inline T mad(T a, T b, T c) {
  return T(a * b + c);
}
template <Floating T> inline T mix(T a, T b, T t) {
  return T(a + (b - a) * t);
}
template <Floating T> inline T smoothstep(T a, T b, T x) {
  T t = clamp(T((x - a) / (b - a)), T(0), T(1));
  return T(t * t * (T(3) - T(2) * t));
}
template <Floating T> inline T ldexp(T x, int e) {
  return T(::ldexpf(float(x), e));
}
template <Floating T> inline T frexp(T x, int& e) {
  return T(::frexpf(float(x), &e));
}
template <Floating T> inline T modf(T x, T& i) {
  float f;
  float r = ::modff(float(x), &f);
  i = T(f);
  return T(r);
}
template <Scalar T> inline T select(T a, T b, bool c) {
  return c ? b : a;
}
template <Integral T> constexpr T popcount(T x) {
  return T(__builtin_popcountll(std::make_unsigned_t<T>(x)));
}
template <Integral T> constexpr T clz(T x) {
  using U = std::make_unsigned_t<T>;
  return x == 0 ? T(sizeof(T) * 8) : T(__builtin_clzll(U(x)) - int(64 - sizeof(T) * 8));
}
template <Integral T> constexpr T ctz(T x) {
  using U = std::make_unsigned_t<T>;
  return x == 0 ? T(sizeof(T) * 8) : T(__builtin_ctzll(U(x)));
}
template <Integral T> constexpr T reverse_bits(T x) {
  using U = std::make_unsigned_t<T>;
  U u = U(x), r = 0;
  for (unsigned i = 0; i < sizeof(T) * 8; ++i) r |= U((u >> i) & 1u) << (sizeof(T) * 8 - 1 - i);
  return T(r);
}
template <Integral T> constexpr T mulhi(T a, T b) {
  return T((__int128(a) * __int128(b)) >> (sizeof(T) * 8));
}
template <Integral T> constexpr T extract_bits(T x, uint off, uint n) {
  using U = std::make_unsigned_t<T>;
  if (!n) return T(0);
  U u = U(U(x) << (sizeof(T) * 8 - off - n));
  return T(T(u) >> (sizeof(T) * 8 - n));
}
template <Integral T> constexpr T insert_bits(T base, T ins, uint off, uint n) {
  using U = std::make_unsigned_t<T>;
  U m = n >= sizeof(T) * 8 ? U(~U(0)) : U((U(1) << n) - 1);
  return T((U(base) & ~U(m << off)) | U((U(ins) & m) << off));
}
template <Integral T> constexpr T rotate(T x, T s) {
  using U = std::make_unsigned_t<T>;
  unsigned k = unsigned(s) % (sizeof(T) * 8);
  return k ? T(U(U(x) << k) | U(U(x) >> (sizeof(T) * 8 - k))) : x;
}
template <Integral T> constexpr T absdiff(T a, T b) {
  return a < b ? T(b - a) : T(a - b);
}
#define MH_V(name, params, args)                           \
  template <class T, int N> inline vec<T, N> name params { \
    vec<T, N> r;                                           \
    for (int i = 0; i < N; ++i) r[i] = name args;          \
    return r;                                              \
  }
#define MH_A const vec<T, N>& a
#define MH_B const vec<T, N>& b
#define MH_C const vec<T, N>& c
MH_V(min, (MH_A, MH_B), (a[i], b[i]))
MH_V(max, (MH_A, MH_B), (a[i], b[i]))
MH_V(abs, (MH_A), (a[i]))
MH_V(popcount, (MH_A), (a[i]))
MH_V(clz, (MH_A), (a[i]))
MH_V(ctz, (MH_A), (a[i]))
MH_V(clamp, (MH_A, MH_B, MH_C), (a[i], b[i], c[i]))
MH_V(fma, (MH_A, MH_B, MH_C), (a[i], b[i], c[i]))
MH_V(mad, (MH_A, MH_B, MH_C), (a[i], b[i], c[i]))
MH_V(mix, (MH_A, MH_B, MH_C), (a[i], b[i], c[i]))
MH_V(min, (MH_A, T s), (a[i], s))
MH_V(max, (MH_A, T s), (a[i], s))
MH_V(clamp, (MH_A, T lo, T hi), (a[i], lo, hi))
MH_V(select, (MH_A, MH_B, const vec<bool, N>& c), (a[i], b[i], c[i]))
#undef MH_V
#undef MH_A
#undef MH_B
#undef MH_C
template <class T, int N> inline T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T s = T(a[0] * b[0]);
  for (int i = 1; i < N; ++i) s = T(s + a[i] * b[i]);
  return s;
}
template <class T, int N> inline T length_squared(const vec<T, N>& a) {
  return dot(a, a);
}
template <class T, int N> inline T length(const vec<T, N>& a) {
  return sqrt(dot(a, a));
}
template <int N> inline bool any(const vec<bool, N>& a) {
  bool r = false;
  for (int i = 0; i < N; ++i) r |= a[i];
  return r;
}
template <int N> inline bool all(const vec<bool, N>& a) {
  bool r = true;
  for (int i = 0; i < N; ++i) r &= a[i];
  return r;
}
#define MH_ALIAS(ns)     \
  namespace ns {         \
  using metal::exp;      \
  using metal::exp2;     \
  using metal::exp10;    \
  using metal::log;      \
  using metal::log2;     \
  using metal::log10;    \
  using metal::sqrt;     \
  using metal::rsqrt;    \
  using metal::sin;      \
  using metal::cos;      \
  using metal::tan;      \
  using metal::asin;     \
  using metal::acos;     \
  using metal::atan;     \
  using metal::sinh;     \
  using metal::cosh;     \
  using metal::tanh;     \
  using metal::pow;      \
  using metal::powr;     \
  using metal::divide;   \
  using metal::floor;    \
  using metal::ceil;     \
  using metal::trunc;    \
  using metal::rint;     \
  using metal::round;    \
  using metal::fabs;     \
  using metal::abs;      \
  using metal::min;      \
  using metal::max;      \
  using metal::clamp;    \
  using metal::fmin;     \
  using metal::fmax;     \
  using metal::atan2;    \
  using metal::fmod;     \
  using metal::fma;      \
  using metal::fract;    \
  using metal::sign;     \
  using metal::asinh;    \
  using metal::acosh;    \
  using metal::atanh;    \
  using metal::saturate; \
  using metal::isnan;    \
  using metal::isinf;    \
  using metal::isfinite; \
  using metal::length;   \
  using metal::mix;      \
  }
MH_ALIAS(fast)
MH_ALIAS(precise)

// What MLX's kernels/utils.h gives every kernel.
template <class U> struct Limits {
  static constexpr U max = numeric_limits<U>::max(), min = numeric_limits<U>::min(),
                     finite_max = numeric_limits<U>::max(), finite_min = numeric_limits<U>::min();
};
template <Floating U> struct Limits<U> {
  static constexpr U max = numeric_limits<U>::infinity(), min = -numeric_limits<U>::infinity(),
                     finite_max = numeric_limits<U>::max(), finite_min = -numeric_limits<U>::max();
};
template <class I = int64_t>
inline I elem_to_loc(I e, const int* shape, const int64_t* strides, int ndim) {
  I loc = 0;
  for (int i = ndim - 1; i >= 0 && e > 0; --i) {
    loc += (e % shape[i]) * I(strides[i]);
    e /= shape[i];
  }
  return loc;
}
template <class I = int64_t>
inline I elem_to_loc(uint e, const int* shape, const int64_t* strides, int ndim) {
  return elem_to_loc<I>(I(e), shape, strides, ndim);
}
template <class T, class U> inline T ceildiv(T n, U m) {
  return (n + m - 1) / m;
}
inline uint16_t bfloat16_to_uint16(bfloat16_t x) {
  return x.bits;
}
inline bfloat16_t uint16_to_bfloat16(uint16_t x) {
  return as_type<bfloat16_t>(x);
}
}  // namespace metal
