// parallel_for(threads, items, f) calls f(item) once for every item in [0, items), and hands items out in order.
// It uses the threads of the OpenMP runtime that torch has loaded (Python passes the address of GOMP_parallel). These threads are
// already running, and do not compete with torch's threads for the cores. Without this runtime, and in a forked child, whose OpenMP threads
// are gone, a small pool runs the loop, and its idle threads sleep. A caller does not wait for a pool that runs another caller's loop, but
// works alone. Items must not depend on the thread that runs them.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace funcrec {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// One loop, shared by the threads that work on it.
struct Loop {
  std::atomic<int64_t> next{0};
  int64_t items;
  void (*body)(void*, int64_t);
  void* data;
  std::atomic<bool> failed{false};
  std::exception_ptr error;

  Loop(int64_t items, void (*body)(void*, int64_t), void* data) : items(items), body(body), data(data) {}

  void work() noexcept {
    try {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(data, i);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
      next.store(items);
    }
  }
};

class Pool {
 public:
  // Returns false if another caller has the pool.
  bool run(int threads, Loop& loop) {
    std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine) return false;
    std::unique_lock<std::mutex> lock(mutex_);
    try {
      while (int(threads_.size()) < threads - 1) {
        const int number = int(threads_.size());
        threads_.emplace_back([this, number, seen = generation_] { serve(number, seen); });
      }
    } catch (const std::exception&) {  // the system allows no more threads: the existing ones do the work
    }
    loop_ = &loop;
    wanted_ = left_ = std::min(threads - 1, int(threads_.size()));
    generation_++;
    wake_.notify_all();
    lock.unlock();
    loop.work();
    lock.lock();
    done_.wait(lock, [&] { return left_ == 0; });
    return true;
  }

 private:
  void serve(int number, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (number >= wanted_) continue;
      Loop* loop = loop_;
      lock.unlock();
      loop->work();
      lock.lock();
      if (--left_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Loop* loop_ = nullptr;
  int wanted_ = 0, left_ = 0;
  uint64_t generation_ = 0;
};

// Nothing destroys the pool: its threads sleep until the process ends. A forked child starts with a new pool, because a thread that the child
// does not have may have held a lock of the parent's pool.
inline std::atomic<Pool*>& pool() {
  static std::atomic<Pool*> p{new Pool};
  return p;
}

inline std::atomic<GompParallel>& gomp_parallel() {
  static std::atomic<GompParallel> f{nullptr};
  return f;
}

inline void after_fork() {
  gomp_parallel() = nullptr;
  pool() = new Pool;
}

// Sets the address of OpenMP's GOMP_parallel, or 0 for none. Python calls this function once, before any loop.
inline void start_parallel(int64_t address) {
  pool();
  gomp_parallel() = reinterpret_cast<GompParallel>(address);
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork);
  (void)registered;
}

// body(data, item) for every item. It is compiled once for all loops, and so is the body of each loop.
__attribute__((noinline)) inline void run_loop(int64_t threads, int64_t items, void (*body)(void*, int64_t), void* data) {
  if (threads <= 1 || items <= 1) {
    for (int64_t i = 0; i < items; i++) body(data, i);
    return;
  }
  Loop loop(items, body, data);
  // For another number of threads than torch's, OpenMP would rebuild its team. So this is always `threads`, even for fewer items.
  if (GompParallel parallel = gomp_parallel()) {
    parallel([](void* data) { static_cast<Loop*>(data)->work(); }, &loop, unsigned(threads), 0);
  } else if (!pool().load()->run(int(threads), loop)) {
    loop.work();
  }
  if (loop.error) std::rethrow_exception(loop.error);
}

template <class F> void parallel_for(int64_t threads, int64_t items, F&& f) {
  using Body = std::remove_reference_t<F>;
  const auto body = [](void* data, int64_t i) { (*static_cast<Body*>(data))(i); };
  run_loop(threads, items, body, const_cast<std::remove_const_t<Body>*>(&f));
}

}  // namespace funcrec
