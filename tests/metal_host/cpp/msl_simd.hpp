// Barriers and SIMD-group functions: places where the threads of a group meet.
#pragma once
#include "host_api.hpp"
#include "msl_math.hpp"

namespace metal {
enum class mem_flags : unsigned {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(unsigned(a) | unsigned(b));
}
enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};
inline void threadgroup_barrier(mem_flags f, MH_SITE) {
  mh::threadgroup_barrier(unsigned(f), mh_site);
}
inline void simdgroup_barrier(mem_flags f, MH_SITE) {
  mh::simd_barrier(unsigned(f), mh_site);
}
inline void atomic_thread_fence(mem_flags, memory_order = memory_order_relaxed,
                                thread_scope = thread_scope_device) {}

// What a lane brings to a shuffle.
template <class T> struct mh_sv {
  T v;
  uint32_t k;
  T fill;
};
template <class T> MH_NOSAN inline T mh_get(const unsigned char* p) {
  T r;
  __builtin_memcpy(&r, p, sizeof(T));
  return r;
}
// A reduction is an ascending butterfly, 1, 2, 4, 8, 16, over the lanes that are there.
template <class T, class F> MH_NOSAN void mh_reduce(mh::Slot* const* lanes, uint32_t act) {
  T v[32];
  bool ok[32];
  for (int i = 0; i < 32; ++i) {
    ok[i] = act >> i & 1;
    if (ok[i]) v[i] = mh_get<T>(lanes[i]->in);
  }
  for (int w = 1; w < 32; w *= 2)
    for (int i = 0; i < 32; i += 2 * w)
      if (ok[i + w]) {
        v[i] = ok[i] ? F::f(v[i], v[i + w]) : v[i + w];
        ok[i] = true;
      }
  for (int i = 0; i < 32; ++i)
    if (act >> i & 1) __builtin_memcpy(lanes[i]->out, &v[0], sizeof(T));
}
template <class T, class F, bool Inc>
MH_NOSAN void mh_prefix(mh::Slot* const* lanes, uint32_t act) {
  T acc = F::template id<T>();
  for (int i = 0; i < 32; ++i)
    if (act >> i & 1) {
      T v = mh_get<T>(lanes[i]->in), nx = F::f(acc, v);
      __builtin_memcpy(lanes[i]->out, Inc ? &nx : &acc, sizeof(T));
      acc = nx;
    }
}
struct mh_add {
  template <class T> static T f(const T& a, const T& b) { return T(a + b); }
  template <class T> static T id() { return T(0); }
};
struct mh_mul {
  template <class T> static T f(const T& a, const T& b) { return T(a * b); }
  template <class T> static T id() { return T(1); }
};
struct mh_min {
  template <class T> static T f(const T& a, const T& b) { return metal::min(a, b); }
};
struct mh_max {
  template <class T> static T f(const T& a, const T& b) { return metal::max(a, b); }
};
struct mh_and {
  template <class T> static T f(const T& a, const T& b) { return T(a & b); }
};
struct mh_or {
  template <class T> static T f(const T& a, const T& b) { return T(a | b); }
};
struct mh_xor {
  template <class T> static T f(const T& a, const T& b) { return T(a ^ b); }
};
#define MH_RED(name, F)                                                                           \
  template <class T> inline T name(T v, MH_SITE) {                                                \
    T r;                                                                                          \
    mh::simd_meet(&v, sizeof(T), &r, sizeof(T), &mh_reduce<T, F>, mh::kAnyLanes, #name, mh_site); \
    return r;                                                                                     \
  }
MH_RED(simd_sum, mh_add)
MH_RED(simd_product, mh_mul)
MH_RED(simd_min, mh_min)
MH_RED(simd_max, mh_max)
MH_RED(simd_and, mh_and)
MH_RED(simd_or, mh_or)
MH_RED(simd_xor, mh_xor)
#undef MH_RED
#define MH_PRE(name, F, I)                                                                 \
  template <class T> inline T name(T v, MH_SITE) {                                         \
    T r;                                                                                   \
    mh::simd_meet(&v, sizeof(T), &r, sizeof(T), &mh_prefix<T, F, I>, mh::kAnyLanes, #name, \
                  mh_site);                                                                \
    return r;                                                                              \
  }
MH_PRE(simd_prefix_exclusive_sum, mh_add, false)
MH_PRE(simd_prefix_inclusive_sum, mh_add, true)
MH_PRE(simd_prefix_exclusive_product, mh_mul, false)
MH_PRE(simd_prefix_inclusive_product, mh_mul, true)
#undef MH_PRE
// The source lane is S::src(lane, k); -1 keeps the own value, -2 takes the fill value.
template <class T, class S> MH_NOSAN void mh_shuffle(mh::Slot* const* lanes, uint32_t act) {
  for (int i = 0; i < 32; ++i)
    if (act >> i & 1) {
      mh_sv<T> me = mh_get<mh_sv<T>>(lanes[i]->in);
      int s = S::src(i, int(me.k));
      T r = me.v;
      if (s == -2)
        r = me.fill;
      else if (s >= 0) {
        if (s > 31 || !(act >> s & 1)) {
          mh::inactive_lane(unsigned(i), unsigned(s));
          __builtin_memset(&r, 0xFF, sizeof(T));
        } else
          r = mh_get<mh_sv<T>>(lanes[s]->in).v;
      }
      __builtin_memcpy(lanes[i]->out, &r, sizeof(T));
    }
}
struct mh_from_lane {
  static int src(int, int k) { return k; }
};
struct mh_from_xor {
  static int src(int i, int k) { return i ^ k; }
};
struct mh_from_up {
  static int src(int i, int k) { return i - k < 0 ? -1 : i - k; }
};
struct mh_from_down {
  static int src(int i, int k) { return i + k > 31 ? -1 : i + k; }
};
struct mh_from_rotate_up {
  static int src(int i, int k) { return (i - k) & 31; }
};
struct mh_from_rotate_down {
  static int src(int i, int k) { return (i + k) & 31; }
};
struct mh_from_fill_up {
  static int src(int i, int k) { return i - k < 0 ? -2 : i - k; }
};
struct mh_from_fill_down {
  static int src(int i, int k) { return i + k > 31 ? -2 : i + k; }
};
struct mh_from_quad_xor {
  static int src(int i, int k) { return (i & ~3) | ((i ^ k) & 3); }
};
struct mh_from_quad_lane {
  static int src(int i, int k) { return (i & ~3) | (k & 3); }
};
#define MH_SHUF(name, S)                                                                           \
  template <class T> inline T name(T v, uint16_t k, MH_SITE) {                                     \
    mh_sv<T> a{v, k, v};                                                                           \
    T r;                                                                                           \
    mh::simd_meet(&a, sizeof(a), &r, sizeof(T), &mh_shuffle<T, S>, mh::kAnyLanes, #name, mh_site); \
    return r;                                                                                      \
  }
MH_SHUF(simd_shuffle, mh_from_lane)
MH_SHUF(simd_broadcast, mh_from_lane)
MH_SHUF(simd_shuffle_xor, mh_from_xor)
MH_SHUF(simd_shuffle_up, mh_from_up)
MH_SHUF(simd_shuffle_down, mh_from_down)
MH_SHUF(simd_shuffle_rotate_up, mh_from_rotate_up)
MH_SHUF(simd_shuffle_rotate_down, mh_from_rotate_down)
MH_SHUF(quad_shuffle_xor, mh_from_quad_xor)
MH_SHUF(quad_broadcast, mh_from_quad_lane)
MH_SHUF(quad_shuffle, mh_from_quad_lane)
#undef MH_SHUF
template <class T> inline T simd_shuffle_and_fill_up(T v, T fill, uint16_t k, MH_SITE) {
  mh_sv<T> a{v, k, fill};
  T r;
  mh::simd_meet(&a, sizeof(a), &r, sizeof(T), &mh_shuffle<T, mh_from_fill_up>, mh::kAnyLanes,
                "simd_shuffle_and_fill_up", mh_site);
  return r;
}
template <class T> inline T simd_shuffle_and_fill_down(T v, T fill, uint16_t k, MH_SITE) {
  mh_sv<T> a{v, k, fill};
  T r;
  mh::simd_meet(&a, sizeof(a), &r, sizeof(T), &mh_shuffle<T, mh_from_fill_down>, mh::kAnyLanes,
                "simd_shuffle_and_fill_down", mh_site);
  return r;
}
struct simd_vote {
  using vote_t = uint64_t;
  vote_t v;
  explicit operator vote_t() const { return v; }
  bool all() const { return v == 0xFFFFFFFFull; }
  bool any() const { return v != 0; }
};
MH_NOSAN inline void mh_ballot(mh::Slot* const* lanes, uint32_t act) {
  struct {
    uint32_t votes, active;
  } r{0, act};
  for (int i = 0; i < 32; ++i)
    if ((act >> i & 1) && lanes[i]->in[0]) r.votes |= 1u << i;
  for (int i = 0; i < 32; ++i)
    if (act >> i & 1) __builtin_memcpy(lanes[i]->out, &r, 8);
}
inline uint64_t mh_vote(bool b, const char* op, const mh::Site& s) {
  uint64_t r;
  unsigned char c = b;
  mh::simd_meet(&c, 1, &r, 8, &mh_ballot, mh::kAnyLanes, op, s);
  return r;
}
inline simd_vote simd_ballot(bool b, MH_SITE) {
  return {mh_vote(b, "simd_ballot", mh_site) & 0xFFFFFFFFull};
}
inline simd_vote simd_active_threads_mask(MH_SITE) {
  return {mh_vote(true, "simd_active_threads_mask", mh_site) >> 32};
}
inline bool simd_any(bool b, MH_SITE) {
  return uint32_t(mh_vote(b, "simd_any", mh_site)) != 0;
}
inline bool simd_all(bool b, MH_SITE) {
  uint64_t r = mh_vote(b, "simd_all", mh_site);
  return uint32_t(r) == uint32_t(r >> 32);
}
inline bool simd_is_first(MH_SITE) {
  uint32_t a = uint32_t(mh_vote(true, "simd_is_first", mh_site) >> 32);
  return mh::lane_id() == unsigned(__builtin_ctz(a));
}
template <class T> inline T simd_broadcast_first(T v, MH_SITE) {
  uint32_t a = uint32_t(mh_vote(true, "simd_broadcast_first", mh_site) >> 32);
  return simd_shuffle(v, uint16_t(__builtin_ctz(a)), mh_site);
}
}  // namespace metal
