// The numbers process_* that Prometheus' clients report for any process.
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "metrics.h"

namespace funcrec::serving {
namespace {

const double BEGAN = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();

void write(std::ostream& out, const char* name, const char* type, const char* help, double value) {
  out << "# HELP process_" << name << " " << help << "\n# TYPE process_" << name << " " << type << "\nprocess_" << name << " " << value << "\n";
}

}  // namespace

std::string process_text() {
  std::ostringstream out;
  out.precision(15);
  rusage used{};
  rlimit files{};
  getrusage(RUSAGE_SELF, &used), getrlimit(RLIMIT_NOFILE, &files);
  const auto seconds = [](const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  std::error_code error;
  double open = 0;
  for (std::filesystem::directory_iterator at("/proc/self/fd", error), end; !error && at != end; at.increment(error)) open++;
  write(out, "cpu_seconds_total", "counter", "processor time, in seconds", seconds(used.ru_utime) + seconds(used.ru_stime));
  write(out, "resident_memory_bytes", "gauge", "resident memory, mapped weights among it", double(resident) * double(sysconf(_SC_PAGESIZE)));
  write(out, "virtual_memory_bytes", "gauge", "virtual memory", double(pages) * double(sysconf(_SC_PAGESIZE)));
  write(out, "open_fds", "gauge", "open descriptors", open);
  write(out, "max_fds", "gauge", "the most that there may be", double(files.rlim_cur));
  write(out, "start_time_seconds", "gauge", "when it began, in seconds since 1970", BEGAN);
  return out.str();
}

}  // namespace funcrec::serving
