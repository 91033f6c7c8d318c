// Threads that compute tasks. Each has a share of neighbouring tasks in every phase, and takes of the others' when its
// own are begun: so a thread reads weights from front to back, and two of them seldom touch the same counter. A phase is
// over when its tasks are done, not when every thread has arrived: one that the system took off its core between two
// tasks holds nobody up, and joins later wherever the others are.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace di {

class Pool {
 public:
  // `threads` with the caller, who is thread 0. `idle(phase, thread)` is called again and again where a thread finds no
  // task, and may be called yet when `run_phases` has returned: it throws nothing and takes well under a microsecond.
  explicit Pool(int threads, std::function<void(int64_t, int)> idle = {})
      : threads_(threads < 1 ? 1 : threads), idle_(std::move(idle)), shares_(new Share[threads_]) {
    try {
      for (int thread = 1; thread < threads_; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
    } catch (...) {  // there are no more threads to be had
      end();
      throw;
    }
  }

  ~Pool() { end(); }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Where a thread's share of a phase's tasks begins.
  int64_t share(int64_t tasks, int thread) const { return tasks * thread / threads_; }

  // Calls f(task, thread) for every task, in any order; returns when all are done. One caller at a time. What a task
  // throws is thrown here, once the others are done.
  template <class F>
  void run(int64_t tasks, F f) {
    if (tasks > kMostTasks) throw std::invalid_argument("there are more tasks than a pool takes");
    struct One {
      F& f;
      int64_t tasks;
      int64_t begin(int64_t) { return tasks; }
      void task(int64_t, int64_t task, int thread) { f(task, thread); }
    } one{f, tasks};
    run_phases(1, one);
  }

  // Phases in order, each after all tasks of the one before. `work.begin(phase)` gives the number of tasks, throws nothing
  // and is called by one thread while no task runs; `work.task(phase, task, thread)` computes one. Up to 65 535 phases.
  template <class Work>
  void run_phases(int64_t phases, Work& work) {
    work_ = &work;
    phases_ = phases;
    begin_ = [](void* with, int64_t phase) { return static_cast<Work*>(with)->begin(phase); };
    task_ = [](void* with, int64_t phase, int64_t task, int thread) {
      static_cast<Work*>(with)->task(phase, task, thread);
    };
    running_.store(true);
    advance(0);
    if (threads_ > 1) wake();
    take_part(0);
    if (failed_.load(std::memory_order_relaxed)) {
      failed_.store(false, std::memory_order_relaxed);
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

  static constexpr int64_t kMostTasks = (1 << 24) - 1;  // of a phase

 private:
  // One word says which phase, where the share ends, and which task is next, so that whoever takes a number knows without
  // reading anything else whether it is good.
  struct alignas(64) Share {
    std::atomic<uint64_t> next{0};
  };
  static constexpr int kBits = 24;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;

  // A thread without work spins for about half a millisecond, then lets others run: whoever is let run keeps the core
  // for milliseconds. Measured beside another busy process: after 2 000 pauses (20 us) a thread got a tenth of a core.
  static constexpr int kSpins = 40'000;
  static constexpr std::chrono::microseconds kIdle{60};

  void advance(int64_t phase) {
    for (; phase < phases_; ++phase) {
      const int64_t tasks = begin_(work_, phase);
      if (tasks <= 0) continue;
      left_.store(tasks, std::memory_order_relaxed);
      for (int thread = 0; thread < threads_; ++thread) {
        const uint64_t first = share(tasks, thread), last = share(tasks, thread + 1);
        shares_[thread].next.store(uint64_t(phase) << (2 * kBits) | last << kBits | first, std::memory_order_release);
      }
      return;
    }
    running_.store(false, std::memory_order_release);
  }

  static int64_t phase_of(uint64_t ticket) { return int64_t(ticket >> (2 * kBits)); }
  static bool good(uint64_t ticket) { return (ticket & kMask) < (ticket >> kBits & kMask); }

  // A task of the thread's own share, or of the next one's that has any.
  bool take(int thread, uint64_t& ticket) {
    for (int i = 0, of = thread; i < threads_; ++i, of = of + 1 == threads_ ? 0 : of + 1) {
      std::atomic<uint64_t>& next = shares_[of].next;
      if (!good(next.load(std::memory_order_relaxed))) continue;
      ticket = next.fetch_add(1, std::memory_order_acq_rel);
      if (good(ticket)) return true;
    }
    return false;
  }

  void take_part(int thread) {
    int spins = 0;
    uint64_t ticket = 0;
    while (running_.load(std::memory_order_acquire)) {
      if (take(thread, ticket)) {
        const int64_t phase = phase_of(ticket);
        try {
          task_(work_, phase, int64_t(ticket & kMask), thread);
        } catch (...) {
          if (!failed_.exchange(true)) error_ = std::current_exception();
        }
        if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) advance(phase + 1);
        spins = 0;
      } else if (++spins < kSpins) {
        if (idle_) idle_(phase_of(shares_[thread].next.load(std::memory_order_relaxed)), thread);
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

  void end() {
    stop_.store(true);
    wake();
    for (auto& worker : workers_) worker.join();
  }

  void serve(int thread) {
    for (;;) {
      const uint32_t seen = generation_.load();  // before `stop_`, which is set before the last generation begins
      if (stop_.load()) return;
      take_part(thread);
      const auto until = std::chrono::steady_clock::now() + kIdle;
      while (generation_.load() == seen && std::chrono::steady_clock::now() < until) {
        for (int pause = 0; pause < 32; ++pause) _mm_pause();
      }
      sleepers_.fetch_add(1);
      syscall(SYS_futex, &generation_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
      sleepers_.fetch_sub(1);
    }
  }

  // Who counted as a sleeper too late to be seen here finds another generation and does not sleep.
  void wake() {
    generation_.fetch_add(1);
    if (sleepers_.load() > 0) syscall(SYS_futex, &generation_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  const int threads_;
  const std::function<void(int64_t, int)> idle_;
  const std::unique_ptr<Share[]> shares_;
  void* work_ = nullptr;
  int64_t phases_ = 0;
  int64_t (*begin_)(void*, int64_t) = nullptr;
  void (*task_)(void*, int64_t, int64_t, int) = nullptr;
  alignas(64) std::atomic<int64_t> left_{0};
  alignas(64) std::atomic<bool> running_{false};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // of the first task that threw
  std::vector<std::thread> workers_;
};

}  // namespace di
