// funcrec-at-once PACKAGE OTHER-WEIGHTS SECONDS DELTA..: runs, swaps, ways back and deltas from several threads at once. Each
// answer must equal, bit for bit, the answer of the version that it names. Then the weights are read without a program,
// because a sanitizer sees only these reads.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "weights.h"

using namespace funcrec::serving;

namespace {

constexpr int READERS = 3;
std::atomic<long> runs = 0, changes = 0, wrong = 0, backs = 0;

struct Question {
  std::vector<float> dense, weights;
  std::vector<int64_t> values, offsets;
  Request view() const { return {3, dense, values, offsets, weights}; }
};

Question question(const Manifest& m) {
  Question q;
  const int64_t bags = m.has_ids ? 3 * int64_t(m.features.size()) : 0;
  q.dense.assign(size_t(3 * m.dense_columns), 0.25f);
  for (int64_t i = 0; m.has_ids && i <= bags; i++) q.offsets.push_back(2 * i);
  for (int64_t i = 0; i < 2 * bags; i++) q.values.push_back(i * 7 % 40 - 1);
  if (m.has_weights) q.weights.assign(q.values.size(), 0.5f);
  return q;
}

std::string bytes(const Answer& a) {
  std::string out;
  for (const Output& o : a.outputs) out.append(static_cast<const char*>(o.data), size_t(o.row_bytes() * o.shape[0]));
  return out;
}

// Runs `read` in READERS threads and `change` in two more, until the time is over.
template <class R, class C> void at_once(double seconds, R&& read, C&& change) {
  std::atomic<bool> over = false;
  std::vector<std::thread> threads;
  const auto repeat = [&](auto& f) { threads.emplace_back([&] { while (!over) f(); }); };
  for (int i = 0; i < READERS; i++) repeat(read);
  repeat(change), repeat(change);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  over = true;
  for (std::thread& t : threads) t.join();
}

}  // namespace

int main(int count, char** words) {
  if (count < 4) return 2;
  const std::string folder = words[1], other = words[2];
  const double seconds = std::atof(words[3]);
  const std::vector<std::string> deltas(words + 4, words + count);
  const auto package = Package::open(folder, {.threads = 1, .runners = READERS, .checksums = false, .operators = ""});
  const Question asked = question(package->manifest());
  std::map<std::string, std::string> right;  // the answer of each version
  const auto learn = [&] { right[package->version()] = bytes(package->run(asked.view())); };
  package->swap(other), learn(), package->swap(folder), learn();
  for (const std::string& d : deltas) package->apply(d), learn();

  std::map<std::string, long> seen;
  std::mutex seeing;
  const auto run = [&] {
    const Answer a = package->run(asked.view());
    runs++, wrong += bytes(a) != right.at(a.version);
    std::lock_guard alone(seeing);
    seen[a.version]++;
  };
  const auto change = [&](auto&& swap, auto&& apply) {  // a delta after another thread's swap does not fit
    swap();
    for (const std::string& d : deltas) {
      try {
        apply(d), changes++;
      } catch (const Bad&) {
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  std::atomic<int> turn = 0;
  const auto swap = [&] {
    package->swap(turn++ % 4 ? folder : other);
    try {
      if (turn % 3 == 0) package->back(package->kept()), backs++;
    } catch (const Bad&) {  // another thread has replaced the kept weights
    }
  };
  at_once(seconds, run, [&] { change(swap, [&](const std::string& d) { package->apply(d); }); });
  std::printf("package: %ld runs of %zu versions, %ld deltas, %ld ways back, %ld wrong\n", runs.load(), seen.size(), changes.load(), backs.load(), wrong.load());
  const bool all = seen.size() == right.size() && changes > 0 && backs > 0;

  std::map<std::string, uint64_t> sums;
  const Manifest& m = package->manifest();
  const auto sum_of = [](const Weights& w) {
    uint64_t sum = 0;
    for (const Placed& p : w.tensors())
      for (int64_t i = 0; i < p.nbytes; i++) sum = sum * 31 + uint8_t(w.address(p)[i]);
    return sum;
  };
  {
    Weights w(Folder(folder), m, true);
    sums[w.version] = sum_of(w);
    for (const std::string& d : deltas) w.apply(open_file(d), m), sums[w.version] = sum_of(w);
  }
  runs = changes = 0;
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds); std::chrono::steady_clock::now() < end;) {
    Weights w(Folder(folder), m, true);
    std::mutex one_change;
    at_once(seconds / 10, [&] {
      std::shared_lock reading(w.gate);
      runs++, wrong += sum_of(w) != sums.at(w.version);
    }, [&] { change([] {}, [&](const std::string& d) { std::lock_guard alone(one_change); w.apply(open_file(d), m); }); });
  }
  std::printf("weights: %ld reads, %ld deltas, %ld wrong\n", runs.load(), changes.load(), wrong.load());
  return wrong || !all || !changes;
}
