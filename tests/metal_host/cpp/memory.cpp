// A launch: buffers and threadgroup variables between guard pages, workers, and the signals that
// tell of an access outside.
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "runtime.hpp"

namespace mh {
namespace {
char* aligned_down(char* address, size_t step) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(address) / step * step);
}

// Of an instruction in the kernel's own library; 0 elsewhere.
uint64_t offset_of(const void* pc) {
  Dl_info info, kernel;
  bool known = pc && dladdr(pc, &info) &&
               dladdr(reinterpret_cast<void*>(worker->shared->entry), &kernel) &&
               info.dli_fbase == kernel.dli_fbase;
  return known ? uint64_t(pc) - uint64_t(info.dli_fbase) : 0;
}

// The first failure of a launch is the one that is told.
void record(const char* text, const void* pc) {
  Shared* s = worker->shared;
  worker->failed = true;
  std::lock_guard<std::mutex> lock(s->mutex);
  if (!s->failed.exchange(true)) {
    snprintf(s->launch->message, s->launch->message_bytes, "%s", text);
    s->launch->fault_offset = offset_of(pc);
    s->launch->other_offset = offset_of(worker->other_pc);
  }
}

// What a threadgroup does whose time is up: where its threads wait, and where one still runs.
const void* where_it_is(char* text, size_t capacity, const void* pc) {
  Worker* w = worker;
  int states[4] = {};
  Fiber* waiting = nullptr;
  for (int i = 0; i < w->threads; ++i) {
    Fiber& fiber = w->fibers[size_t(i)];
    states[fiber.state]++;
    if (fiber.state == kAtSimd || fiber.state == kAtBarrier) waiting = &fiber;
  }
  int length = snprintf(text, capacity, "; of %d threads %d run or can run, %d have returned",
                        w->threads, states[kReady], states[kDone]);
  if (waiting)
    snprintf(text + length, capacity - size_t(length), ", %d wait, one at the %s of %s:%u",
             states[kAtSimd] + states[kAtBarrier], waiting->what, waiting->site.file_name(),
             waiting->site.line());
  // In checked mode and in places of meeting, the instruction is one of the runtime.
  return offset_of(pc) ? pc : w->access_pc;
}

const Buffer* nearest(const char* address) {
  const Buffer* best = nullptr;
  size_t best_distance = ~size_t(0);
  for (auto& buffer : worker->shared->buffers) {
    const char* end = buffer.start + buffer.bytes;
    size_t distance = address < buffer.start ? size_t(buffer.start - address)
                      : address >= end       ? size_t(address - end)
                                             : 0;
    if (distance < best_distance) {
      best_distance = distance;
      best = &buffer;
    }
  }
  return best;
}

void on_signal(int signal_number, siginfo_t* info, void* context) {
  // The launch's time is up, but this worker has just finished or failed.
  if (signal_number == SIGUSR2 && (!worker || worker->failed)) return;
  if (!worker) {
    signal(signal_number, SIG_DFL);
    raise(signal_number);
    return;
  }
  auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  // Behind the instruction's first byte, as the address that a call returns to lies behind the call.
  const void* pc = reinterpret_cast<const char*>(registers[REG_RIP]) + 1;
  char text[600];
  if (signal_number == SIGILL)
    snprintf(text, sizeof text,
             "index outside an array bound, misaligned vector, or shift count too large");
  else if (signal_number == SIGFPE)
    snprintf(text, sizeof text, "integer division by zero");
  else if (signal_number == SIGUSR2) {
    int length = worker->launch->interrupted
                     ? snprintf(text, sizeof text, "interrupted")
                     : snprintf(text, sizeof text, "still running after %g s of CPU time",
                                worker->launch->seconds);
    pc = where_it_is(text + length, sizeof text - size_t(length), pc);
  } else
    describe(text, sizeof text, static_cast<char*>(info->si_addr), "access");
  report(pc, "%s", text);
  siglongjmp(worker->out_of_signal, 1);
}

// Workers are kept: their stacks are a lot of address space.
std::mutex pool_mutex;
std::vector<Worker*> pool;

Worker* take_worker() {
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (!pool.empty()) {
    Worker* w = pool.back();
    pool.pop_back();
    return w;
  }
  Worker* w = new Worker;
  w->fibers.resize(kMaxThreads);
  w->stacks = static_cast<char*>(reserve(kGuard + kMaxThreads * kStack)) + kGuard;
  for (int i = 0; i < kMaxThreads; ++i)
    mprotect(w->stacks + size_t(i) * kStack + kPage, kStack - kPage, PROT_READ | PROT_WRITE);
  w->threadgroup_memory = static_cast<char*>(reserve(kThreadgroupVariables * kThreadgroupSlot));
  return w;
}

void prepare(Worker* w, Shared* shared, unsigned number) {
  w->shared = shared;
  w->launch = shared->launch;
  w->failed = false;
  w->threads = 0;
  w->access_pc = w->other_pc = nullptr;
  w->random_state = (shared->launch->seed + 1) * 0x9E3779B97F4A7C15ull + number;
  std::fill(std::begin(w->statistics), std::end(w->statistics), 0);
  for (size_t i = 0; i < kThreadgroupVariables; ++i) {
    if (w->variables[i].start)
      mprotect(w->threadgroup_memory + i * kThreadgroupSlot, kThreadgroupSlot, PROT_NONE);
    w->variables[i] = ThreadgroupVariable{};
  }
}

// One OS thread: runs threadgroups until none is left.
void work(Shared* shared, unsigned number) {
  constexpr unsigned kFlushDenormals = 0x8040;
  Worker* w = take_worker();
  prepare(w, shared, number);
  stack_t stack{w->signal_stack, 0, sizeof w->signal_stack}, old_stack;
  sigaltstack(&stack, &old_stack);
  unsigned control = _mm_getcsr();
  if (shared->launch->ftz) _mm_setcsr(control | kFlushDenormals);
  if (!sigsetjmp(w->out_of_signal, 1)) {
    worker = w;  // from here on a signal is told of
    int i;
    while (!shared->failed && !w->failed && (i = shared->next++) < shared->groups)
      run_threadgroup(shared->order.empty() ? i : shared->order[size_t(i)]);
  }
  _mm_setcsr(control);
  sigaltstack(&old_stack, nullptr);
  worker = nullptr;
  {
    std::lock_guard<std::mutex> lock(shared->mutex);
    for (int i = 0; i < kStatistics; ++i) {
      uint64_t& total = shared->statistics[i];
      bool largest = i == kThreadgroupBytes;
      total = largest ? std::max(total, w->statistics[i]) : total + w->statistics[i];
    }
  }
  {
    std::lock_guard<std::mutex> lock(pool_mutex);
    pool.push_back(w);
  }
  std::lock_guard<std::mutex> lock(shared->mutex);
  shared->running--;
  shared->finished.notify_one();
}

double cpu_seconds(std::thread& thread) {
  clockid_t clock;
  timespec time;
  if (pthread_getcpuclockid(thread.native_handle(), &clock) || clock_gettime(clock, &time))
    return 0;
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// Start the workers, and wait for them. One that has computed for as long as the launch may take is
// interrupted, and so are all when the caller asks for it; a busy machine makes no difference.
void run_workers(Shared& s, int workers) {
  std::vector<std::thread> threads;
  s.running = workers;
  for (int k = 0; k < workers; ++k) threads.emplace_back(work, &s, unsigned(k));
  constexpr auto kLook = std::chrono::duration<double>(0.05);
  for (std::unique_lock<std::mutex> lock(s.mutex); s.running;) {
    if (s.finished.wait_for(lock, kLook, [&] { return s.running == 0; })) break;
    // A worker that finishes meanwhile waits for the lock, so every thread is still there.
    for (auto& thread : threads)
      if (s.launch->interrupted || cpu_seconds(thread) > s.launch->seconds)
        pthread_kill(thread.native_handle(), SIGUSR2);
  }
  for (auto& thread : threads) thread.join();
}

// Refuses what Metal refuses; counts the threadgroups.
bool set_grid(Shared& s, Launch* l) {
  int threads = 1;
  for (int i = 0; i < 3; ++i) {
    if (l->grid[i] <= 0 || l->threadgroup[i] <= 0) {
      snprintf(l->message, l->message_bytes, "grid and threadgroup sizes must be positive");
      return false;
    }
    int along = std::min(l->threadgroup[i], l->grid[i]);
    threads *= l->threadgroup[i];
    s.groups_of[i] = (l->grid[i] + along - 1) / along;
    s.groups *= s.groups_of[i];
  }
  if (threads > kMaxThreads) {
    snprintf(l->message, l->message_bytes,
             "a threadgroup of %d threads is more than the maximum allowed threads, %d", threads,
             kMaxThreads);
    return false;
  }
  return true;
}

void shuffle_threadgroups(Shared& s, uint64_t seed) {
  uint64_t state = (seed + 1) * 0x9E3779B97F4A7C15ull;
  for (int i = 0; i < s.groups; ++i) s.order.push_back(i);
  for (int i = s.groups - 1; i > 0; --i)
    std::swap(s.order[size_t(i)], s.order[next_random(state) % unsigned(i + 1)]);
}

// Every buffer ends at a guard, or within 63 bytes of it, and begins at a multiple of 64. Inputs
// are read-only. The mapping's size, or 0.
size_t map_buffers(Shared& s, Launch* l) {
  size_t total = kGuard;
  for (int i = 0; i < l->count; ++i) total += round_up(l->bytes[i] + 64, kPage) + kGuard;
  s.low = static_cast<char*>(reserve(total));
  if (!s.low) {
    snprintf(l->message, l->message_bytes, "cannot reserve %zu bytes", total);
    return 0;
  }
  s.high = s.low + total;
  char* at = s.low + kGuard;
  for (int i = 0; i < l->count; ++i) {
    size_t bytes = l->bytes[i], mapped = round_up(bytes + 64, kPage);
    bool output = l->is_output[i] != 0;
    char* end = at + mapped;
    mprotect(at, mapped, PROT_READ | PROT_WRITE);
    char* start = aligned_down(end - bytes, 64);
    memset(start + bytes, 0xFF, size_t(end - start) - bytes);
    memcpy(start, l->data[i], bytes);
    s.buffers.push_back({start, bytes, l->item_size[i], output, l->names[i], {}});
    if (l->checked && output) s.buffers.back().history.resize(bytes / l->item_size[i] + 1);
    if (!output) mprotect(at, mapped, PROT_READ);
    l->data[i] = start;
    at = end + kGuard;
  }
  return total;
}

// The signals of a failing access, while a launch runs.
struct SignalHandlers {
  static constexpr int kSignals[] = {SIGSEGV, SIGILL, SIGBUS, SIGFPE, SIGUSR2};
  struct sigaction before[5];

  SignalHandlers() {
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 5; ++i) sigaction(kSignals[i], &action, &before[i]);
  }
  ~SignalHandlers() {
    for (int i = 0; i < 5; ++i) sigaction(kSignals[i], &before[i], nullptr);
  }
};
}  // namespace

size_t round_up(size_t value, size_t step) {
  return (value + step - 1) / step * step;
}

void* reserve(size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* start = mmap(nullptr, bytes, PROT_NONE, flags, -1, 0);
  return start == MAP_FAILED ? nullptr : start;
}

void report(const void* pc, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (Fiber* fiber = worker->current) {
    auto group = fiber->attributes.threadgroup_position_in_grid;
    auto thread = fiber->attributes.thread_position_in_threadgroup;
    size_t length = strlen(text);
    snprintf(text + length, sizeof text - length,
             " [threadgroup (%u,%u,%u) thread (%u,%u,%u) simdgroup %u lane %u]", group.x, group.y,
             group.z, thread.x, thread.y, thread.z, fiber->simdgroup, fiber->lane);
  }
  record(text, pc);
}

void describe(char* text, size_t capacity, const char* address, const char* what) {
  Worker* w = worker;
  Shared* s = w->shared;
  char* variables = w->threadgroup_memory;
  if (address >= s->low && address < s->high) {
    const Buffer* b = nearest(address);
    long long offset = address - b->start, item = b->item_size;
    snprintf(text, capacity,
             "%s outside buffer '%s': byte offset %lld of %zu (element %lld of %zu)", what, b->name,
             offset, b->bytes, offset / item, b->bytes / b->item_size);
  } else if (address >= variables &&
             address < variables + kThreadgroupVariables * kThreadgroupSlot) {
    ThreadgroupVariable& v = w->variables[size_t(address - variables) / kThreadgroupSlot];
    snprintf(text, capacity, "%s outside threadgroup variable '%s': byte offset %lld of %zu", what,
             v.start ? v.name : "?", v.start ? (long long)(address - v.start) : 0, v.bytes);
  } else if (address >= w->stacks - kGuard && address < w->stacks + kMaxThreads * kStack) {
    snprintf(text, capacity,
             "%s on a thread stack (private memory larger than %zu bytes, or a wild private index)",
             what, kStack);
  } else {
    snprintf(text, capacity, "%s at unmapped address %p (wild pointer, or a misaligned vector)",
             what, static_cast<const void*>(address));
  }
}

// The variable `id` of this threadgroup, all bits set when the threadgroup first comes to it.
void* threadgroup_memory(unsigned id, size_t bytes, size_t align, const char* name) {
  Worker* w = worker;
  if (id >= kThreadgroupVariables) MH_FAIL(nullptr, "too many threadgroup variables");
  ThreadgroupVariable& v = w->variables[id];
  if (!v.start) {
    if (bytes > kThreadgroupEnd)
      MH_FAIL(nullptr, "threadgroup variable '%s' has %zu bytes", name, bytes);
    char* end = w->threadgroup_memory + id * kThreadgroupSlot + kThreadgroupEnd;
    v.start = aligned_down(end - bytes, align);
    v.bytes = bytes;
    v.name = name;
    char* page = aligned_down(v.start, kPage);
    mprotect(page, size_t(end - page), PROT_READ | PROT_WRITE);
    if (w->launch->checked) v.history.resize(bytes);
  }
  if (v.run != w->run) {
    v.run = w->run;
    memset(v.start, 0xFF, v.bytes);
    w->threadgroup_bytes += round_up(bytes, 16);
    if (w->threadgroup_bytes > kThreadgroupLimit)
      MH_FAIL(nullptr, "threadgroup memory: %zu bytes at variable '%s', the limit is %zu",
              w->threadgroup_bytes, name, kThreadgroupLimit);
  }
  return v.start;
}

int launch(Launch* l, Entry entry) {
  Shared s;
  s.launch = l;
  s.entry = entry;
  l->message[0] = 0;
  if (!set_grid(s, l)) return 1;
  std::vector<void*> callers(l->data, l->data + l->count);
  size_t mapped = map_buffers(s, l);
  if (!mapped) return 1;
  if (l->shuffle != kInOrder) shuffle_threadgroups(s, l->seed);
  {
    static std::mutex one_at_a_time;  // signal handlers are the process's
    std::lock_guard<std::mutex> lock(one_at_a_time);
    SignalHandlers handlers;
    run_workers(s, std::max(1, std::min(l->workers, s.groups)));
  }
  std::copy(std::begin(s.statistics), std::end(s.statistics), l->statistics);
  for (int i = 0; i < l->count; ++i) {
    if (l->is_output[i]) memcpy(callers[size_t(i)], s.buffers[size_t(i)].start, l->bytes[i]);
    l->data[i] = callers[size_t(i)];
  }
  munmap(s.low, mapped);
  return s.failed ? 1 : 0;
}
}  // namespace mh
