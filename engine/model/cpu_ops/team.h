// A team of threads that share the pieces of a job, and of which nobody waits for one who has not come.
//
// OpenMP ends a parallel region when every thread of it has been there. Where another process has one of the cores
// that means a time slice of the system per region, and a step has a hundred and fifty of them: steps of 10 ms took
// more than a second. Here the one who has a job begins at once and fetches piece after piece; threads that are awake
// help; the job is done when all pieces are, whoever made them.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

class Team {
 public:
  // The process's only one. Never destroyed: its threads may outlive what ends before the process does.
  static Team& instance() {
    static Team* team = new Team();
    return *team;
  }

  // Calls function(begin, end) for pieces of 0 .. count with at most `threads` threads, the caller one of them.
  template <typename Function>
  void share(int64_t count, int64_t piece, int threads, const Function& function) {
    piece = std::max(piece, (count + MOST_PIECES - 1) / MOST_PIECES);
    // A job at a time: whoever comes while there is one, even from within it, works alone.
    if (count <= piece || threads < 2 || busy_.exchange(true, std::memory_order_acquire))
      return function(int64_t{0}, count);
    hire(threads - 1);
    const uint64_t total = (count + piece - 1) / piece;
    // What throws ends the process: helpers may be at work on what the caller's stack would take along.
    call_ = [](const void* callee, int64_t begin, int64_t end) noexcept {
      (*static_cast<const Function*>(callee))(begin, end);
    };
    callee_ = &function;
    count_ = count;
    piece_ = piece;
    helpers_ = threads - 1;
    done_.store(0, std::memory_order_relaxed);
    // Whoever takes a piece has seen this, and so the job it belongs to; and while a piece is out, the job stays.
    state_.store(total << PIECE_BITS);
    wake();
    while (work()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) < total; ++spins) rest(spins);
    busy_.store(false, std::memory_order_release);
  }

 private:
  static constexpr int PIECE_BITS = 20;  // state_: pieces taken, and above these bits pieces in all.
  static constexpr int64_t MOST_PIECES = (int64_t{1} << PIECE_BITS) - 1;
  static constexpr int SPINS = 256;  // Before another thread is let onto the core.
  // How long a thread stays awake without work: longer than what lies between two operators of a step.
  static constexpr std::chrono::microseconds AWAKE{200};

  Team() = default;

  static bool has_pieces(uint64_t state) { return (state & MOST_PIECES) < state >> PIECE_BITS; }

  // Takes a piece and does it; false if there is none.
  bool work() {
    uint64_t seen = state_.load(std::memory_order_acquire);
    do {
      if (!has_pieces(seen)) return false;
    } while (!state_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    const int64_t begin = static_cast<int64_t>(seen & MOST_PIECES) * piece_;
    call_(callee_, begin, std::min(begin + piece_, count_));
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void hire(int helpers) {
    for (; hired_ < helpers; ++hired_) std::thread(&Team::help, this, hired_).detach();
  }

  [[noreturn]] void help(int number) {
    for (;;) {
      auto until = std::chrono::steady_clock::now() + AWAKE;
      for (int spins = 0;; ++spins) {
        if (number < helpers_.load(std::memory_order_relaxed) && work()) {
          until = std::chrono::steady_clock::now() + AWAKE;
          spins = 0;
        } else {
          rest(spins);
          if (spins % SPINS == SPINS - 1 && std::chrono::steady_clock::now() > until) break;
        }
      }
      const uint32_t calls = calls_.load();
      asleep_.fetch_add(1);
      // A job that came meanwhile was not called out to this thread.
      if (!has_pieces(state_.load()) || number >= helpers_) calls_.wait(calls);
      asleep_.fetch_sub(1);
    }
  }

  void wake() {
    if (asleep_.load() == 0) return;
    calls_.fetch_add(1);
    calls_.notify_all();
  }

  static void rest(int spins) {
#ifdef __SSE2__
    if (spins % SPINS != SPINS - 1) return _mm_pause();
#endif
    std::this_thread::yield();
  }

  std::atomic<bool> busy_{false};
  int hired_ = 0;
  void (*call_)(const void*, int64_t, int64_t) noexcept = nullptr;
  const void* callee_ = nullptr;
  int64_t count_ = 0, piece_ = 1;
  std::atomic<int> helpers_{0}, asleep_{0};
  std::atomic<uint32_t> calls_{0};
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<uint64_t> done_{0};
};

}  // namespace
