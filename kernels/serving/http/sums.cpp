// funcrec-serve-sums: the server with a model that needs no package. Its answers are known without running it, it fails
// or waits on request, and it is small enough for a build with sanitizers. PATH is a word: `bare` has no dense columns,
// any other word has 3; a number after a `-` is the version at the start, else 0.
//
//   score[b] = version + sum over dense of x + sum over features f and ids i of (f + 1) * weight * id     f32
//   ids[b]   = how many ids the bag has in all features                                                  i64[B, 2]: twice
//
// Every table has 1000 rows; ids outside are not counted. Id 900 makes a run fail, and id 901 makes it take 50 ms.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <sstream>
#include <thread>

#include "../files.h"
#include "command.h"

using namespace funcrec::serving;

namespace {

constexpr int64_t ROWS = 1000, FAILS = 900, DAWDLES = 901;

Manifest manifest(int64_t columns) {
  Manifest m;
  m.digest = "sums";
  m.inputs = {{"dense", DType::f32, {BAGS, columns}}, {"values", DType::i64, {IDS}}, {"offsets", DType::i64, {OFFSETS}}, {"weights", DType::f32, {IDS}}};
  m.outputs = {{"score", DType::f32, {BAGS}}, {"ids", DType::i64, {BAGS, 2}}};
  m.features = {{"a", "t", ROWS, false}, {"b", "t", ROWS, true}};
  m.max_batch = 512;
  m.max_ids = 1 << 16;
  m.dense_columns = columns;
  m.has_dense = m.has_ids = m.has_weights = true;
  return m;
}

int64_t check(const Request& r, int64_t columns) {
  if (r.dense.size() != size_t(columns * r.bags) || r.offsets.size() != size_t(2 * r.bags + 1) || r.weights.size() != r.values.size())
    throw Failed("the server let a request in that does not fit");
  if (r.offsets[0] != 0 || r.offsets.back() != int64_t(r.values.size())) throw Failed("the server let wrong offsets in");
  return std::count_if(r.values.begin(), r.values.end(), [](int64_t id) { return id < 0 || id >= ROWS; });
}

Answer run(const Request& r, int64_t version, int64_t columns) {
  Answer out;
  out.ids_out_of_range = check(r, columns);
  out.version = std::to_string(version);
  auto scores = std::make_shared<std::vector<float>>(r.bags);
  auto counts = std::make_shared<std::vector<int64_t>>(2 * r.bags);
  bool dawdles = false;
  for (int64_t b = 0; b < r.bags; b++) {
    const auto row = r.dense.subspan(size_t(columns * b), size_t(columns));
    double sum = double(version) + std::accumulate(row.begin(), row.end(), 0.0);
    for (int64_t f = 0; f < 2; f++)
      for (int64_t i = r.offsets[size_t(f * r.bags + b)]; i < r.offsets[size_t(f * r.bags + b + 1)]; i++) {
        const int64_t id = r.values[size_t(i)];
        if (id == FAILS) throw Failed("an id that fails");
        dawdles |= id == DAWDLES;
        if (id >= 0 && id < ROWS) sum += double(f + 1) * (f ? double(r.weights[size_t(i)]) : 1.0) * double(id);
        (*counts)[size_t(2 * b)]++, (*counts)[size_t(2 * b + 1)]++;
      }
    (*scores)[size_t(b)] = float(sum);
  }
  if (dawdles) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  out.outputs = {{DType::f32, {r.bags}, scores->data(), scores}, {DType::i64, {r.bags, 2}, counts->data(), counts}};
  return out;
}

// Reads one number: a folder's `version`, or a file of changes.
int64_t number_in(const File& file) {
  int64_t n = -1;
  if (!(std::istringstream(read(file)) >> n) || n < 0) throw Bad("there is no version in it", file.path, "a file that holds a number");
  return n;
}

}  // namespace

int main(int count, char** words) {
  struct Versions {
    std::atomic<int64_t> now = 0, kept = -1;
    void take(int64_t next) { kept = now.exchange(next); }
  };
  return command(count, words, [](const Settings& s, const std::string& path) {
    const int64_t columns = path == "bare" ? 0 : 3;
    const auto v = std::make_shared<Versions>();
    if (const size_t dash = path.rfind('-'); dash != path.npos) v->now = std::stoll(path.substr(dash + 1));
    return Model{
        manifest(columns),
        [columns](const Request& r) { return check(r, columns); },
        [v, columns](const Request& r) { return run(r, v->now, columns); },
        [v] { return std::to_string(v->now); },
        [v] { return v->kept < 0 ? std::string() : std::to_string(v->kept); },
        [v](const std::string& version) {
          if (version == std::to_string(v->now)) return;
          if (version != std::to_string(v->kept)) throw Bad("no weights of this version are kept", version, std::to_string(v->kept));
          v->take(v->kept);
        },
        [v, below = s.updates, keeps = s.keep](const std::string& name) {
          v->take(number_in(Folder(name, below).file("version")));
          if (!keeps) v->kept = -1;
        },
        [v, below = s.updates](const std::string& name) { v->now = number_in(open_file(name, below)); },
    };
  });
}
