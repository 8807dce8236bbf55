// The numbers of /metrics, in Prometheus' text format.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace funcrec::serving {

// Counts of values up to each bound, and their sum.
struct Histogram {
  std::vector<double> bounds;
  std::vector<uint64_t> counts = std::vector<uint64_t>(bounds.size() + 1);
  double sum = 0;
  void add(double x);
};

// The present load of the server.
struct Now {
  size_t queue, connections, parsing;
  int64_t memory;  // bytes
  struct Version {
    std::string model, version, kept;
  };
  std::vector<Version> versions;
};

std::string process_text();  // process_*, as Prometheus' clients report them

// Any thread may call all functions.
class Metrics {
 public:
  void answered(unsigned code);
  void predicted(double seconds);  // from the whole body to its answer
  void ran(size_t requests, int64_t bags, double seconds, int64_t ids_out_of_range);
  void ran_one_by_one();
  void waited(double seconds);  // for a worker
  void reloaded(const char* what, bool ok);  // "weights", "delta" or "rollback"
  std::string text(const Now&) const;

 private:
  mutable std::mutex mutex_;
  std::map<unsigned, uint64_t> codes_;
  std::map<std::pair<std::string, bool>, uint64_t> reloads_;
  uint64_t ids_out_of_range_ = 0, one_by_one_ = 0;
  Histogram latency_{{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}}, run_{latency_.bounds}, queue_{latency_.bounds};
  Histogram bags_{{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}}, requests_{{1, 2, 4, 8, 16, 32, 64, 128, 256}};
};

}  // namespace funcrec::serving
