// Requests wait in one queue. Each worker takes all waiting requests as one batch, and does not wait for more: requests
// that come while a batch runs form the next batch. A timer would only delay the first request.
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
  std::chrono::steady_clock::time_point queued = {}, deadline = std::chrono::steady_clock::time_point::max();  // after the deadline no client waits
  std::function<void(Outcome)> done;
  Outcome outcome;
};
using Jobs = std::vector<std::unique_ptr<Job>>;

struct Limits {
  int workers = 1;
  size_t queue = 1024;  // requests that may wait
  int64_t bags = 4096;  // of one batch; a request with more is a batch by itself
};

class Batcher {
 public:
  // A worker calls `deliver` with each batch that has ended; each job then has its outcome.
  Batcher(const Model&, Metrics&, Limits, std::function<void(Jobs)> deliver);
  ~Batcher();                           // runs all queued jobs first
  bool push(std::unique_ptr<Job>&);     // returns false and leaves the job to the caller if too many wait
  size_t waiting() const;
  bool is_full() const { return waiting() >= limits_.queue; }

 private:
  void work();
  Jobs take();
  void run(Jobs&);
  Jobs without_late(Jobs&);  // returns the jobs that are not late; the others get their outcome
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

// Joins several requests to one, feature by feature.
Bags merge(const Jobs&, const Manifest&);

}  // namespace funcrec::serving
