// Requests wait in one queue; each worker takes whatever is there as one batch and runs it, without waiting for more: what comes
// in while a batch runs is the next one. A timer would only add to the time of the first.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <variant>
#include <vector>

#include "metrics.h"
#include "model.h"

namespace funcrec::serving {

using Outcome = std::variant<Problem, Part>;

struct Job {
  Bags bags;
  int64_t ids_out_of_range = 0;
  std::chrono::steady_clock::time_point queued = {}, deadline = std::chrono::steady_clock::time_point::max();  // then nobody waits for it
  std::function<void(Outcome)> done;
  Outcome outcome;
};
using Jobs = std::vector<std::unique_ptr<Job>>;

struct Limits {
  int workers = 1;
  size_t queue = 1024;  // requests that may wait
  int64_t bags = 4096;  // of one batch; a request that has more is a batch of its own
};

class Batcher {
 public:
  // `deliver` is called by a worker with each batch that has ended; each job's outcome is set.
  Batcher(const Model&, Metrics&, Limits, std::function<void(Jobs)> deliver);
  ~Batcher();                           // what is queued is run first
  bool push(std::unique_ptr<Job>&);     // false, and the job stays the caller's, if too many wait
  size_t waiting() const;
  bool is_full() const { return waiting() >= limits_.queue; }

 private:
  void work();
  Jobs take();
  void run(Jobs&);
  Jobs without_late(Jobs&);  // those that are not late; what is left has its outcome
  void run_alone(Job&);

  const Model& model_;
  Metrics& metrics_;
  const Limits limits_;
  const std::function<void(Jobs)> deliver_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Job>> queue_;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

// Several requests as one, feature by feature.
Bags merge(const Jobs&, const Manifest&);

}  // namespace funcrec::serving
