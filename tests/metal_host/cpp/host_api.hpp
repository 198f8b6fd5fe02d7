// What a compiled kernel and the runtime know of each other: kernels call the functions of
// namespace mh, which schedule.cpp and memory.cpp define; host.py fills a Launch.
#pragma once
#include <source_location>

#include "msl_vectors.hpp"

// Where in the kernel's text a barrier or SIMD-group function stands: its last, unseen argument.
#define MH_SITE const std::source_location mh_site = std::source_location::current()
// Not watched in checked mode: what the harness itself does for a kernel.
#define MH_NOSAN __attribute__((no_sanitize("thread"), no_sanitize("undefined")))

namespace mh {
using Site = std::source_location;

// What a lane brings to a SIMD-group function, and what it takes from it.
struct Slot {
  alignas(16) unsigned char in[96];
  alignas(16) unsigned char out[96];
};
// Called once for the set of lanes that meet at one SIMD-group function.
using Resolve = void (*)(Slot* const* lanes, uint32_t active);
enum : unsigned { kMemDevice = 1, kMemThreadgroup = 2 };  // of metal::mem_flags
enum : unsigned { kAnyLanes = 0, kFullSimdgroup = 1, kSimdBarrier = 2 };

void simd_meet(const void* in, size_t in_bytes, void* out, size_t out_bytes, Resolve resolve,
               unsigned flags, const char* what, const Site& site);
void simd_barrier(unsigned mem_flags, const Site& site);
void threadgroup_barrier(unsigned mem_flags, const Site& site);
void inactive_lane(unsigned lane, unsigned source);  // a shuffle reads a lane that is not there
unsigned lane_id();
// a[0] a[1] b[0] b[1] c[0] c[1] -> the lane's two elements of the product
void multiply_8x8(const float* abc, float* d, const Site& site);

void* threadgroup_memory(unsigned id, size_t bytes, size_t align, const char* name);
template <class T> T& tg_var(unsigned id, const char* name) {
  size_t align = alignof(T) > 16 ? alignof(T) : 16;
  return *static_cast<T*>(threadgroup_memory(id, sizeof(T), align, name));
}

// The thread attributes of one thread.
struct Attr {
  metal::uint dispatch_quadgroups_per_threadgroup;
  metal::uint dispatch_simdgroups_per_threadgroup;
  metal::uint3 dispatch_threads_per_threadgroup;
  metal::uint3 grid_origin;
  metal::uint3 grid_size;
  metal::uint quadgroup_index_in_threadgroup;
  metal::uint quadgroups_per_threadgroup;
  metal::uint simdgroup_index_in_threadgroup;
  metal::uint simdgroups_per_threadgroup;
  metal::uint thread_execution_width;
  metal::uint thread_index_in_quadgroup;
  metal::uint thread_index_in_simdgroup;
  metal::uint thread_index_in_threadgroup;
  metal::uint3 thread_position_in_grid;
  metal::uint3 thread_position_in_threadgroup;
  metal::uint3 threadgroup_position_in_grid;
  metal::uint3 threadgroups_per_grid;
  metal::uint3 threads_per_grid;
  metal::uint threads_per_simdgroup;
  metal::uint3 threads_per_threadgroup;
};
using Entry = void (*)(void* const* buffers, const Attr&);

// In the order of LaunchRecord in host.py.
enum Statistic {
  kThreads,
  kSimdOperations,
  kPartialSimdOperations,
  kBarriers,
  kMatrixProducts,
  kSameValueWrites,
  kThreadgroupBytes,
  kCheckedAccesses,
  kStatistics
};

enum Shuffle : uint32_t { kInOrder, kRandom, kGreedy };

struct Launch {  // _Launch in host.py
  void** data;
  const uint64_t* bytes;
  const uint32_t* item_size;
  const uint8_t* is_output;
  const char* const* names;
  int32_t count, workers;
  int32_t grid[3];
  int32_t threadgroup[3];
  uint64_t seed;
  uint32_t strict, shuffle, ftz, checked, partial_simd;
  volatile uint32_t interrupted;  // set from outside while it runs
  double seconds;  // of computing, after which the launch is given up
  char* message;
  uint64_t message_bytes;
  uint64_t fault_offset;  // of the instruction, in the kernel's library
  uint64_t other_offset;  // of the other access of a race
  uint64_t statistics[kStatistics];
};
int launch(Launch*, Entry);
}  // namespace mh
