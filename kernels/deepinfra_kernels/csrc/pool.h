// Threads that compute tasks. A phase is over when its tasks are done, not when every thread has arrived: one that
// the system took off its core between two tasks holds nobody up, and joins later wherever the others are.
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
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace di {

class Pool {
 public:
  // `threads` with the caller, who is thread 0.
  explicit Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
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
  // One word says which phase, how many tasks it has, and which is next, so that whoever takes a number knows without
  // reading anything else whether it is good.
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
      next_.store(uint64_t(phase) << (2 * kBits) | uint64_t(tasks) << kBits, std::memory_order_release);
      return;
    }
    next_.store(0, std::memory_order_relaxed);
    running_.store(false, std::memory_order_release);
  }

  static bool good(uint64_t ticket) { return (ticket & kMask) < (ticket >> kBits & kMask); }

  void take_part(int thread) {
    int spins = 0;
    while (running_.load(std::memory_order_acquire)) {
      if (good(next_.load(std::memory_order_relaxed))) {
        const uint64_t ticket = next_.fetch_add(1, std::memory_order_acq_rel);
        if (good(ticket)) {
          const int64_t phase = int64_t(ticket >> (2 * kBits));
          try {
            task_(work_, phase, int64_t(ticket & kMask), thread);
          } catch (...) {
            if (!failed_.exchange(true)) error_ = std::current_exception();
          }
          if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) advance(phase + 1);
          spins = 0;
          continue;
        }
      }
      if (++spins < kSpins) {
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
  void* work_ = nullptr;
  int64_t phases_ = 0;
  int64_t (*begin_)(void*, int64_t) = nullptr;
  void (*task_)(void*, int64_t, int64_t, int) = nullptr;
  alignas(64) std::atomic<uint64_t> next_{0};
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
