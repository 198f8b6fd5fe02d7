// Metal's scalar types as C++20 for g++: half, bfloat with Metal's rules of conversion, limits.
#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace metal {
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;
using float16_t = half;
using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::ptrdiff_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
template <class T> using remove_addrspace_t = T;
using std::conditional_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_integral_v;
using std::is_same;
using std::is_same_v;
using std::remove_cv_t;
using std::remove_reference_t;
using std::true_type;
template <bool B> using bool_constant = std::bool_constant<B>;

// MSL 2.1: bfloat converts implicitly to float only; float and half do not
// convert implicitly to bfloat.  (Define MH_LAX_BFLOAT to drop this check.)
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class I>
    requires std::is_integral_v<I>
  constexpr bfloat(I i) : bits(round(static_cast<float>(i))) {}
  template <class F>
    requires(std::is_floating_point_v<F> || std::is_same_v<F, half>)
#ifndef MH_LAX_BFLOAT
  explicit
#endif
      constexpr bfloat(F f)
      : bits(round(static_cast<float>(f))) {
  }
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  static constexpr uint16_t round(float f) {
    uint32_t u = __builtin_bit_cast(uint32_t, f);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t((u >> 16) | 0x40u);
    return uint16_t((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  }
};
using bfloat16_t = bfloat;
#define MH_BF_OP(op)                                                       \
  constexpr bfloat operator op(bfloat a, bfloat b) {                       \
    return bfloat(float(a) op float(b));                                   \
  }                                                                        \
  template <class I>                                                       \
    requires std::is_integral_v<I>                                         \
  constexpr bfloat operator op(bfloat a, I b) {                            \
    return bfloat(float(a) op float(bfloat(b)));                           \
  }                                                                        \
  template <class I>                                                       \
    requires std::is_integral_v<I>                                         \
  constexpr bfloat operator op(I a, bfloat b) {                            \
    return bfloat(float(bfloat(a)) op float(b));                           \
  }                                                                        \
  template <class U> constexpr bfloat& operator op## = (bfloat & a, U b) { \
    return a = bfloat(float(a) op float(b));                               \
  }
MH_BF_OP(+)
MH_BF_OP(-)
MH_BF_OP(*)
MH_BF_OP(/)
#undef MH_BF_OP
constexpr bfloat operator-(bfloat a) {
  bfloat r;
  r.bits = a.bits ^ 0x8000u;
  return r;
}
constexpr bfloat operator+(bfloat a) {
  return a;
}
inline bfloat& operator++(bfloat& a) {
  return a = bfloat(float(a) + 1.0f);
}
constexpr half operator""h(long double v) {
  return half(v);
}
constexpr half operator""h(unsigned long long v) {
  return half(v);
}
constexpr bfloat operator"" bf(long double v) {
  return bfloat(float(v));
}

template <class T>
concept Scalar = std::is_arithmetic_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T>
concept Floating = std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T>
concept Integral = std::is_integral_v<T>;

template <class T> struct numeric_limits : std::numeric_limits<T> {};
template <> struct numeric_limits<half> {
  static constexpr half max() { return half(65504.0f); }
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half min() { return half(6.103515625e-05f); }
  static constexpr half epsilon() { return half(0.0009765625f); }
  static constexpr half infinity() { return half(__builtin_inff()); }
  static constexpr half quiet_NaN() { return half(__builtin_nanf("")); }
};
template <> struct numeric_limits<bfloat> {
  static constexpr bfloat max() { return bfloat(3.38953139e38f); }
  static constexpr bfloat lowest() { return bfloat(-3.38953139e38f); }
  static constexpr bfloat min() { return bfloat(1.17549435e-38f); }
  static constexpr bfloat epsilon() { return bfloat(0.0078125f); }
  static constexpr bfloat infinity() { return bfloat(__builtin_inff()); }
  static constexpr bfloat quiet_NaN() { return bfloat(__builtin_nanf("")); }
};
}  // namespace metal
