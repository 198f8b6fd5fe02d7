// Fibers, and the places where they meet: SIMD-group functions and barriers.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "msl_matrix.hpp"
#include "runtime.hpp"

namespace mh {
constinit thread_local Worker* worker = nullptr;

namespace {
#if defined(__x86_64__)
extern "C" void mh_switch(void** save, void* to);
asm(R"(.text
.globl mh_switch
.type mh_switch,@function
mh_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
// A stack from which mh_switch returns into `function`; `top` is a multiple of 16.
void* fresh_stack(char* top, void (*function)()) {
  void** stack = reinterpret_cast<void**>(top) - 8;
  for (int i = 0; i < 8; ++i) stack[i] = nullptr;
  stack[6] = reinterpret_cast<void*>(function);
  return stack;
}
#else
#error "the switch between fibers is written for x86-64 only"
#endif

Fiber* take_ready() {
  Worker* w = worker;
  if (w->head == w->queue.size()) {
    w->queue.clear();
    w->head = 0;
    return nullptr;
  }
  size_t chosen = w->head;
  if (w->launch->shuffle == kGreedy) {
    for (size_t i = w->head; i < w->queue.size(); ++i)
      if (w->priority[w->queue[i] / 32] < w->priority[w->queue[chosen] / 32]) chosen = i;
  } else if (w->launch->shuffle == kRandom) {
    chosen += w->random() % (w->queue.size() - w->head);
  }
  std::swap(w->queue[w->head], w->queue[chosen]);
  Fiber* fiber = &w->fibers[w->queue[w->head++]];
  if (w->head > 4096) {
    w->queue.erase(w->queue.begin(), w->queue.begin() + w->head);
    w->head = 0;
  }
  return fiber;
}

void make_ready(Fiber* fiber) {
  fiber->state = kReady;
  worker->queue.push_back(uint16_t(fiber->id));
}

// Let others run until this fiber is ready again.
void wait() {
  Worker* w = worker;
  settle_clash();
  Fiber* self = w->current;
  Fiber* next = take_ready();
  if (next == self) return;
  w->current = next;
  mh_switch(&self->stack, next ? next->stack : w->main_stack);
}

void fiber_main() {
  Worker* w = worker;
  Fiber* self = w->current;
  w->shared->entry(w->launch->data, self->attributes);
  settle_clash();
  self->state = kDone;
  w->done++;
  Fiber* next = take_ready();
  w->current = next;
  void* forgotten;
  mh_switch(&forgotten, next ? next->stack : w->main_stack);
  __builtin_unreachable();
}

bool same(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() && a.file_name() == b.file_name();
}

bool earlier(const Site& a, const Site& b) {
  return a.line() != b.line() ? a.line() < b.line() : a.column() < b.column();
}

// The `active` lanes stand at one SIMD-group function: compute it, and wake all but `self`.
void resolve(SimdGroup& group, uint32_t active, Fiber* self) {
  Worker* w = worker;
  Slot* slots[32];
  for (int i = 0; i < 32; ++i) slots[i] = group.fibers[i];
  Fiber* first = group.fibers[__builtin_ctz(active)];
  w->statistics[kSimdOperations]++;
  if (active != group.lanes) {
    w->statistics[kPartialSimdOperations]++;
    bool whole = !w->launch->partial_simd || (first->flags & (kFullSimdgroup | kSimdBarrier));
    if (w->launch->strict && whole) {
      if (!w->current) w->current = first;
      report(nullptr, "%s reached by lanes 0x%08x of simdgroup lanes 0x%08x at %s:%u", first->what,
             active, group.lanes, first->site.file_name(), first->site.line());
      return;
    }
  }
  if (first->flags & kSimdBarrier) {
    unsigned flags = first->in[0];
    group.threadgroup_epoch += flags & kMemThreadgroup ? 1 : 0;
    group.device_epoch += flags & kMemDevice ? 1 : 0;
  } else {
    first->resolve(slots, active);
  }
  group.arrived &= ~active;
  group.mismatch = false;
  for (int i = 0; i < 32; ++i)
    if ((active >> i & 1) && group.fibers[i] != self) make_ready(group.fibers[i]);
}

void meet(Resolve function, unsigned flags, const char* what, const Site& site) {
  Worker* w = worker;
  Fiber* self = w->current;
  SimdGroup& group = w->simdgroups[self->simdgroup];
  self->resolve = function;
  self->flags = flags;
  self->what = what;
  self->site = site;
  if (group.arrived) {
    Fiber* other = group.fibers[__builtin_ctz(group.arrived)];
    if (other->resolve != function || !same(other->site, site)) group.mismatch = true;
  }
  group.arrived |= 1u << self->lane;
  if (group.arrived == group.lanes && !group.mismatch) {
    resolve(group, group.arrived, self);
    if (w->failed) leave_fibers();
    return;
  }
  self->state = kAtSimd;
  wait();
}

void release_barrier(Fiber* self) {
  Worker* w = worker;
  unsigned flags = w->barrier_flags;
  w->statistics[kBarriers]++;
  w->at_barrier = 0;
  w->barrier_mismatch = false;
  w->threadgroup_epoch += flags & kMemThreadgroup ? 1 : 0;
  w->device_epoch += flags & kMemDevice ? 1 : 0;
  for (int i = 0; i < w->threads; ++i)
    if (w->fibers[i].state == kAtBarrier && &w->fibers[i] != self) make_ready(&w->fibers[i]);
  if (self) self->state = kReady;
}

// Lanes went different ways: those at the earliest place in the text go on without the others.
bool resolve_divergence() {
  Worker* w = worker;
  for (int s = 0; s * 32 < w->threads; ++s) {
    SimdGroup& group = w->simdgroups[s];
    if (!group.arrived) continue;
    Fiber* first = nullptr;
    for (int i = 0; i < 32; ++i)
      if ((group.arrived >> i & 1) && (!first || earlier(group.fibers[i]->site, first->site)))
        first = group.fibers[i];
    uint32_t active = 0;
    for (int i = 0; i < 32; ++i) {
      Fiber* fiber = group.fibers[i];
      if ((group.arrived >> i & 1) && fiber->resolve == first->resolve &&
          same(fiber->site, first->site))
        active |= 1u << i;
    }
    resolve(group, active, nullptr);
    return true;
  }
  return false;
}

// No fiber can run: lanes diverged, or not all threads come to one barrier.
void unstick() {
  Worker* w = worker;
  if (resolve_divergence()) return;
  int here = 0, elsewhere = 0;
  Fiber *first = nullptr, *other = nullptr;
  for (int i = 0; i < w->threads; ++i) {
    Fiber& fiber = w->fibers[i];
    if (fiber.state != kAtBarrier) continue;
    if (!first) first = &fiber;
    bool with_first = same(fiber.site, first->site);
    (with_first ? here : elsewhere)++;
    if (!with_first) other = &fiber;
  }
  if (!w->launch->strict || !(w->done || other)) {
    release_barrier(nullptr);
    return;
  }
  w->current = first;
  char others[80] = "";
  if (other) snprintf(others, sizeof others, "; %d wait at line %u", elsewhere, other->site.line());
  report(nullptr,
         "threadgroup_barrier at %s:%u reached by %d of %d threads; %d threads have returned%s",
         first->site.file_name(), first->site.line(), here, w->threads, w->done, others);
}

// What one thread is told about itself.
void set_attributes(Attr& a, unsigned t, const metal::uint3& group, const metal::uint3& size,
                    const metal::uint3& nominal) {
  using metal::uint3;
  Shared* s = worker->shared;
  Launch* l = worker->launch;
  unsigned threads = size.x * size.y * size.z, full = nominal.x * nominal.y * nominal.z;
  a.dispatch_threads_per_threadgroup = nominal;
  a.threads_per_threadgroup = size;
  a.dispatch_simdgroups_per_threadgroup = (full + 31) / 32;
  a.simdgroups_per_threadgroup = (threads + 31) / 32;
  a.dispatch_quadgroups_per_threadgroup = (full + 3) / 4;
  a.quadgroups_per_threadgroup = (threads + 3) / 4;
  a.grid_origin = uint3(0u);
  a.grid_size = uint3(unsigned(l->grid[0]), unsigned(l->grid[1]), unsigned(l->grid[2]));
  a.threads_per_grid = a.grid_size;
  a.thread_index_in_threadgroup = t;
  a.simdgroup_index_in_threadgroup = t / 32;
  a.thread_index_in_simdgroup = t % 32;
  a.quadgroup_index_in_threadgroup = t / 4;
  a.thread_index_in_quadgroup = t % 4;
  a.thread_execution_width = a.threads_per_simdgroup = 32;
  a.thread_position_in_threadgroup = uint3(t % size.x, t / size.x % size.y, t / size.x / size.y);
  a.threadgroup_position_in_grid = group;
  a.thread_position_in_grid = group * nominal + a.thread_position_in_threadgroup;
  a.threadgroups_per_grid =
      uint3(unsigned(s->groups_of[0]), unsigned(s->groups_of[1]), unsigned(s->groups_of[2]));
}

void begin_threadgroup(int id, int threads) {
  Worker* w = worker;
  w->threads = threads;
  w->done = w->at_barrier = 0;
  w->barrier_mismatch = false;
  w->current = nullptr;
  w->queue.clear();
  w->head = 0;
  w->clash.address = nullptr;
  w->run++;
  w->group = unsigned(id) + 1;
  w->threadgroup_epoch = w->device_epoch = 0;
  w->threadgroup_bytes = 0;
  for (auto& priority : w->priority) priority = uint32_t(w->random());
  for (int s = 0; s * 32 < threads; ++s) {
    int lanes = std::min(32, threads - s * 32);
    w->simdgroups[s] = SimdGroup{};
    w->simdgroups[s].lanes = lanes == 32 ? ~0u : (1u << lanes) - 1;
  }
}
}  // namespace

uint64_t next_random(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

uint64_t Worker::random() {
  return next_random(random_state);
}

[[noreturn]] void leave_fibers() {
  void* forgotten;
  mh_switch(&forgotten, worker->main_stack);
  __builtin_unreachable();
}

void run_threadgroup(int id) {
  Worker* w = worker;
  Launch* l = w->launch;
  int* groups = w->shared->groups_of;
  unsigned position[3] = {unsigned(id % groups[0]), unsigned(id / groups[0] % groups[1]),
                          unsigned(id / groups[0] / groups[1])};
  metal::uint3 group, size, nominal;  // a threadgroup at the edge is smaller than the nominal size
  for (int i = 0; i < 3; ++i) {
    group[i] = position[i];
    nominal[i] = unsigned(std::min(l->threadgroup[i], l->grid[i]));
    size[i] = std::min(nominal[i], unsigned(l->grid[i]) - position[i] * nominal[i]);
  }
  int threads = int(size.x * size.y * size.z);
  begin_threadgroup(id, threads);
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = w->fibers[t];
    fiber.id = unsigned(t);
    fiber.simdgroup = fiber.id / 32;
    fiber.lane = fiber.id % 32;
    w->simdgroups[fiber.simdgroup].fibers[fiber.lane] = &fiber;
    fiber.stack = fresh_stack(w->stacks + (size_t(t) + 1) * kStack, fiber_main);
    set_attributes(fiber.attributes, fiber.id, group, size, nominal);
    make_ready(&fiber);
  }
  w->statistics[kThreads] += unsigned(threads);
  while (w->done < threads && !w->failed) {
    Fiber* fiber = take_ready();
    if (fiber) {
      w->current = fiber;
      mh_switch(&w->main_stack, fiber->stack);
    } else {
      unstick();
      w->current = nullptr;
    }
  }
  w->current = nullptr;
  w->statistics[kThreadgroupBytes] =
      std::max<uint64_t>(w->statistics[kThreadgroupBytes], w->threadgroup_bytes);
}

void simd_meet(const void* in, size_t in_bytes, void* out, size_t out_bytes, Resolve function,
               unsigned flags, const char* what, const Site& site) {
  Fiber* self = worker->current;
  memcpy(self->in, in, in_bytes);
  meet(function, flags, what, site);
  memcpy(out, self->out, out_bytes);
}

void simd_barrier(unsigned mem_flags, const Site& site) {
  worker->current->in[0] = static_cast<unsigned char>(mem_flags);
  meet(nullptr, kSimdBarrier, "simdgroup_barrier", site);
}

void threadgroup_barrier(unsigned mem_flags, const Site& site) {
  Worker* w = worker;
  Fiber* self = w->current;
  self->site = site;
  self->what = "threadgroup_barrier";
  self->state = kAtBarrier;
  w->barrier_flags = mem_flags;
  w->at_barrier++;
  if (w->at_barrier == w->threads) {
    for (int i = 0; i < w->threads; ++i)
      if (!same(w->fibers[i].site, site)) w->barrier_mismatch = true;
    bool together = !w->barrier_mismatch || !w->launch->strict;
    if (together && w->launch->shuffle == kInOrder) {
      release_barrier(self);
      return;
    }
    if (together) release_barrier(nullptr);
  }
  wait();
}

void inactive_lane(unsigned lane, unsigned source) {
  if (worker->launch->strict)
    report(nullptr, "lane %u reads lane %u, which does not take part in the shuffle", lane, source);
}

unsigned lane_id() {
  return worker->current->lane;
}

static void resolve_product(Slot* const* slots, uint32_t active) {
  float a[8][8], b[8][8], c[8][8];
  for (unsigned l = 0; l < 32; ++l) {
    if (!(active >> l & 1)) continue;
    float in[6];
    memcpy(in, slots[l]->in, sizeof in);
    unsigned row = metal::mh_frag_row(l), column = metal::mh_frag_col(l);
    for (unsigned e = 0; e < 2; ++e) {
      a[row][column + e] = in[e];
      b[row][column + e] = in[2 + e];
      c[row][column + e] = in[4 + e];
    }
  }
  for (int i = 0; i < 8; ++i)
    for (int k = 0; k < 8; ++k)
      for (int j = 0; j < 8; ++j) c[i][j] = __builtin_fmaf(a[i][k], b[k][j], c[i][j]);
  for (unsigned l = 0; l < 32; ++l) {
    unsigned row = metal::mh_frag_row(l), column = metal::mh_frag_col(l);
    float out[2] = {c[row][column], c[row][column + 1]};
    if (active >> l & 1) memcpy(slots[l]->out, out, sizeof out);
  }
  worker->statistics[kMatrixProducts]++;
}

void multiply_8x8(const float* abc, float* d, const Site& site) {
  simd_meet(abc, 24, d, 8, &resolve_product, kFullSimdgroup, "simdgroup_multiply_accumulate", site);
}
}  // namespace mh
