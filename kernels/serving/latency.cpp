// funcrec-latency: the measurements of bench/serving.py and bench/invariant_cost.py in a process without Python.
//
//   funcrec-latency runs PACKAGE REQUESTS SECONDS [SCRIPT LIBRARY..]     Package::run beside the forward of a TorchScript
//   funcrec-latency pair PACKAGE OTHER REQUESTS SECONDS THREADS          Package::run of two packages, "first" and "second"
//   funcrec-latency opens PACKAGE REQUESTS                               Package::open, its first answer, its memory
//
// REQUESTS: i64 rounds in a block and i64 requests, then for each i64 bags and dense f32, values i64, offsets i64, lengths i32, each as
// i64 n and n elements. The script takes TorchRec's dict {float_features, id_list_features.lengths,
// id_list_features.values}; its inputs become tensors before the clock starts, and ours are checked and converted while
// it runs. Blocks of both take turns, and each call takes the next request. Written to the standard output: lines of a
// name and numbers.
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/script.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <time.h>

#include "package.h"

using namespace funcrec::serving;

namespace {

struct Asked {
  int64_t bags;
  std::vector<float> dense;
  std::vector<int64_t> values, offsets;
  std::vector<int32_t> lengths;
  Request view() const { return {bags, dense, values, offsets, {}}; }
};

template <class T> void take(std::ifstream& file, std::vector<T>& out) {
  int64_t n = 0;
  file.read(reinterpret_cast<char*>(&n), sizeof n);
  out.resize(size_t(n));
  file.read(reinterpret_cast<char*>(out.data()), std::streamsize(out.size() * sizeof(T)));
}

std::vector<Asked> read_requests(const char* path, int64_t& block) {
  std::ifstream file(path, std::ios::binary);
  int64_t n[2] = {0, 0};
  file.read(reinterpret_cast<char*>(n), sizeof n);
  std::vector<Asked> all(static_cast<size_t>(n[1]));
  for (Asked& a : all) {
    file.read(reinterpret_cast<char*>(&a.bags), sizeof a.bags);
    take(file, a.dense), take(file, a.values), take(file, a.offsets), take(file, a.lengths);
  }
  const auto none = [](const Asked& a) { return a.bags < 1; };
  if (!file || all.empty() || std::any_of(all.begin(), all.end(), none)) throw Bad("the requests cannot be read.", path, "what bench/serving.py writes");
  block = n[0];
  return all;
}

double now(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return double(t.tv_sec) * 1e6 + double(t.tv_nsec) * 1e-3;  // microseconds
}

struct Side {
  std::string name;
  std::function<std::vector<float>(size_t)> answer;  // the answer to a request, copied
  std::function<void(size_t)> run;                   // without the copy
  std::vector<double> clock{}, cpu{};
  size_t next = 0;
};

void time_block(Side& side, int64_t calls, size_t requests) {
  for (int64_t i = 0; i < calls; i++, side.next++) {
    const double cpu = now(CLOCK_THREAD_CPUTIME_ID), begin = now(CLOCK_MONOTONIC);
    side.run(side.next % requests);
    const double end = now(CLOCK_MONOTONIC);
    side.clock.push_back(end - begin), side.cpu.push_back(now(CLOCK_THREAD_CPUTIME_ID) - cpu);
  }
}

void say(const std::string& name, const std::vector<double>& numbers) {
  std::printf("%s", name.c_str());
  for (double x : numbers) std::printf(" %.3f", x);
  std::printf("\n");
}

Side ours(const char* name, const std::shared_ptr<Package>& package, const std::vector<Asked>& asked) {
  return {name, [=, &asked](size_t i) {
            const Answer a = package->run(asked[i].view());
            const auto x = a.outputs[0].as<float>();
            return std::vector<float>(x.begin(), x.end());
          },
          [=, &asked](size_t i) { package->run(asked[i].view()); }};
}

Side theirs(const char* path, const std::vector<Asked>& asked) {
  auto script = std::make_shared<torch::jit::Module>(torch::jit::load(path));
  script->eval();
  auto inputs = std::make_shared<std::vector<c10::IValue>>();
  for (const Asked& a : asked) {
    c10::Dict<std::string, at::Tensor> batch;
    batch.insert("float_features", torch::from_blob(const_cast<float*>(a.dense.data()), {a.bags, int64_t(a.dense.size()) / a.bags}).clone());
    batch.insert("id_list_features.lengths", torch::from_blob(const_cast<int32_t*>(a.lengths.data()), {int64_t(a.lengths.size())}, at::kInt).clone());
    batch.insert("id_list_features.values", torch::from_blob(const_cast<int64_t*>(a.values.data()), {int64_t(a.values.size())}, at::kLong).clone());
    inputs->push_back(batch);
  }
  const auto run = [=](size_t i) { return script->forward({(*inputs)[i]}).toGenericDict().at("default").toTensor(); };
  return {"torchscript", [=](size_t i) {
            const at::Tensor x = run(i).contiguous();
            return std::vector<float>(x.data_ptr<float>(), x.data_ptr<float>() + x.numel());
          },
          [=](size_t i) { run(i); }};
}

// Compares all answers of the sides, then times the sides in turns, and says both.
void measure(std::vector<Side>& sides, const std::vector<Asked>& asked, int64_t block, double seconds) {
  double apart = 0;
  for (size_t i = 0; i < asked.size(); i++) {
    const auto want = sides[0].answer(i), got = sides.back().answer(i);
    if (want.size() != got.size() || int64_t(want.size()) != asked[i].bags) throw Failed("an answer has another size");
    for (size_t k = 0; k < want.size(); k++) apart = std::max(apart, std::isfinite(got[k]) ? std::fabs(double(want[k]) - double(got[k])) : 1e9);
  }
  for (Side& s : sides)  // the first runs of a script are profiled, then compiled
    for (size_t i = 0; i < 20; i++) s.run(i % asked.size());
  const double until = now(CLOCK_MONOTONIC) + seconds * 1e6;
  for (size_t round = 0; now(CLOCK_MONOTONIC) < until || round < 4; round++)
    for (size_t s = 0; s < sides.size(); s++) time_block(sides[(s + round) % sides.size()], block, asked.size());
  std::printf("apart %.9g\n", apart);
  for (const Side& s : sides) say(s.name + ".clock", s.clock), say(s.name + ".cpu", s.cpu);
}

void runs(int count, char** words) {
  int64_t block = 1;
  const auto asked = read_requests(words[3], block);
  for (int i = 6; i < count; i++)
    if (!dlopen(words[i], RTLD_NOW | RTLD_GLOBAL)) throw Failed(dlerror());
  at::set_num_threads(1);
  c10::InferenceMode inference;
  std::vector<Side> sides{ours("funcrec", Package::open(words[2]), asked)};
  if (count > 5) sides.push_back(theirs(words[5], asked));
  measure(sides, asked, block, std::atof(words[4]));
}

void pair(char** words) {
  int64_t block = 1;
  const auto asked = read_requests(words[4], block);
  Options options;
  options.threads = std::atoi(words[6]);
  c10::InferenceMode inference;
  std::vector<Side> sides{ours("first", Package::open(words[2], options), asked), ours("second", Package::open(words[3], options), asked)};
  measure(sides, asked, block, std::atof(words[5]));
}

void opens(char** words) {
  int64_t block = 1;
  const auto asked = read_requests(words[3], block);
  at::set_num_threads(1);
  Options options;
  options.checksums = false;  // only the mapping is measured
  const double begin = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
  const auto package = Package::open(words[2], options);
  const double opened = now(CLOCK_MONOTONIC), opened_cpu = now(CLOCK_PROCESS_CPUTIME_ID);
  package->run(asked[0].view());
  const double answered = now(CLOCK_MONOTONIC);
  say("open.clock", {opened - begin}), say("open.cpu", {opened_cpu - cpu}), say("answer.clock", {answered - begin});
  std::fflush(stdout);
  for (int command; (command = std::getchar()) != EOF;) {  // for each line it answers all requests, so that their pages are in memory
    for (const Asked& a : asked) package->run(a.view());
    if (command == '\n') say("done", {}), std::fflush(stdout);
  }
}

}  // namespace

int main(int count, char** words) {
  const std::string what = count > 1 ? words[1] : "";
  try {
    if (what == "runs" && count > 4) return runs(count, words), 0;
    if (what == "pair" && count > 6) return pair(words), 0;
    if (what == "opens" && count > 3) return opens(words), 0;
    std::fprintf(stderr, "funcrec-latency runs PACKAGE REQUESTS SECONDS [SCRIPT LIBRARY..] | pair PACKAGE OTHER REQUESTS SECONDS THREADS | opens PACKAGE REQUESTS\n");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "funcrec-latency: %s\n", e.what());
  }
  return 2;
}
