#include "metrics.h"

#include <algorithm>
#include <sstream>

namespace funcrec::serving {
namespace {

std::string label(const std::string& text) {
  std::string out;
  for (char c : text) out += c == '\\' ? "\\\\" : c == '"' ? "\\\"" : c == '\n' ? "\\n" : std::string(1, c);
  return out;
}

void describe(std::ostream& out, const char* name, const char* type, const char* help) {
  out << "# HELP funcrec_" << name << " " << help << "\n# TYPE funcrec_" << name << " " << type << "\n";
}

void write(std::ostream& out, const char* name, const char* help, const Histogram& h) {
  describe(out, name, "histogram", help);
  uint64_t up_to = 0;
  for (size_t i = 0; i < h.counts.size(); i++) {
    out << "funcrec_" << name << "_bucket{le=\"";
    i < h.bounds.size() ? out << h.bounds[i] : out << "+Inf";
    out << "\"} " << (up_to += h.counts[i]) << "\n";
  }
  out << "funcrec_" << name << "_sum " << h.sum << "\nfuncrec_" << name << "_count " << up_to << "\n";
}

template <class T> void write(std::ostream& out, const char* name, const char* type, const char* help, T value) {
  describe(out, name, type, help);
  out << "funcrec_" << name << " " << value << "\n";
}

}  // namespace

void Histogram::add(double x) {
  counts[size_t(std::lower_bound(bounds.begin(), bounds.end(), x) - bounds.begin())]++;
  sum += x;
}

void Metrics::answered(unsigned code) {
  std::lock_guard lock(mutex_);
  codes_[code]++;
}

void Metrics::predicted(double seconds) {
  std::lock_guard lock(mutex_);
  latency_.add(seconds);
}

void Metrics::ran(size_t requests, int64_t bags, double seconds, int64_t ids_out_of_range) {
  std::lock_guard lock(mutex_);
  requests_.add(double(requests));
  bags_.add(double(bags));
  run_.add(seconds);
  ids_out_of_range_ += uint64_t(ids_out_of_range);
}

void Metrics::ran_one_by_one() {
  std::lock_guard lock(mutex_);
  one_by_one_++;
}

void Metrics::reloaded(const char* what, bool ok) {
  std::lock_guard lock(mutex_);
  reloads_[{what, ok}]++;
}

void Metrics::waited(double seconds) {
  std::lock_guard lock(mutex_);
  queue_.add(seconds);
}

std::string Metrics::text(const Now& now) const {
  std::lock_guard lock(mutex_);
  std::ostringstream out;
  out.precision(12);
  describe(out, "requests_total", "counter", "answers by status");
  for (auto [code, n] : codes_) out << "funcrec_requests_total{code=\"" << code << "\"} " << n << "\n";
  write(out, "request_seconds", "seconds from a whole body to its answer", latency_);
  write(out, "run_seconds", "seconds of one run of the model", run_);
  write(out, "batch_bags", "bags of one run", bags_);
  write(out, "batch_requests", "requests of one run", requests_);
  write(out, "queue_seconds", "seconds that a request waited for a worker", queue_);
  write(out, "queue_length", "gauge", "requests that wait for a worker", now.queue);
  write(out, "connections", "gauge", "open connections", now.connections);
  write(out, "parsing", "gauge", "long bodies and answers that are parsed or written, not by the thread that reads and writes sockets", now.parsing);
  write(out, "body_memory_bytes", "gauge", "memory of bodies and of what is parsed of them", now.memory);
  write(out, "ids_out_of_range_total", "counter", "ids that are not in their tables", ids_out_of_range_);
  write(out, "batches_one_by_one_total", "counter", "batches that failed and were run request by request", one_by_one_);
  describe(out, "reloads_total", "counter", "weights and deltas that were put in, or refused");
  for (auto& [key, n] : reloads_)
    out << "funcrec_reloads_total{what=\"" << key.first << "\",result=\"" << (key.second ? "ok" : "refused") << "\"} " << n << "\n";
  const auto labels = [&](const Now::Version& v, const std::string& version) {  // the only model needs no name
    return "{" + (now.versions.size() > 1 ? "model=\"" + label(v.model) + "\"," : "") + "version=\"" + label(version) + "\"} 1\n";
  };
  describe(out, "version_info", "gauge", "the version of the weights");
  for (const Now::Version& v : now.versions) out << "funcrec_version_info" << labels(v, v.version);
  describe(out, "kept_version_info", "gauge", "the version that /rollback goes back to");
  for (const Now::Version& v : now.versions)
    if (!v.kept.empty()) out << "funcrec_kept_version_info" << labels(v, v.kept);
  return out.str() + process_text();
}

}  // namespace funcrec::serving
