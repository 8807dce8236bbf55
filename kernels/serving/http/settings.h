// The server's settings: flags, and the same names in a JSON file.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace funcrec::serving {

struct Settings {
  std::vector<std::string> packages;  // PATH and NAME=PATH, as models.h has them
  std::string host = "127.0.0.1";
  int64_t port = 8080;  // 0 for a free port, which is printed
  int64_t workers = 1, threads = 1;
  int64_t max_batch = 0;  // 0 for the package's
  int64_t max_body = 16 << 20, max_header = 8192, memory = 512 << 20;
  int64_t queue = 1024, connections = 1024, per_address = 512;
  double head_s = 5, timeout_s = 10, idle_s = 60, drain_s = 0.5;
  bool checksums = true;  // whether to read all weights once, at the start and at /reload
  bool canary = true;     // whether weights, also after a delta, must answer the example with finite numbers
  bool keep = true;       // whether the weights that /reload replaces stay open, for /rollback
  std::string updates;    // the folder of weights and deltas; "" refuses both
  std::string admin;      // the address for /reload and /delta, in a form of listen.h
  std::string allowed_hosts;
  bool help = false;
};

// Returns the settings of a command line, and of the file that its --settings names; a flag overrides the file. Bad for
// an unknown name or a value out of range.
Settings settings_of(const std::vector<std::string>& arguments);
std::string usage();

}  // namespace funcrec::serving
