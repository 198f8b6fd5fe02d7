// Relaxed atomics on device and threadgroup memory.
#pragma once
#include "msl_simd.hpp"

namespace metal {
template <class T> struct atomic {
  T v;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;
using atomic_ulong = atomic<ulong>;
template <class T> MH_NOSAN inline T atomic_load_explicit(const atomic<T>* p, memory_order) {
  T r;
  __atomic_load(const_cast<T*>(&p->v), &r, __ATOMIC_RELAXED);
  return r;
}
template <class T, class U>
MH_NOSAN inline void atomic_store_explicit(atomic<T>* p, U u, memory_order) {
  T v = T(u);
  __atomic_store(&p->v, &v, __ATOMIC_RELAXED);
}
template <class T, class U>
MH_NOSAN inline T atomic_exchange_explicit(atomic<T>* p, U u, memory_order) {
  T v = T(u), r;
  __atomic_exchange(&p->v, &v, &r, __ATOMIC_RELAXED);
  return r;
}
template <class T, class U>
MH_NOSAN inline bool atomic_compare_exchange_weak_explicit(atomic<T>* p, T* e, U u, memory_order,
                                                           memory_order) {
  T v = T(u);
  return __atomic_compare_exchange(&p->v, e, &v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
#define MH_RMW(name, expr)                                                                         \
  template <class T, class U>                                                                      \
  MH_NOSAN inline T atomic_fetch_##name##_explicit(atomic<T>* p, U u, memory_order) {              \
    T b = T(u), a, n;                                                                              \
    __atomic_load(&p->v, &a, __ATOMIC_RELAXED);                                                    \
    do {                                                                                           \
      n = T(expr);                                                                                 \
    } while (!__atomic_compare_exchange(&p->v, &a, &n, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); \
    return a;                                                                                      \
  }
MH_RMW(add, a + b)
MH_RMW(sub, a - b)
MH_RMW(or, a | b)
MH_RMW(and, a& b)
MH_RMW(xor, a ^ b)
MH_RMW(min, b < a ? b : a)
MH_RMW(max, a < b ? b : a)
#undef MH_RMW
}  // namespace metal
