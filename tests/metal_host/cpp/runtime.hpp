// The state of a launch, shared by schedule.cpp, memory.cpp and checks.cpp.
//
// Threads of a threadgroup are fibers of one OS thread, the worker. A fiber runs until it meets a
// barrier or a SIMD-group function, so those are real places of meeting; what lies between two of
// them runs in some order of the fibers, which the seed chooses.
#pragma once
#include <setjmp.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "host_api.hpp"

namespace mh {
constexpr size_t kPage = 4096;
constexpr size_t kStack = 256 << 10;           // of one fiber; its lowest page is a guard
constexpr size_t kGuard = 64ull << 20;         // unmapped, between buffers
constexpr size_t kThreadgroupSlot = 1 << 20;   // of one threadgroup variable, guards included
constexpr size_t kThreadgroupEnd = 512 << 10;  // where in its slot a variable ends
constexpr size_t kThreadgroupVariables = 64;
constexpr size_t kThreadgroupLimit = 32768;  // Apple's
constexpr int kMaxThreads = 1024;

enum State : uint8_t { kReady, kAtSimd, kAtBarrier, kDone };

struct Fiber : Slot {
  void* stack;
  uint32_t id, simdgroup, lane;
  State state;
  // The SIMD-group function or barrier where it waits.
  Resolve resolve;
  unsigned flags;
  const char* what;
  Site site;
  Attr attributes;
};

struct SimdGroup {
  uint32_t lanes;    // that it has, as bits
  uint32_t arrived;  // that wait at a SIMD-group function
  bool mismatch;     // they wait at different ones
  // How many simdgroup_barriers there were: lanes are ordered by them.
  uint32_t threadgroup_epoch, device_epoch;
  Fiber* fibers[32];
};

// The last write and two of the last reads of a byte or element, and when (checked mode).
struct History {
  struct Read {
    uint32_t epoch, simd_epoch;
    uint16_t thread;
    const void* pc;
  };
  uint32_t writer_group = 0;  // 0: never written
  uint32_t epoch = 0, simd_epoch = 0;
  uint32_t reader_group = 0;
  uint16_t writer = 0;
  uint8_t readers = 0;
  const void* pc = nullptr;  // of the write
  Read reads[2];
};

struct ThreadgroupVariable {
  char* start = nullptr;
  size_t bytes = 0;
  uint64_t run = 0;  // of the threadgroup that it was last cleared for
  const char* name = "";
  std::vector<History> history;  // by byte
};

struct Buffer {
  char* start;
  size_t bytes;
  uint32_t item_size;
  bool is_output;
  const char* name;
  std::vector<History> history;  // by element; outputs only
};

// One launch, seen by all its workers.
struct Shared {
  Launch* launch;
  Entry entry;
  std::vector<Buffer> buffers;
  char* low;  // of the mapping with all buffers
  char* high;
  int groups_of[3];
  int groups = 1;
  std::vector<int> order;  // of threadgroups; empty: ascending
  std::atomic<int> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::condition_variable finished;
  int running = 0;  // workers
  uint64_t statistics[kStatistics] = {};
};

// Two writes to one place are a race unless they write the same value, which shows later.
struct PendingClash {
  char* address = nullptr;
  size_t bytes;
  unsigned char before[16];
  const void* pc;
  const void* other_pc;
  char text[400];
};

struct Worker {
  Shared* shared = nullptr;
  Launch* launch = nullptr;
  char* stacks;
  char* threadgroup_memory;
  ThreadgroupVariable variables[kThreadgroupVariables];
  size_t threadgroup_bytes = 0;

  // The threadgroup that runs.
  std::vector<Fiber> fibers;
  SimdGroup simdgroups[kMaxThreads / 32];
  int threads = 0, done = 0, at_barrier = 0;
  bool barrier_mismatch = false;
  unsigned barrier_flags = 0;
  uint32_t group = 0;  // in the grid, from 1
  uint64_t run = 0;    // threadgroups that this worker has run, in all launches
  uint32_t threadgroup_epoch = 0, device_epoch = 0;  // barriers so far
  PendingClash clash;
  const void* access_pc = nullptr;  // of the last access (checked mode)
  const void* other_pc = nullptr;   // of the other access of the race that is being told

  // The fibers that can run, from `head` on.
  std::vector<uint16_t> queue;
  size_t head = 0;
  uint32_t priority[kMaxThreads / 32];
  uint64_t random_state = 0;
  void* main_stack = nullptr;
  Fiber* current = nullptr;

  bool failed = false;
  sigjmp_buf out_of_signal;
  uint64_t statistics[kStatistics] = {};
  char signal_stack[65536];

  uint64_t random();
};

// The worker of this OS thread while it runs a launch.
extern constinit thread_local Worker* worker;

// schedule.cpp
uint64_t next_random(uint64_t& state);
void run_threadgroup(int id);
[[noreturn]] void leave_fibers();

// memory.cpp
size_t round_up(size_t value, size_t step);
void* reserve(size_t bytes);
void describe(char* text, size_t capacity, const char* address, const char* what);
[[gnu::format(printf, 2, 3)]] void report(const void* pc, const char* format, ...);

// checks.cpp
void settle_clash();

// The launch has failed: say how, and leave the fiber if there is one.
#define MH_FAIL(pc, ...)                 \
  do {                                   \
    report(pc, __VA_ARGS__);             \
    if (worker->current) leave_fibers(); \
  } while (0)
}  // namespace mh
