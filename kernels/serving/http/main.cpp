// funcrec-serve: a package behind HTTP.
#include <mutex>

#include "command.h"

using namespace funcrec::serving;

namespace {

// Tells the operator of the server why a run failed, when the reason differs from the last one. The client is told too.
Answer run(const Package& package, const Request& request) {
  static std::mutex one;
  static std::string last;
  try {
    return package.run(request);
  } catch (const Failed& e) {
    std::lock_guard alone(one);
    if (last != e.what()) std::fprintf(stderr, "funcrec-serve: %s\n", (last = e.what()).c_str());
    throw;
  }
}

}  // namespace

int main(int count, char** words) {
  return command(count, words, [](const Settings& s, const std::string& path) {
    Options options;
    options.threads = int(s.threads);
    options.runners = int(s.workers);
    options.checksums = s.checksums;
    options.canary = s.canary;
    options.keep = s.keep;
    name_bus_errors();
    auto package = Package::open(path, options);
    return Model{
        package->manifest(),
        [package](const Request& r) { return package->check(r); },
        [package](const Request& r) { return run(*package, r); },
        [package] { return package->version(); },
        [package] { return package->kept(); },
        [package](const std::string& version) { package->back(version); },
        [package, below = s.updates](const std::string& folder) { package->swap(folder, below); },
        [package, below = s.updates](const std::string& file) { package->apply(file, below); },
    };
  });
}
