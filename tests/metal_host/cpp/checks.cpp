// Checked mode: g++ calls the __tsan_* functions at the end of this file for every load and store
// of a kernel compiled with -fsanitize=thread. They look at bounds, initialisation and data races.
//
// Two accesses to one place, one of them a write, are a race unless something orders them: they
// are by one thread, a threadgroup_barrier for that kind of memory lies between them, or both are
// in one SIMD-group with a simdgroup_barrier between them.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "runtime.hpp"

namespace mh {
namespace {
struct Now {
  bool device;
  uint32_t epoch, simd_epoch, group;
};

Now now(bool device) {
  Worker* w = worker;
  SimdGroup& g = w->simdgroups[w->current->simdgroup];
  if (device) return {true, w->device_epoch, g.device_epoch, w->group};
  return {false, w->threadgroup_epoch, g.threadgroup_epoch, uint32_t(w->run)};
}

bool unordered(uint32_t epoch, uint32_t simd_epoch, uint16_t thread, const Now& n) {
  Fiber* self = worker->current;
  if (thread == self->id || epoch != n.epoch) return false;
  return unsigned(thread) / 32 != self->simdgroup || simd_epoch == n.simd_epoch;
}

// A race, and the access that came before.
struct Race {
  const char* what = nullptr;
  const char* did = "";
  uint32_t group = 0;
  uint16_t thread = 0;
  const void* pc = nullptr;
};

const char* race_with_writer(const History& h, bool write, const Now& n) {
  if (!h.writer_group) return nullptr;
  if (h.writer_group != n.group) {
    if (!n.device) return nullptr;  // of the threadgroup that ran before
    return write ? "write after a write by another threadgroup"
                 : "read of a value written by another threadgroup";
  }
  if (!unordered(h.epoch, h.simd_epoch, h.writer, n)) return nullptr;
  return write ? "write-write race" : "read-after-write race";
}

Race race_with_readers(const History& h, const Now& n) {
  for (int i = 0; i < h.readers; ++i) {
    const History::Read& r = h.reads[i];
    if (unordered(r.epoch, r.simd_epoch, r.thread, n))
      return {"write-after-read race", "read", h.reader_group, r.thread, r.pc};
  }
  return {};
}

// Enter an access into the history; its race, if there is one.
Race note(History& h, bool write, const void* pc, const Now& n) {
  auto self = uint16_t(worker->current->id);
  Race race{race_with_writer(h, write, n), "written", h.writer_group, h.writer, h.pc};
  if (h.readers && h.reader_group != n.group) {
    if (n.device && write)
      race = {"write of a value read by another threadgroup", "read", h.reader_group,
              h.reads[0].thread, h.reads[0].pc};
    h.readers = 0;
  }
  if (write) {
    if (!race.what) race = race_with_readers(h, n);
    h.writer_group = n.group;
    h.epoch = n.epoch;
    h.simd_epoch = n.simd_epoch;
    h.writer = self;
    h.pc = pc;
    h.readers = 0;
  } else {
    int slot = h.readers == 0 || h.reads[0].thread == self ? 0 : 1;
    h.readers = uint8_t(std::max<int>(h.readers, slot + 1));
    h.reads[slot] = {n.epoch, n.simd_epoch, self, pc};
    h.reader_group = n.group;
  }
  return race;
}

// Two writes may be of the same value: that shows at the next access.
void raced(char* address, size_t bytes, const void* pc, const Race& race, bool device,
           const char* name, size_t index) {
  PendingClash& clash = worker->clash;
  bool writes = strncmp(race.what, "write-write", 11) == 0 ||
                strncmp(race.what, "write after a write", 19) == 0;
  char text[sizeof clash.text], of[64] = "";
  int* groups = worker->shared->groups_of;
  int id = int(race.group) - 1;
  if (device && race.group != worker->group)
    snprintf(of, sizeof of, " of threadgroup (%d,%d,%d)", id % groups[0],
             id / groups[0] % groups[1], id / groups[0] / groups[1]);
  // The line of the other access comes where \x01 is.
  snprintf(text, sizeof text, "%s memory: %s on '%s' at %s %zu, %s by simdgroup %u lane %u%s\x01",
           device ? "device" : "threadgroup", race.what, name, device ? "element" : "byte", index,
           race.did, race.thread / 32u, race.thread % 32u, of);
  if (!writes || bytes > sizeof clash.before) {
    worker->other_pc = race.pc;
    MH_FAIL(pc, "%s", text);
    return;
  }
  if (clash.address) return;
  clash.address = address;
  clash.bytes = bytes;
  clash.pc = pc;
  clash.other_pc = race.pc;
  memcpy(clash.before, address, bytes);
  memcpy(clash.text, text, sizeof text);
}

void check_buffer(char* address, size_t bytes, bool write, const void* pc) {
  for (auto& b : worker->shared->buffers) {
    if (address < b.start || address >= b.start + b.bytes) continue;
    if (address + bytes > b.start + b.bytes) break;
    if (!b.is_output) {
      if (write) MH_FAIL(pc, "write to input buffer '%s'", b.name);
      return;
    }
    size_t first = size_t(address - b.start) / b.item_size;
    size_t last = (size_t(address - b.start) + bytes - 1) / b.item_size;
    Now n = now(true);
    for (size_t e = first; e <= last; ++e)
      if (Race race = note(b.history[e], write, pc, n); race.what)
        raced(address, bytes, pc, race, true, b.name, e);
    return;
  }
  char text[600];
  describe(text, sizeof text, address, write ? "write" : "read");
  MH_FAIL(pc, "%s", text);
}

void check_threadgroup(char* address, size_t bytes, bool write, const void* pc) {
  Worker* w = worker;
  auto& v = w->variables[size_t(address - w->threadgroup_memory) / kThreadgroupSlot];
  if (!v.start || address < v.start || address + bytes > v.start + v.bytes) {
    char text[600];
    describe(text, sizeof text, address, write ? "write" : "read");
    MH_FAIL(pc, "%s", text);
  }
  size_t first = size_t(address - v.start);
  Now n = now(false);
  for (size_t i = first; i < first + bytes; ++i) {
    if (!write && v.history[i].writer_group != uint32_t(w->run))
      MH_FAIL(pc, "read of uninitialised threadgroup memory '%s' at byte %zu", v.name, i);
    if (Race race = note(v.history[i], write, pc, n); race.what)
      raced(address, bytes, pc, race, false, v.name, i);
  }
}

[[gnu::noinline]] void access(void* where, size_t bytes, bool write, const void* pc) {
  Worker* w = worker;
  if (!w || !w->current) return;
  settle_clash();
  w->access_pc = pc;
  char* address = static_cast<char*>(where);
  char* variables = w->threadgroup_memory;
  if (address >= w->shared->low && address < w->shared->high) {
    w->statistics[kCheckedAccesses]++;
    check_buffer(address, bytes, write, pc);
  } else if (address >= variables &&
             address < variables + kThreadgroupVariables * kThreadgroupSlot) {
    w->statistics[kCheckedAccesses]++;
    check_threadgroup(address, bytes, write, pc);
  }
}
}  // namespace

void settle_clash() {
  PendingClash& clash = worker->clash;
  if (!clash.address) return;
  char* address = clash.address;
  clash.address = nullptr;
  if (memcmp(address, clash.before, clash.bytes)) {
    worker->other_pc = clash.other_pc;
    MH_FAIL(clash.pc, "%s", clash.text);
  } else {
    worker->statistics[kSameValueWrites]++;
  }
}
}  // namespace mh

#define MH_HOOK(name, bytes, write)                                 \
  extern "C" void __tsan_##name(void* address) {                    \
    mh::access(address, bytes, write, __builtin_return_address(0)); \
  }
#define MH_HOOKS(n)                    \
  MH_HOOK(read##n, n, false)           \
  MH_HOOK(write##n, n, true)           \
  MH_HOOK(unaligned_read##n, n, false) \
  MH_HOOK(unaligned_write##n, n, true) \
  MH_HOOK(volatile_read##n, n, false)  \
  MH_HOOK(volatile_write##n, n, true)
MH_HOOKS(1)
MH_HOOKS(2)
MH_HOOKS(4)
MH_HOOKS(8)
MH_HOOKS(16)
extern "C" {
void __tsan_read_range(void* address, size_t bytes) {
  mh::access(address, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  mh::access(address, bytes, true, __builtin_return_address(0));
}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
