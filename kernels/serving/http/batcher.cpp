#include "batcher.h"

namespace funcrec::serving {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

Answer whole(Answer answer, const Model& model, int64_t bags) {
  if (answer.outputs.size() != model.manifest.outputs.size()) throw Failed("the model gave another number of outputs");
  for (const Output& output : answer.outputs)
    if (output.shape.empty() || output.shape[0] != bags) throw Failed("an output of the model has another number of rows than there are bags");
  return answer;
}

}  // namespace

Bags merge(const Jobs& jobs, const Manifest& manifest) {
  Bags all(jobs.empty() ? nullptr : jobs[0]->bags.values.get_allocator().memory);
  size_t ids = 0;
  for (const auto& job : jobs) {
    all.bags += job->bags.bags;
    ids += job->bags.values.size();
    all.dense.insert(all.dense.end(), job->bags.dense.begin(), job->bags.dense.end());
  }
  if (!manifest.has_ids) return all;
  all.values.reserve(ids);
  all.weights.reserve(manifest.has_weights ? ids : 0);
  all.offsets.reserve(manifest.features.size() * size_t(all.bags) + 1);
  all.offsets.push_back(0);
  for (size_t f = 0; f < manifest.features.size(); f++)
    for (const auto& job : jobs) {
      const Bags& own = job->bags;
      const int64_t* o = own.offsets.data() + int64_t(f) * own.bags;
      const int64_t shift = int64_t(all.values.size()) - o[0];
      for (int64_t b = 1; b <= own.bags; b++) all.offsets.push_back(o[b] + shift);
      all.values.insert(all.values.end(), own.values.begin() + o[0], own.values.begin() + o[own.bags]);
      if (manifest.has_weights) all.weights.insert(all.weights.end(), own.weights.begin() + o[0], own.weights.begin() + o[own.bags]);
    }
  return all;
}

Batcher::Batcher(const Model& model, Metrics& metrics, Limits limits, std::function<void(Jobs)> deliver)
    : model_(model), metrics_(metrics), limits_(limits), deliver_(std::move(deliver)) {
  for (int i = 0; i < limits.workers; i++) threads_.emplace_back([this] { work(); });
}

Batcher::~Batcher() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  for (std::thread& t : threads_) t.join();
}

bool Batcher::push(std::unique_ptr<Job>& job) {
  job->queued = Clock::now();
  {
    std::lock_guard lock(mutex_);
    if (queue_.size() >= limits_.queue) return false;
    queue_.push_back(std::move(job));
  }
  changed_.notify_one();
  return true;
}

size_t Batcher::waiting() const {
  std::lock_guard lock(mutex_);
  return queue_.size();
}

Jobs Batcher::take() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
  Jobs jobs;
  int64_t bags = 0, ids = 0;
  while (!queue_.empty()) {
    const Bags& next = queue_.front()->bags;
    bags += next.bags;
    ids += int64_t(next.values.size());
    if (!jobs.empty() && (bags > limits_.bags || ids > model_.manifest.max_ids)) break;
    jobs.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  return jobs;
}

void Batcher::work() {
  for (Jobs jobs = take(); !jobs.empty(); jobs = take()) {
    Jobs in_time = without_late(jobs);
    if (!jobs.empty()) deliver_(std::move(jobs));
    if (in_time.empty()) continue;
    run(in_time);
    deliver_(std::move(in_time));
  }
}

Jobs Batcher::without_late(Jobs& jobs) {
  Jobs in_time, late;
  const Clock::time_point now = Clock::now();
  for (auto& job : jobs) {
    metrics_.waited(seconds_since(job->queued));
    if (now < job->deadline) {
      in_time.push_back(std::move(job));
      continue;
    }
    job->outcome = Problem{504, "the request's time is over", "a queue that was longer", "more time in Timeout-Ms, or fewer requests at once"};
    late.push_back(std::move(job));
  }
  jobs = std::move(late);
  return in_time;
}

void Batcher::run(Jobs& jobs) {
  if (jobs.size() == 1) return run_alone(*jobs[0]);
  try {
    const Clock::time_point begin = Clock::now();
    const Bags all = merge(jobs, model_.manifest);
    auto answer = std::make_shared<const Answer>(whole(model_.run(all.view()), model_, all.bags));
    metrics_.ran(jobs.size(), all.bags, seconds_since(begin), answer->ids_out_of_range);
    int64_t first = 0;
    for (auto& job : jobs) {
      job->outcome = Part{answer, first, job->bags.bags, job->ids_out_of_range};
      first += job->bags.bags;
    }
  } catch (const std::exception&) {  // run one by one, to find out which fail
    metrics_.ran_one_by_one();
    for (auto& job : jobs) run_alone(*job);
  }
}

void Batcher::run_alone(Job& job) {
  try {
    const Clock::time_point begin = Clock::now();
    auto answer = std::make_shared<const Answer>(whole(model_.run(job.bags.view()), model_, job.bags.bags));
    metrics_.ran(1, job.bags.bags, seconds_since(begin), answer->ids_out_of_range);
    job.outcome = Part{answer, 0, job.bags.bags, job.ids_out_of_range};
  } catch (const Bad& e) {
    job.outcome = Problem{400, e.problem, e.got, e.need};
  } catch (const std::exception& e) {
    job.outcome = Problem{500, "the model failed", e.what(), "a run that ends"};
  }
}

}  // namespace funcrec::serving
