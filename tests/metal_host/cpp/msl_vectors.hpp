// Metal's vectors: float4 and the like, with swizzles, operators and packed forms.
#pragma once
#include "msl_scalars.hpp"

namespace metal {
template <class T, int N> struct vec;
template <class T, int M, int... I> struct mh_swizzle {  // v.xy, v.wzyx, ... of a vec<T, M>
  T d[M];
  static constexpr int idx[] = {I...};
  operator vec<T, int(sizeof...(I))>() const { return vec<T, int(sizeof...(I))>(d[I]...); }
  mh_swizzle& operator=(const vec<T, int(sizeof...(I))>& v) {
    for (int i = 0; i < int(sizeof...(I)); ++i) d[idx[i]] = v[i];
    return *this;
  }
  mh_swizzle& operator=(const mh_swizzle& o) { return *this = vec<T, int(sizeof...(I))>(o); }
  T operator[](int i) const { return d[idx[i]]; }
};
template <class T, int N> constexpr size_t mh_valign =
    sizeof(T) * (N == 3 ? 4 : N) > 64 ? 64 : sizeof(T) * (N == 3 ? 4 : N);

template <class T, int N> struct mh_vstore {
  T d[N];
  T* p() { return d; }
  const T* p() const { return d; }
};
template <class T>
  requires(!std::is_class_v<T>)
struct mh_vstore<T, 2> {
  mh_vstore() = default;
  mh_vstore(const mh_vstore&) = default;
  mh_vstore& operator=(const mh_vstore& o) {
    for (int i = 0; i < 2; ++i) d[i] = o.d[i];
    return *this;
  }
  union {
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
    T d[2];
    mh_swizzle<T, 2, 0, 1> xy;
    mh_swizzle<T, 2, 1, 0> yx;
    mh_swizzle<T, 2, 0, 0> xx;
    mh_swizzle<T, 2, 1, 1> yy;
  };
  T* p() { return d; }
  const T* p() const { return d; }
};
template <class T>
  requires(!std::is_class_v<T>)
struct mh_vstore<T, 3> {
  mh_vstore() = default;
  mh_vstore(const mh_vstore&) = default;
  mh_vstore& operator=(const mh_vstore& o) {
    for (int i = 0; i < 3; ++i) d[i] = o.d[i];
    return *this;
  }
  union {
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
    T d[3];
    mh_swizzle<T, 3, 0, 1> xy;
    mh_swizzle<T, 3, 1, 2> yz;
    mh_swizzle<T, 3, 0, 2> xz;
    mh_swizzle<T, 3, 0, 1, 2> xyz;
    mh_swizzle<T, 3, 2, 1, 0> zyx;
  };
  T* p() { return d; }
  const T* p() const { return d; }
};
template <class T>
  requires(!std::is_class_v<T>)
struct mh_vstore<T, 4> {
  mh_vstore() = default;
  mh_vstore(const mh_vstore&) = default;
  mh_vstore& operator=(const mh_vstore& o) {
    for (int i = 0; i < 4; ++i) d[i] = o.d[i];
    return *this;
  }
  union {
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
    T d[4];
    mh_swizzle<T, 4, 0, 1> xy;
    mh_swizzle<T, 4, 2, 3> zw;
    mh_swizzle<T, 4, 0, 2> xz;
    mh_swizzle<T, 4, 1, 3> yw;
    mh_swizzle<T, 4, 1, 2> yz;
    mh_swizzle<T, 4, 1, 0> yx;
    mh_swizzle<T, 4, 3, 2> wz;
    mh_swizzle<T, 4, 0, 1, 2> xyz;
    mh_swizzle<T, 4, 1, 2, 3> yzw;
    mh_swizzle<T, 4, 0, 1, 2, 3> xyzw;
    mh_swizzle<T, 4, 3, 2, 1, 0> wzyx;
    mh_swizzle<T, 4, 1, 0, 3, 2> yxwz;
  };
  T* p() { return d; }
  const T* p() const { return d; }
};
// Class element types (bfloat): no swizzles, only .x .y .z .w and [].
template <class T>
  requires(std::is_class_v<T>)
struct mh_vstore<T, 2> {
  T x, y;
  T* p() { return &x; }
  const T* p() const { return &x; }
};
template <class T>
  requires(std::is_class_v<T>)
struct mh_vstore<T, 3> {
  T x, y, z;
  T* p() { return &x; }
  const T* p() const { return &x; }
};
template <class T>
  requires(std::is_class_v<T>)
struct mh_vstore<T, 4> {
  T x, y, z, w;
  T* p() { return &x; }
  const T* p() const { return &x; }
};

template <class T, int N> struct alignas(mh_valign<T, N>) vec : mh_vstore<T, N> {
  using element_type = T;
  vec() = default;
  template <class S>
    requires(std::is_convertible_v<S, T> && (Scalar<S>))
  vec(S s) {
    for (int i = 0; i < N; ++i) (*this)[i] = T(s);
  }
  template <class U> explicit vec(const vec<U, N>& v) {
    for (int i = 0; i < N; ++i) (*this)[i] = T(v[i]);
  }
  template <class... A>
    requires(sizeof...(A) >= 2)
  vec(const A&... a) {
    int i = 0;
    (put(i, a), ...);
    static_assert((count<A>() + ...) == N, "vec: wrong number of components");
  }
  T& operator[](int i) { return this->p()[i]; }
  const T& operator[](int i) const { return this->p()[i]; }

 private:
  template <class A> static constexpr int count() {
    if constexpr (Scalar<A> || std::is_enum_v<A>)
      return 1;
    else
      return int(sizeof(mh_dim(std::declval<A>())));
  }
  template <class U, int M> static char (&mh_dim(const vec<U, M>&))[M];
  template <class U, int M, int... I>
  static char (&mh_dim(const mh_swizzle<U, M, I...>&))[sizeof...(I)];
  template <class A> void put(int& i, const A& a) {
    if constexpr (Scalar<A> || std::is_enum_v<A>)
      (*this)[i++] = T(a);
    else
      for (int k = 0; k < count<A>(); ++k) (*this)[i++] = T(a[k]);
  }
};
// Operators take swizzles; functions want a vec: write float2(v.xy) there.
#define MH_VEC_BIN(op)                                                                             \
  template <class T, int N> inline vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<T, N> r;                                                                                   \
    for (int i = 0; i < N; ++i) r[i] = T(a[i] op b[i]);                                            \
    return r;                                                                                      \
  }                                                                                                \
  template <class T, int N, Scalar S> inline vec<T, N> operator op(const vec<T, N>& a, S s) {      \
    vec<T, N> r;                                                                                   \
    for (int i = 0; i < N; ++i) r[i] = T(a[i] op T(s));                                            \
    return r;                                                                                      \
  }                                                                                                \
  template <class T, int N, Scalar S> inline vec<T, N> operator op(S s, const vec<T, N>& a) {      \
    vec<T, N> r;                                                                                   \
    for (int i = 0; i < N; ++i) r[i] = T(T(s) op a[i]);                                            \
    return r;                                                                                      \
  }                                                                                                \
  template <class T, int N, class S> inline vec<T, N>& operator op## =                             \
      (vec<T, N> & a, const S& s) {                                                                \
    return a = a op vec<T, N>(s);                                                                  \
  }
MH_VEC_BIN(+)
MH_VEC_BIN(-)
MH_VEC_BIN(*)
MH_VEC_BIN(/)
MH_VEC_BIN(%)
MH_VEC_BIN(&)
MH_VEC_BIN(|)
MH_VEC_BIN(^)
MH_VEC_BIN(<<)
MH_VEC_BIN(>>)
#undef MH_VEC_BIN
template <class T> inline const T& mh_plain(const T& v) {
  return v;
}
template <class T, int M, int... I>
inline vec<T, int(sizeof...(I))> mh_plain(const mh_swizzle<T, M, I...>& v) {
  return v;
}
#define MH_SWZ(op)                                                               \
  template <class T, int M, int... I, class R>                                   \
  inline auto operator op(const mh_swizzle<T, M, I...>& a, const R& b) {         \
    return mh_plain(a) op mh_plain(b);                                           \
  }                                                                              \
  template <class T, int N, int M, int... I>                                     \
  inline auto operator op(const vec<T, N>& a, const mh_swizzle<T, M, I...>& b) { \
    return a op mh_plain(b);                                                     \
  }                                                                              \
  template <Scalar S, class T, int M, int... I>                                  \
  inline auto operator op(S a, const mh_swizzle<T, M, I...>& b) {                \
    return a op mh_plain(b);                                                     \
  }
MH_SWZ(+)
MH_SWZ(-)
MH_SWZ(*)
MH_SWZ(/)
MH_SWZ(&)
MH_SWZ(|)
MH_SWZ(^)
MH_SWZ(<<)
MH_SWZ(>>)
#undef MH_SWZ
#define MH_VEC_CMP(op)                                                                           \
  template <class T, int N>                                                                      \
  inline vec<bool, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {                      \
    vec<bool, N> r;                                                                              \
    for (int i = 0; i < N; ++i) r[i] = a[i] op b[i];                                             \
    return r;                                                                                    \
  }                                                                                              \
  template <class T, int N, Scalar S> inline vec<bool, N> operator op(const vec<T, N>& a, S s) { \
    return a op vec<T, N>(s);                                                                    \
  }
MH_VEC_CMP(<)
MH_VEC_CMP(>)
MH_VEC_CMP(<=)
MH_VEC_CMP(>=)
MH_VEC_CMP(==)
MH_VEC_CMP(!=)
#undef MH_VEC_CMP
template <class T, int N> inline vec<T, N> operator-(const vec<T, N>& a) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = T(-a[i]);
  return r;
}
template <class T, int N> inline vec<T, N> operator~(const vec<T, N>& a) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = T(~a[i]);
  return r;
}
template <int N> inline vec<bool, N> operator!(const vec<bool, N>& a) {
  vec<bool, N> r;
  for (int i = 0; i < N; ++i) r[i] = !a[i];
  return r;
}
#define MH_VEC_TYPES(t)   \
  using t##2 = vec<t, 2>; \
  using t##3 = vec<t, 3>; \
  using t##4 = vec<t, 4>;
MH_VEC_TYPES(float)
MH_VEC_TYPES(half)
MH_VEC_TYPES(bfloat)
MH_VEC_TYPES(int)
MH_VEC_TYPES(uint)
MH_VEC_TYPES(short)
MH_VEC_TYPES(ushort)
MH_VEC_TYPES(char)
MH_VEC_TYPES(uchar)
MH_VEC_TYPES(long)
MH_VEC_TYPES(ulong)
MH_VEC_TYPES(bool)
template <class T, int N> struct packed_vec {  // element alignment
  T d[N];
  packed_vec() = default;
  packed_vec(const vec<T, N>& v) {
    for (int i = 0; i < N; ++i) d[i] = v[i];
  }
  operator vec<T, N>() const {
    vec<T, N> r;
    for (int i = 0; i < N; ++i) r[i] = d[i];
    return r;
  }
  T& operator[](int i) { return d[i]; }
  const T& operator[](int i) const { return d[i]; }
};
#define MH_PACKED_TYPES(t)                \
  using packed_##t##2 = packed_vec<t, 2>; \
  using packed_##t##3 = packed_vec<t, 3>; \
  using packed_##t##4 = packed_vec<t, 4>;
MH_PACKED_TYPES(float)
MH_PACKED_TYPES(half)
MH_PACKED_TYPES(bfloat)
MH_PACKED_TYPES(int)
MH_PACKED_TYPES(uint)
MH_PACKED_TYPES(short)
MH_PACKED_TYPES(ushort)
MH_PACKED_TYPES(char)
MH_PACKED_TYPES(uchar)

template <class T, size_t N> struct array {
  T d[N];
  T& operator[](size_t i) { return d[i]; }
  const T& operator[](size_t i) const { return d[i]; }
};

template <class U, class T> inline U as_type(const T& v) {
  static_assert(sizeof(U) == sizeof(T), "as_type: sizes differ");
  U r;
  memcpy(&r, &v, sizeof(U));
  return r;
}
}  // namespace metal
