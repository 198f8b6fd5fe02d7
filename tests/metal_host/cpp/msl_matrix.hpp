// simdgroup_matrix<T, 8, 8>: each lane holds two neighbouring elements, in the layout of Apple
// GPUs, which MLX's own kernels rely on.
#pragma once
#include "msl_simd.hpp"

namespace metal {
inline unsigned mh_frag_row(unsigned l) {
  return ((l / 4) & 4) + (l / 2) % 4;
}
inline unsigned mh_frag_col(unsigned l) {
  return ((l / 4) & 2) * 2 + (l % 2) * 2;
}
template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "only 8x8");
  vec<T, 2> el;
  simdgroup_matrix() = default;
  template <Scalar S> explicit simdgroup_matrix(S d) {  // diagonal, as in MSL
    unsigned l = mh::lane_id(), r = mh_frag_row(l), c = mh_frag_col(l);
    el[0] = r == c ? T(d) : T(0);
    el[1] = r == c + 1 ? T(d) : T(0);
  }
  vec<T, 2>& thread_elements() { return el; }
  const vec<T, 2>& thread_elements() const { return el; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
template <class T, int R, int C = R>
inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.el[0] = m.el[1] = v;
  return m;
}
MH_NOSAN inline void mh_noop(mh::Slot* const*, uint32_t) {}
#ifdef MH_CHECKED
#define MH_CONVERGE(op)                                                     \
  {                                                                         \
    char c = 0;                                                             \
    mh::simd_meet(&c, 1, &c, 1, &mh_noop, mh::kFullSimdgroup, op, mh_site); \
  }
#else
#define MH_CONVERGE(op)
#endif
template <class T, class U> inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const U* p,
                                                       ulong stride = 8, ulong2 o = ulong2(0),
                                                       bool tr = false, MH_SITE) {
  static_assert(std::is_same_v<T, U>, "simdgroup_load: element types differ");
  MH_CONVERGE("simdgroup_load")
  unsigned l = mh::lane_id(), r = mh_frag_row(l), c = mh_frag_col(l);
  for (unsigned e = 0; e < 2; ++e)
    m.el[e] = tr ? p[(o[1] + c + e) * stride + o[0] + r] : p[(o[1] + r) * stride + o[0] + c + e];
}
template <class T, class U> inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, U* p,
                                                        ulong stride = 8, ulong2 o = ulong2(0),
                                                        bool tr = false, MH_SITE) {
  static_assert(std::is_same_v<T, U>, "simdgroup_store: element types differ");
  MH_CONVERGE("simdgroup_store")
  unsigned l = mh::lane_id(), r = mh_frag_row(l), c = mh_frag_col(l);
  for (unsigned e = 0; e < 2; ++e)
    (tr ? p[(o[1] + c + e) * stride + o[0] + r] : p[(o[1] + r) * stride + o[0] + c + e]) = m.el[e];
}
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                          const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b,
                                          const simdgroup_matrix<C, 8, 8>& c, MH_SITE) {
  float in[6] = {float(a.el[0]), float(a.el[1]), float(b.el[0]),
                 float(b.el[1]), float(c.el[0]), float(c.el[1])},
        out[2];
  mh::multiply_8x8(in, out, mh_site);
  d.el[0] = D(out[0]);
  d.el[1] = D(out[1]);
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, MH_SITE) {
  float in[6] = {float(a.el[0]), float(a.el[1]), float(b.el[0]), float(b.el[1]), 0.0f, 0.0f},
        out[2];
  mh::multiply_8x8(in, out, mh_site);
  d.el[0] = D(out[0]);
  d.el[1] = D(out[1]);
}
}  // namespace metal
